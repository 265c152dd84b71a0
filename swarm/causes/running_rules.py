"""Rules about the processes of a node: whether it runs, hangs, or dies again and again."""

import re
import signal
import time
from collections import Counter
from typing import Final

from swarm.causes.disk_rules import is_status_without_room
from swarm.causes.error_rules import KNOWN
from swarm.causes.finding import Certainty, Diagnosed, Gravity
from swarm.causes.signal_rules import NO_SIGNAL, gave_up
from swarm.causes.snapshot import Snapshot, shortened
from swarm.events import (
    NODE,
    GroupGivenUp,
    LoopFailed,
    WorkerDied,
    events_of,
)
from swarm.types import short

STALE_AFTER_S: Final = 15.0  # the daemon writes status.json every second
ENDING_S: Final = 3.0  # that a process takes from its last error to its end
SIGKILL: Final = -9  # what the kernel sends to the process that takes the memory of all
FEW_STEPS: Final = 3  # since a death: it may come again
MANY_RESTARTS: Final = 8
ENDINGS: Final = frozenset(
    {
        "ended_with_error",
        "out_of_memory",
        "worker_dies",
        "disk_full",
        "cannot_be_scored",
        "cut_off",
        "all_wrong",
        "all_right",
        "all_equal",
    }
)
_ERROR_LINE: Final = re.compile(r"[\w.]+(Error|Exception|Group|Full|Unavailable): ")
_MEMORY: Final = re.compile(r"out of memory|OutOfMemory|MemoryError|can't allocate memory|Cannot allocate memory", re.I)


def broken_configuration(snapshot: Snapshot) -> Diagnosed | None:
    """node.toml is there and cannot be read."""
    if not snapshot.config_error or snapshot.runs:
        return None
    return Diagnosed(
        name="broken_configuration",
        claim=f"the configuration cannot be read, so the node cannot start: {shortened(snapshot.config_error)}",
        evidence=(f"{snapshot.directory / 'node.toml'}",),
        fix=f"mend it, then try it: swarm check --config {snapshot.directory / 'node.toml'}",
        gravity=Gravity.STOPS,
    )


def never_ran(snapshot: Snapshot) -> Diagnosed | None:
    """A directory with a configuration, in which no node came up, or not this time."""
    if snapshot.runs or snapshot.status is not None or snapshot.config is None:
        return None
    before = f"; it ran before, {len(snapshot.made)} steps" if snapshot.events else ""
    return Diagnosed(
        name="never_ran",
        claim="the node did not come up: it was not started, or it ended before it served its peers",
        evidence=(f"no status.json in {snapshot.directory}, which a node writes within seconds{before}",),
        fix=f"swarm doctor --config {snapshot.directory / 'node.toml'}; then {snapshot.start}, and read its last lines",
        gravity=Gravity.STOPS,
        follows_from=frozenset({"ended_with_error", "broken_configuration"}),
    )


def ended_with_error(snapshot: Snapshot) -> Diagnosed | None:
    """An exception ended the node itself."""
    if snapshot.is_finished:
        return None
    since = snapshot.started_at_s or 0.0
    ends = [event for event in events_of(LoopFailed, snapshot.events) if event.loop == NODE and event.at_s >= since]
    if snapshot.runs and not (ends and snapshot.now_s - ends[-1].at_s < ENDING_S):
        return None
    lines = [line.strip() for line in snapshot.log.splitlines() if line.strip()]
    is_last = bool(lines) and _ERROR_LINE.match(lines[-1]) is not None
    if not ends and not is_last:
        return None
    error = ends[-1].error if ends else lines[-1]
    where = "failure in events.jsonl" if ends else "the last line of log.txt"
    is_config = error.startswith("ConfigError")
    return Diagnosed(
        name="ended_with_error",
        claim=f"the node ended with an error: {shortened(error)}",
        evidence=(f"{where}; {len(snapshot.made)} steps were made before",),
        fix=f"change what it names (keys are in {snapshot.directory / 'node.toml'}); then {snapshot.start}"
        if is_config
        else f"mend what the traceback above that line of the node's log names; then {snapshot.start}",
        gravity=Gravity.STOPS,
        follows_from=frozenset({"out_of_memory", "disk_full"}) | (NO_SIGNAL if gave_up(snapshot) else frozenset()),
    )


