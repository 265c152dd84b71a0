"""Rules about the process, the disk and the log of a node: it does not run, hangs, dies, or cannot write.

Invariant: each rule is a pure function of a snapshot. The table in `swarm.diagnosis.rules` orders them.
"""

import re
import signal
import time
from collections import Counter
from itertools import pairwise
from typing import Final

from swarm.diagnosis.network_rules import not_published, versions_refused
from swarm.diagnosis.reward_rules import cannot_be_scored
from swarm.diagnosis.signal_rules import gave_up
from swarm.diagnosis.snapshot import START_S, Diagnosed, Gravity, Snapshot, middle, shortened
from swarm.events import NODE, DiskFull, LoopFailed, NodeRestored, NodeStarted, StepMade, WorkerDied, events_of
from swarm.printable import as_argument
from swarm.telemetry import LoggedWarning
from swarm.telemetry.warning_log import STATUS_WITHOUT_ROOM

STALE_AFTER_S: Final = 15.0  # the daemon writes status.json every second
ENDING_S: Final = 3.0  # from the last error of a process to its end
FULL_FOR_S: Final = 60.0  # since the newest event of a full disk
SIGKILL: Final = -9  # sent by the kernel to the process that takes the memory of all
FEW_STEPS: Final = 3  # since a death: it may come again
MANY_STARTS: Final = 4
NEWEST_STARTS: Final = 6
SHORT_S: Final = 180.0  # life of a process between two starts
NEWEST_ERRORS: Final = 20
COVERED: Final = frozenset(  # logged errors that are no fault, or that have a rule of their own
    {
        STATUS_WITHOUT_ROOM,
        "loop failed",
        "worker failed",
        "worker died; starting it again",
        "events are being lost",
        "held-out accuracy fell",
        "store is full; groups of ours are dropped until there is room on the disk",
        "store is full; groups of peers are refused until it has room",
        "store is full; learning waits until there is room",
        "the engine refused a version; it keeps serving the previous one",
        "a version could not be loaded; trying again after a pause",
    }
)
_ERROR_LINE: Final = re.compile(r"[\w.]+(Error|Exception|Group|Full|Unavailable): ")
_MEMORY: Final = re.compile(r"out of memory|OutOfMemory|MemoryError|can't allocate memory|Cannot allocate memory", re.I)
_TOO_LARGE: Final = r"file too large|errno 27\b|os error 27\b"