def only_relays(snapshot: Snapshot) -> Diagnosed | None:
    """It neither trains nor generates."""
    if snapshot.config is None or not snapshot.only_relays:
        return None
    return Diagnosed(
        name="only_relays",
        key="roles",
        claim="this node learns and generates nothing: it only passes on what others make",
        evidence=(f"roles = {[*map(str, snapshot.config.roles)]} (node.toml)",),
        fix=f'where it is to learn: in {snapshot.directory / "node.toml"} set roles = ["trainer", "generator"]; then '
        f"{snapshot.start}",
        gravity=Gravity.NOTE,
    )


def change_waits(snapshot: Snapshot) -> Diagnosed | None:
    """node.toml was changed while the node runs, which reads it at its start."""
    if not snapshot.runs or not snapshot.changed_keys:
        return None
    return Diagnosed(
        name="change_waits",
        key=snapshot.changed_keys[0],
        claim=f"node.toml was changed after the start, and the node runs as before: {', '.join(snapshot.changed_keys)}",
        evidence=("node.toml is newer than worker.toml, which has what the node runs with",),
        fix=f"stop it (Ctrl-C), then {snapshot.start}",
        gravity=Gravity.WASTES,
        certainty=Certainty.LIKELY,
    )


def starts(snapshot: Snapshot) -> Diagnosed | None:
    """A process holds the directory and has written nothing yet."""
    if not snapshot.runs or snapshot.status is not None:
        return None
    return Diagnosed(
        name="starts",
        claim="the node is starting; its status comes in some seconds",
        evidence=(f"{snapshot.directory / 'lock'} is held, status.json is not there yet",),
        gravity=Gravity.NOTE,
    )


def does_not_run(snapshot: Snapshot) -> Diagnosed | None:
    """It ended before its last step."""
    if snapshot.runs or snapshot.is_finished or snapshot.status is None:
        return None
    ago_s = snapshot.now_s - snapshot.value("at_s", 0.0)
    if snapshot.value("was_stopped", False):
        return Diagnosed(
            name="does_not_run",
            claim=f"the node does not run: it was stopped (Ctrl-C, or a signal) {ago_s:.0f} s ago, at step "
            f"{snapshot.value('step', 0)}; {snapshot.start} goes on",
            gravity=Gravity.NOTE,
        )
    return Diagnosed(
        name="does_not_run",
        claim=f"the node does not run: it stopped or was killed {ago_s:.0f} s ago (pid was {snapshot.value('pid', 0)})",
        evidence=(f"nobody holds {snapshot.directory / 'lock'}; status.json is {ago_s:.0f} s old",),
        fix=snapshot.start,
        gravity=Gravity.WASTES,  # whoever asks mostly knows it: what else is wrong comes first
        certainty=Certainty.LIKELY,
        follows_from=ENDINGS | {each.name for each in KNOWN},
    )


def paused(snapshot: Snapshot) -> Diagnosed | None:
    """Its owner paused it."""
    if not snapshot.runs or snapshot.is_finished or snapshot.paused_since_s is None:
        return None
    return Diagnosed(
        name="paused",
        claim=f"the node is paused {paused_words(snapshot.paused_since_s)}: it generates and learns nothing",
        evidence=("paused_since_s (status.json), paused.json in its directory",),
        fix=f"swarm resume {snapshot.directory}",
        gravity=Gravity.NOTE,
    )


def paused_words(since_s: float) -> str:
    """Since when a node is paused, on this machine's clock."""
    return f"since {time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(since_s))}"