KNOWN_ERRORS: Final = (  # name, words of the system as a regular expression, claim and fix
    (
        "port_taken",
        r"address already in use|failed to bind|errno 98\b|cannot bind|could not bind",
        "another process holds a port that this node is to listen on",
        "end the other process (ss -ltnp names it), or change the port in node.toml: exchange.listen, "
        "directory.listen, telemetry.metrics_listen or serve.listen",
    ),
    (
        "no_permission",
        r"permission denied|permissionerror|read-?only (file system|database)|not permitted|errno (13|30)\b",
        "this user may not write, or read, a file that the node needs",
        "find the owner with ls -la; then chown -R to the user that runs the node, or mount the disk for writing",
    ),
    (
        "file_gone",
        r"no such file or directory|filenotfounderror|errno 2\b",
        "a file or directory that the configuration names is not there",
        "put it back, or name the right one in node.toml",
    ),
    (
        "package_missing",
        "no module named|modulenotfounderror|importerror",
        "a Python package that this configuration needs is not installed",
        "install it where the node runs (swarm doctor says which), or choose a configuration without it",
    ),
    (
        "database_locked",
        "database (table )?is locked",
        "another process keeps a database of this node locked",
        "fuser groups.sqlite, in the directory of the node, names it: a viewer of SQLite files, a backup or a "
        "synchronised folder; end it or keep it away from this directory, then start the node again",
    ),
    (
        "too_many_files",
        r"too many open files|errno 24\b",
        "the node may not open so many files at once",
        "ulimit -n 65536 before the start (LimitNOFILE= of its service)",
    ),
    (
        "too_many_processes",
        r"can't start new thread|resource temporarily unavailable|blockingioerror|errno 11\b",
        "the node may not start so many processes and threads",
        "ulimit -u 4096 before the start (LimitNPROC= and TasksMax= of its service, pids of its container)",
    ),
    (
        "file_too_large",
        _TOO_LARGE,
        "no file of this node may grow beyond a bound of its shell or service",
        "ulimit -f unlimited before the start (LimitFSIZE= of its service)",
    ),
    (
        "disk_fails",
        r"input/output error|errno 5\b|stale file handle|errno 116\b|transport endpoint|errno 107\b",
        "the disk, or the network that leads to it, fails to read or write",
        "dmesg and smartctl say what is wrong with it; a directory of a node belongs on a local disk",
    ),
    (
        "file_damaged",
        "is not json|is not a json object|unicodedecodeerror|codec can't "
        "decode|jsondecodeerror|safetensorerror|header too (large|small)|disk image is malformed|file is not a "
        "database|unexpected end of (data|file)",
        "a file that the node reads is damaged, cut off or of another kind",
        "put back a whole one: questions are JSON lines in UTF-8, weights are whole safetensors files",
    ),
    (
        "model_not_found",
        r"localentrynotfound|repositorynotfound|gatedrepo|offline mode|couldn't connect to|huggingface\.co|is not a "
        r"local folder|incorrect_path_or_model_id",
        "the model is neither on this machine nor given by the hub",
        "model.source as a folder that is there, or a hub id, with network and, for some, a token (hf auth login)",
    ),
    (
        "nobody_answers",
        r"connection refused|name or service not known|name resolution|network is unreachable|no route to host|"
        r"errno (101|111|113)\b",
        "a server that this node needs does not answer",
        "is it running, is its address right, and is the network there?",
    ),
    (
        "device_fails",
        r"\bcuda\b|\bcudnn\b|\bnccl\b|no kernel image|nvidia",
        "the GPU, or its driver, fails",
        'nvidia-smi and swarm gpu-check say what is there; device = "cpu" does without',
    ),
)