def hangs(snapshot: Snapshot) -> Diagnosed | None:
    """Its process is there, and writes no status; nor anything else, or it works on."""
    unwritten_s = snapshot.now_s - snapshot.value("at_s", snapshot.now_s)
    if not snapshot.runs or snapshot.status is None or unwritten_s <= STALE_AFTER_S:
        return None
    if is_status_without_room(snapshot):  # `disk_full` says so
        return None
    pid, evidence = snapshot.value("pid", 0), f"status.json, written every second otherwise, is {unwritten_s:.0f} s old"
    silent_s = snapshot.now_s - max((event.at_s for event in snapshot.events[-64:]), default=0.0)
    if silent_s <= STALE_AFTER_S:
        return Diagnosed(
            name="status_unwritten",
            claim="the node works and cannot write its status",
            evidence=(evidence, f"the newest event is {silent_s:.0f} s old (events.jsonl)"),
            fix=f"its newest errors are in warnings.jsonl; {snapshot.directory} must take files: {snapshot.start}",
            gravity=Gravity.HARMS,
            follows_from=frozenset({"disk_full"}),
        )
    return Diagnosed(
        name="hangs",
        claim=f"the node wrote nothing for {unwritten_s:.0f} s: it hangs (pid {pid})",
        evidence=(evidence,),
        fix=f"kill -CONT {pid}, where it was stopped (Ctrl-Z); else end it with kill {pid}, then {snapshot.start}",
        gravity=Gravity.STOPS,
        follows_from=frozenset({"disk_full", "process_stopped"}),
    )


def _deaths(snapshot: Snapshot) -> tuple[list[WorkerDied], int]:
    """Deaths of the worker since the node started, and steps made since the newest of them."""
    since = snapshot.started_at_s or 0.0
    deaths = [event for event in events_of(WorkerDied, snapshot.events) if event.at_s >= since]
    newest = deaths[-1].at_s if deaths else 0.0
    return deaths, sum(step.at_s > newest for step in snapshot.made)


def out_of_memory(snapshot: Snapshot) -> Diagnosed | None:
    """The worker is killed again and again, or says itself that memory is short."""
    deaths, num_steps = _deaths(snapshot)
    killed = [event for event in deaths if event.exit_code == SIGKILL]
    said = [event.error for event in events_of(LoopFailed, snapshot.events) if _MEMORY.search(event.error)]
    said += [line for line in snapshot.log.splitlines() if _MEMORY.search(line)][-1:]
    said += [each.fields for each in snapshot.logged if each.is_error and _MEMORY.search(each.fields)]
    if not said and (not killed or num_steps > FEW_STEPS):
        return None
    evidence = (
        [f"the worker was killed by signal 9 {len(killed)} times (worker_died in events.jsonl)"] if killed else []
    )
    evidence += [f"{num_steps} steps were made since the newest death"] if killed else []
    evidence += [f"the node says: {shortened(said[-1])}"] if said else []
    again = len(killed) > 1 or bool(said)
    return Diagnosed(
        name="out_of_memory",
        claim="the machine has too little memory for this node: its worker is killed"
        + (" again and again" if len(killed) > 1 else ""),
        evidence=tuple(evidence),
        fix=snapshot.set_key("learner.token_budget", 1024, why=" (or less), [engine] max_rows = 8")
        + "; if that is not enough: model.lora_rank = 16, a smaller model, or more memory (journalctl -k tells whether "
        "the kernel did it)",
        gravity=Gravity.STOPS,
        certainty=Certainty.LIKELY if again else Certainty.POSSIBLE,
    )


def worker_dies(snapshot: Snapshot) -> Diagnosed | None:
    """The worker ends by itself, and makes no steps in between."""
    deaths, num_steps = _deaths(snapshot)
    codes = Counter(event.exit_code for event in deaths if event.exit_code != SIGKILL)
    if not codes or num_steps > FEW_STEPS:
        return None
    errors = [line.strip() for line in snapshot.log.splitlines() if re.match(r"\s*[\w.]+(Error|Exception)\b", line)]
    errors += [each.fields for each in snapshot.logged if each.message == "worker failed"]
    said = f": {shortened(errors[-1])}" if errors else ""
    shown = ", ".join(f"{count} x {_exit_words(code)}" for code, count in codes.items())
    return Diagnosed(
        name="worker_dies",
        claim="the worker, which holds the model, ends with an error and is started again"
        + (" and again" if len(deaths) > 1 else "")
        + said,
        evidence=(f"exit codes: {shown} (worker_died in events.jsonl); {num_steps} steps since",),
        fix="read the traceback above `worker died` in the node's log (its terminal, journal, or log.txt), and mend "
        f"what it names; swarm doctor --config {snapshot.directory / 'node.toml'} finds what this machine lacks",
        gravity=Gravity.STOPS,
        follows_from=frozenset({"out_of_memory", "disk_full", "killer_group"}),
    )