def broken_configuration(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a node.toml that cannot be read."""
    if not snapshot.config_error or snapshot.runs:
        return None
    return Diagnosed(
        claim=f"the configuration cannot be read, so the node cannot start: {shortened(snapshot.config_error)}",
        fix=f"correct it, then try it: {snapshot.check}",
        evidence=(str(snapshot.toml),),
    )


def file_missing(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a file of questions that was moved or deleted."""
    if not snapshot.missing_files or snapshot.is_finished:
        return None
    path = shortened(snapshot.missing_files[0])
    return Diagnosed(
        claim=f"the file of questions is not there any more: {path}",
        fix=f"put it back, or write where it is now into {snapshot.toml}; then {snapshot.start}",
        evidence=(f"{path} does not exist", "node.toml"),
        key="environments.dataset",
    )


def process_stopped(snapshot: Snapshot) -> Diagnosed | None:
    """Finds processes of the node that a signal has stopped."""
    if not snapshot.runs or not snapshot.stopped_pids:
        return None
    shown = ", ".join("the node itself" if each == snapshot.pid else str(each) for each in snapshot.stopped_pids)
    return Diagnosed(
        claim=f"processes of the node are stopped (SIGSTOP, Ctrl-Z, a debugger): {shown}",
        fix=f"kill -CONT {' '.join(map(str, snapshot.stopped_pids))}",
        evidence=(f"state of process {snapshot.pid}, which holds the directory, and of its children",),
    )


def _has_status_no_room(snapshot: Snapshot) -> bool:
    """True if status.json is old because the disk is full, by a later entry in the node's log."""
    at_s = snapshot.value("at_s", 0.0)
    return any(each.message == STATUS_WITHOUT_ROOM and each.at_s >= at_s for each in snapshot.warnings)


def disk_full(snapshot: Snapshot) -> Diagnosed | None:
    """Finds writes that find no room on the disk, or in the budget of the group store."""
    full = [event for event in events_of(DiskFull, snapshot.events) if "[Errno 2]" not in event.error]  # a folder gone
    newest = full[-1] if full else None
    is_recent = newest is not None and snapshot.at_s - newest.at_s <= FULL_FOR_S
    is_full, num_lost = snapshot.value("is_store_full", False), snapshot.value("num_events_lost", 0)
    has_put_since = newest is not None and any(put.at_s > newest.at_s for put in snapshot.puts)
    is_unwritten = _has_status_no_room(snapshot)
    if not (is_full or num_lost or is_unwritten or (is_recent and not has_put_since)):
        return None
    error = "" if newest is None else shortened(newest.error)
    if any(re.search(_TOO_LARGE, each.fields, re.IGNORECASE) for each in snapshot.logged):
        return None  # SQLite calls a bound of the shell a full disk
    evidence = [f"the newest write that failed: {error} (disk_full in events.jsonl)"] if error else []
    evidence += [f"{num_lost} events could not be written (num_events_lost in status.json)"] if num_lost else []
    evidence += [f"{STATUS_WITHOUT_ROOM} (warnings.jsonl)"] if is_unwritten else []
    evidence += ["groups of this node are dropped (is_store_full in status.json)"] if is_full else []
    if "budget" in error:
        return Diagnosed(
            claim="groups of this node are dropped: the group store has used up exchange.store_bytes",
            fix=snapshot.set_key("exchange.store_bytes", 2 * 2**30, why=" (bytes, more than now)"),
            evidence=tuple(evidence),
            key="exchange.store_bytes",
        )
    lost = f"{num_lost} events could not be written" if num_lost else "what the node writes is lost"
    where = "the disk" if error or num_lost or is_unwritten else "the disk, or exchange.store_bytes,"
    return Diagnosed(
        claim=("groups of this node are dropped: " if is_full else f"{lost}: ") + f"{where} has no room; make room",
        fix=f"make room on the disk of {snapshot.directory} (df -h {snapshot.directory}); the node goes on by itself",
        evidence=tuple(evidence),
    )


def _unwritten_s(snapshot: Snapshot) -> float:
    """Age in seconds of a running node's status, if too old; 0 if it is new, or if a full disk explains the age."""
    age_s = snapshot.now_s - snapshot.value("at_s", snapshot.now_s)
    is_old = snapshot.runs and snapshot.status is not None and age_s > STALE_AFTER_S
    return age_s if is_old and not _has_status_no_room(snapshot) else 0.0


def _silent_s(snapshot: Snapshot) -> float:
    return snapshot.now_s - max((event.at_s for event in snapshot.events[-64:]), default=0.0)


def hangs(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a process that is alive but writes nothing."""
    unwritten_s, pid = _unwritten_s(snapshot), snapshot.pid
    if not unwritten_s or _silent_s(snapshot) <= STALE_AFTER_S:
        return None
    return Diagnosed(
        claim=f"the node wrote nothing for {unwritten_s:.0f} s: it hangs{_pid_words(pid)}",
        fix=f"kill -CONT {pid}, where it was stopped (Ctrl-Z); else end it with kill {pid}, then {snapshot.start}"
        if pid
        else f"end it where it was started (Ctrl-C in its terminal, or stop its service), then {snapshot.start}",
        evidence=(f"status.json, written every second otherwise, is {unwritten_s:.0f} s old",),
    )


def _pid_words(pid: int | None) -> str:
    return f" (pid {pid})" if pid else ""


def status_unwritten(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a node that works and cannot write its status."""
    unwritten_s = _unwritten_s(snapshot)
    if not unwritten_s or _silent_s(snapshot) > STALE_AFTER_S:
        return None
    return Diagnosed(
        claim="the node works and cannot write its status",
        fix=f"its newest errors are in warnings.jsonl; {snapshot.directory} must take files: {snapshot.start}",
        evidence=(f"status.json is {unwritten_s:.0f} s old, the newest event {_silent_s(snapshot):.0f} s",),
    )


def _deaths(snapshot: Snapshot) -> tuple[list[WorkerDied], int]:
    """Returns the deaths of the worker since the node started, and the number of steps made since the newest death."""
    deaths = snapshot.since_start(WorkerDied)
    newest = deaths[-1].at_s if deaths else 0.0
    return deaths, sum(step.at_s > newest for step in snapshot.made)


def out_of_memory(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a worker that is killed, or errors that report a lack of memory."""
    deaths, num_steps = _deaths(snapshot)
    killed = [event for event in deaths if event.exit_code == SIGKILL]
    errors = [event.error for event in events_of(LoopFailed, snapshot.events) if _MEMORY.search(event.error)]
    errors += [line for line in snapshot.log.splitlines() if _MEMORY.search(line)][-1:]
    errors += [each.fields for each in snapshot.logged if each.is_error and _MEMORY.search(each.fields)]
    if not errors and (not killed or num_steps > FEW_STEPS):
        return None
    evidence = [f"killed by signal 9 {len(killed)} times (worker_died in events.jsonl)"] if killed else []
    evidence += [f"{num_steps} steps were made since the newest death"] if killed else []
    evidence += [f"the node says: {shortened(errors[-1])}"] if errors else []
    return Diagnosed(
        claim="the machine has too little memory for this node: its worker is killed"
        + (" again and again" if len(killed) > 1 else ""),
        fix=snapshot.set_key("learner.token_budget", 1024, why=" (or less), [engine] max_rows = 8")
        + "; if that is not enough: model.lora_rank = 16, a smaller model, or more memory (journalctl -k tells whether "
        "the kernel did it)",
        evidence=tuple(evidence),
    )


def known_error(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a failure by a known error text of the operating system, of Python or of a library."""
    failures = (
        *(ended_with_error, never_ran, restarts_often, worker_dies, loops_fail, status_unwritten, logged_errors),
        *(cannot_be_scored, versions_refused, not_published),
    )
    if all(rule(snapshot) is None for rule in failures):
        return None
    logged = [each.fields for each in snapshot.logged if each.is_error]
    lines = [line for line in snapshot.log.splitlines() if "Error" in line]
    errors = [*lines, *logged, *snapshot.errors][-NEWEST_ERRORS:]
    for name, words, claim, fix in KNOWN_ERRORS:
        found = [error for error in errors if re.search(words, error, re.IGNORECASE)]
        if found:
            return Diagnosed(
                name=name,
                claim=f"{claim}: {shortened(found[-1])}",
                fix=fix,
                evidence=(f"{len(found)} of the newest {len(errors)} errors (events.jsonl, warnings.jsonl, log.txt)",),
            )
    return None


def _ending(snapshot: Snapshot) -> Diagnosed | None:
    """Finds the exception that ended the node itself."""
    if snapshot.is_finished:
        return None
    ends = [event for event in snapshot.since_start(LoopFailed) if event.loop == NODE]
    if snapshot.runs and not (ends and snapshot.now_s - ends[-1].at_s < ENDING_S):
        return None
    lines = [line.strip() for line in snapshot.log.splitlines() if line.strip()]
    if not ends and not (lines and _ERROR_LINE.match(lines[-1])):
        return None
    error = ends[-1].error if ends else lines[-1]
    where = "failure in events.jsonl" if ends else "the last line of log.txt"
    fix = f"correct what the traceback above that line of the node's log names; then {snapshot.start}"
    if error.startswith("Unavailable"):  # said in full, without a traceback
        fix = f"the words above say what did not answer; {snapshot.start} tries again"
    if error.startswith("ConfigError"):
        fix = f"change what it names (keys are in {snapshot.toml}); then {snapshot.start}"
    return Diagnosed(
        claim=f"the node ended with an error: {shortened(error)}",
        fix=fix,
        evidence=(f"{where}; {len(snapshot.made)} steps were made before",),
    )


def ended_with_error(snapshot: Snapshot) -> Diagnosed | None:
    """Finds an exception that ended the node, unless the node gave up because its groups taught nothing."""
    return None if gave_up(snapshot) else _ending(snapshot)


def gave_up_learning(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a training that stopped because its groups had no signal; rules about rewards precede this one."""
    return _ending(snapshot) if gave_up(snapshot) else None


def never_ran(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a directory with a configuration and without a status: no node came up in it, or not this time."""
    if snapshot.runs or snapshot.status is not None or snapshot.config is None:
        return None
    before = f"; it ran before, {len(snapshot.made)} steps" if snapshot.events else ""
    return Diagnosed(
        claim="the node did not come up: it was not started, or it ended before it served its peers",
        fix=f"swarm doctor {as_argument(snapshot.directory)}; then {snapshot.start}, and read its last lines",
        evidence=(f"no status.json in {snapshot.directory}, which a node writes within seconds{before}",),
    )


def worker_dies(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a worker that dies with errors and makes no steps in between."""
    deaths, num_steps = _deaths(snapshot)
    codes = Counter(event.exit_code for event in deaths if event.exit_code != SIGKILL)
    if not codes or num_steps > FEW_STEPS:
        return None
    errors = [line.strip() for line in snapshot.log.splitlines() if re.match(r"\s*[\w.]+(Error|Exception)\b", line)]
    errors += [each.fields for each in snapshot.logged if each.message == "worker failed"]
    shown = ", ".join(f"{count} x {_exit_words(code)}" for code, count in codes.items())
    return Diagnosed(
        claim="the worker, which holds the model, ends with an error and is started again"
        + (" and again" if len(deaths) > 1 else "")
        + (f": {shortened(errors[-1])}" if errors else ""),
        fix="read the traceback above `worker died` in the node's log (its terminal, journal, or log.txt), and correct "
        f"what it names; swarm doctor {as_argument(snapshot.directory)} finds what this machine lacks",
        evidence=(f"exit codes: {shown} (worker_died in events.jsonl); {num_steps} steps since",),
    )


def _exit_words(code: int | None) -> str:
    """Describes an exit code; for a signal, by its name, such as `SIGSEGV`."""
    if code is None or code >= 0:
        return str(code)
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def restarts_often(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a node that is restarted again and again, after minutes or without steps in between."""
    starts_at = [event.at_s for event in events_of(NodeStarted, snapshot.events)][-NEWEST_STARTS:]
    if len(starts_at) < MANY_STARTS or not events_of(NodeRestored, snapshot.events) or snapshot.is_finished:
        return None
    steps = [step for step in events_of(StepMade, snapshot.events) if step.at_s > starts_at[0]]
    lived_s = middle([later - earlier for earlier, later in pairwise(starts_at)])
    if steps and (lived_s > SHORT_S or snapshot.at_s - starts_at[-1] > max(START_S, 3 * lived_s)):
        return None
    num_new = max((step.step for step in steps), default=0) - min((step.step for step in steps), default=0)
    between = f"made {num_new} new steps of {len(steps)}" if steps else "made no step in between"
    return Diagnosed(
        claim=f"the node was started {len(starts_at)} times and {between}: it lives {lived_s:.0f} s each time",
        fix="read the last lines of its log before each start; a service manager (systemd, a container, cron) that "
        "ends and starts it again hides them: journalctl -u tells who does",
        evidence=(f"started in events.jsonl, within {starts_at[-1] - starts_at[0]:.0f} s",),
        gravity=Gravity.WASTES if steps else Gravity.STOPS,
    )


def loops_fail(snapshot: Snapshot) -> Diagnosed | None:
    """Finds unexpected exceptions that ended rounds of loops."""
    failures = [event for event in snapshot.since_start(LoopFailed) if event.loop != NODE]
    num_failures = snapshot.value("num_failures", 0) - len(_deaths(snapshot)[0])
    if num_failures <= 0 and (snapshot.status is not None or not failures):
        return None
    by_loop = Counter(event.loop.split(" ")[0] for event in failures)
    newest = f", the newest with {shortened(failures[-1].error)}" if failures else "; see the log"
    return Diagnosed(
        claim=f"{max(num_failures, len(failures))} loops failed unexpectedly{newest}",
        fix="read the traceback under `loop failed` in the node's log; what it names is a fault of this machine, of "
        "your own code, or ours: then report it",
        evidence=(
            f"num_failures {snapshot.value('num_failures', 0)} (status.json)",
            *(f"{loop}: {count} times (failure in events.jsonl)" for loop, count in by_loop.most_common(3)),
        ),
    )


def logged_errors(snapshot: Snapshot) -> Diagnosed | None:
    """Finds errors in the node's log that no other rule knows."""
    errors = [each for each in snapshot.logged if each.is_error and each.message not in COVERED]
    if not errors:
        return None
    return Diagnosed(
        claim=f"the node logged an error: {_words(errors[-1])}",
        fix=f"correct what it names; then {snapshot.start}",
        evidence=tuple(f"{each.count} times: {_words(each)} (warnings.jsonl)" for each in reversed(errors[-3:])),
    )


def _words(logged: LoggedWarning) -> str:
    return shortened(f"{logged.message}: {logged.fields}" if logged.fields else logged.message)


def change_waits(snapshot: Snapshot) -> Diagnosed | None:
    """Finds changes of node.toml after the start of the node that runs."""
    if not snapshot.runs or not snapshot.changed_keys:
        return None
    return Diagnosed(
        claim=f"node.toml was changed after the start, and the node runs as before: {', '.join(snapshot.changed_keys)}",
        fix=f"stop it (Ctrl-C), then {snapshot.start}",
        key=snapshot.changed_keys[0],
    )


def does_not_run(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a node that ended before its last step."""
    if snapshot.runs or snapshot.is_finished or snapshot.status is None:
        return None
    ago_s = snapshot.now_s - snapshot.value("at_s", 0.0)
    if gave_up(snapshot):
        return Diagnosed(
            claim=f"the node does not run: it gave up {ago_s:.0f} s ago, as in none of its groups did rewards differ; "
            f"swarm why {as_argument(snapshot.directory)} says more",
            gravity=Gravity.NOTE,
        )
    if snapshot.value("was_stopped", False):
        return Diagnosed(
            claim=f"the node does not run: it was stopped (Ctrl-C, or a signal) {ago_s:.0f} s ago, at step "
            f"{snapshot.value('step', 0)}; {snapshot.start} goes on",
            gravity=Gravity.NOTE,
        )
    return Diagnosed(
        claim=f"the node does not run: it stopped or was killed {ago_s:.0f} s ago",
        fix=snapshot.start,
        evidence=(f"nobody holds {snapshot.directory / 'lock'}; status.json is {ago_s:.0f} s old",),
    )


# --- notes ------------------------------------------------------------------------------------------------


def starts(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a process that has locked the directory and written nothing yet."""
    if not snapshot.runs or snapshot.status is not None:
        return None
    return Diagnosed(
        claim=f"the node is starting{_pid_words(snapshot.pid)}; its status comes once its parts are up",
        evidence=(f"{snapshot.directory / 'lock'} is held, status.json is not there yet",),
    )


def paused(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a node that its owner paused."""
    if not snapshot.runs or snapshot.is_finished or snapshot.paused_since_s is None:
        return None
    return Diagnosed(
        claim=f"the node is paused {paused_words(snapshot.paused_since_s)}: it generates and learns nothing",
        fix=f"swarm resume {as_argument(snapshot.directory)}",
    )


def paused_words(since_s: float) -> str:
    """Describes the start of a pause, by this machine's clock."""
    return f"since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(since_s))}"


def only_relays(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a node that neither trains nor generates."""
    if snapshot.config is None or not snapshot.only_relays:
        return None
    return Diagnosed(
        claim="this node learns and generates nothing: it only passes on what others make",
        fix=f'to let it learn: in {snapshot.toml} set roles = ["trainer", "generator"]; then {snapshot.start}',
        evidence=(f"roles = {[*map(str, snapshot.config.roles)]} (node.toml)",),
        key="roles",
    )


def finished(snapshot: Snapshot) -> Diagnosed | None:
    """Finds a node that made all its steps."""
    if not snapshot.is_finished:
        return None
    step = snapshot.value("step", 0)
    is_train = snapshot.start.startswith("swarm train")
    more = snapshot.start if is_train else snapshot.set_key("learner.num_steps", 2 * step)
    state = "the node only serves others now" if snapshot.runs else "the node ended as it should"
    return Diagnosed(
        claim=f"every step is made ({step}): {state}",
        fix=f"for more of them: {more}",
        evidence=(f"is_finished (status.json); learner.num_steps = {step} or less was asked for",),
    )