def _exit_words(code: int | None) -> str:
    """An exit code; of a signal its name. Example: `SIGSEGV`."""
    if code is None or code >= 0:
        return str(code)
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def killer_group(snapshot: Snapshot) -> Diagnosed | None:
    """One group ended the worker twice and was given up."""
    given_up = events_of(GroupGivenUp, snapshot.events)
    if not given_up:
        return None
    producers = Counter(short(event.producer) if event.producer else "unknown" for event in given_up)
    return Diagnosed(
        name="killer_group",
        claim=f"{len(given_up)} groups ended the worker whenever it learned from them; they were given up",
        evidence=(
            f"their producers: {', '.join(f'{name} ({n})' for name, n in producers.most_common(5))} "
            "(given_up in events.jsonl)",
        ),
        fix="nothing, if it stays one: the producer was charged; else put its id under entry.denied, or lower "
        "generator.max_new_tokens on every node",
        gravity=Gravity.WASTES,
    )


def helpers_die(snapshot: Snapshot) -> Diagnosed | None:
    """The scoring process, or that of the DHT, is started again and again."""
    restarts: dict[str, int] = snapshot.value("restarts", {})
    num_groups = snapshot.value("num_put", 0) + snapshot.value("num_admitted", 0)
    if restarts.get("p2pd", 0) >= MANY_RESTARTS:
        what, count, fix = "the DHT's process", restarts["p2pd"], "look for p2pd in the node's log"
    elif restarts.get("sandbox", 0) >= max(MANY_RESTARTS, 0.3 * num_groups):
        what, count = "the process that scores answers", restarts["sandbox"]
        fix = "a faster reward, or more sandbox.cpu_s and sandbox.memory_bytes"
    else:
        return None
    return Diagnosed(
        name="helpers_die",
        claim=f"{what} was started again {count} times",
        evidence=(f"restarts {restarts}, {num_groups} groups (status.json)",),
        fix=f"{fix}; then {snapshot.start}",
        gravity=Gravity.WASTES,
        certainty=Certainty.LIKELY,
        follows_from=frozenset({"out_of_memory", "cannot_be_scored"}),
    )


def loops_fail(snapshot: Snapshot) -> Diagnosed | None:
    """Unexpected exceptions ended rounds of loops."""
    since = snapshot.started_at_s or 0.0
    failures = [event for event in events_of(LoopFailed, snapshot.events) if event.at_s >= since and event.loop != NODE]
    num_failures = snapshot.value("num_failures", 0) - len(_deaths(snapshot)[0])
    if num_failures <= 0 and (snapshot.status is not None or not failures):
        return None
    by_loop = Counter(event.loop.split(" ")[0] for event in failures)
    newest = failures[-1] if failures else None
    evidence = [f"num_failures {snapshot.value('num_failures', 0)} (status.json)"]
    evidence += [f"{loop}: {count} times (failure in events.jsonl)" for loop, count in by_loop.most_common(3)]
    said = f", the newest with {shortened(newest.error)}" if newest else "; see the log"
    return Diagnosed(
        name="loops_fail",
        claim=f"{max(num_failures, len(failures))} loops failed unexpectedly{said}",
        evidence=tuple(evidence),
        fix="read the traceback under `loop failed` in the node's log; what it names is a fault of this machine, of "
        "your own code, or ours: then report it",
        gravity=Gravity.HARMS,
        follows_from=frozenset({"out_of_memory", "disk_full"}),
    )
