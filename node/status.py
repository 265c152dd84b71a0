"""Reader of a node's status file: its figures as rows in words, and the problems that keep the node from progress.

Invariant: works on a running, stopped or crashed node alike, in the process of the reader: the node itself writes
`<dir>/status.json` (`node.status_figures`) and does not import this module.
"""

from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Final

from node.status_figures import COMPUTE_FILE, STATUS
from swarm.activity import Activity
from swarm.config.byte_sizes import byte_words
from swarm.diagnosis import Snapshot, status_findings
from swarm.diagnosis.learning_rules import set_aside_words, waiting_words
from swarm.diagnosis.process_rules import STALE_AFTER_S, paused_words
from swarm.diagnosis.status_file import read_status_file
from swarm.errors import ConfigError, Unavailable
from swarm.printable import as_argument, printable
from swarm.process import is_running, lock_holder
from swarm.telemetry.warning_log import read_warnings
from swarm.trained.learning_evidence import LearningEvidence
from swarm.types import JsonDict, short

_NEEDED: Final = ("node_id", "at_s", "last_step_at_s", "pid", "step", "num_failures", "advice")
OLD_NEWS_S: Final = 10.0  # of a sign of life: most come every second


def read_status(directory: Path) -> JsonDict:
    """The newest status of the node that lives in `directory`.

    Raises:
        ConfigError: there is no status, or it is damaged or not readable; the message names the directory and the fix.
        Unavailable: the node is starting.
    """
    path = directory / STATUS
    try:
        status = read_status_file(path)
    except FileNotFoundError:
        if is_running(directory):
            pid = lock_holder(directory)
            starting = f"the node is starting{f' (pid {pid})' if pid else ''}"
            raise Unavailable(f"{directory}: {starting}; its status comes once its parts are up") from None
        if (directory / "events.jsonl").exists():
            raise ConfigError(
                f"{path}: no status: the node ended before it had one; swarm why {as_argument(directory)}"
            ) from None
        raise ConfigError(f"{path}: no status; is {directory} the directory of a node that was started?") from None
    except NotADirectoryError:
        raise ConfigError(f"{directory} is a file; give the directory of a node") from None
    except PermissionError:
        raise ConfigError(f"{path}: only the user who runs the node may read it") from None
    except ValueError as error:
        raise ConfigError(f"{path}: damaged ({error}); start the node again") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    missing = [key for key in _NEEDED if status.get(key) is None]
    if missing:
        raise ConfigError(f"{path}: damaged (no {', '.join(missing)}); start the node again")
    if computes_in := computed_in(directory):
        status["computes_in"] = computes_in
    return status


def learning_lines(status: JsonDict, evidence: LearningEvidence) -> tuple[str, ...]:
    """Evidence of learning in lines; () for a node without a learner."""
    is_trainer = "own_since_step" in status or "learns_from_others" in status
    return evidence.lines if is_trainer or evidence.changes else ()


def status_rows(status: JsonDict) -> list[tuple[str, str]]:
    """Rows of `swarm status`, as name and value; ids are whole, so that they can be copied."""
    shown = [(key, str(status.get(key, ""))) for key in ("name", "node_id", "run_id")]
    step = f"{status['step']}{' (finished: every step is made)' if status.get('is_finished') else ''}"
    shown.append(("step", "not known yet: the model is being loaded" if status.get("is_loading") else step))
    if status.get("worker") and not status.get("is_finished"):
        shown.append(("does", activity_words(status)))
    if status.get("paused_since_s") is not None:
        shown.append(("paused", f"{paused_words(status['paused_since_s'])}; swarm resume goes on"))
    if status.get("computes_in"):
        shown.append(("computes in", status["computes_in"]))
    following = status.get("following")
    if following is not None:
        shown.append(("follows", _describe_following(following)))
    if status.get("published_step") is not None:
        shown.append(
            ("published", f"step {status['published_step']}, to {', '.join(status.get('followers', ())) or 'nobody'}")
        )
    if status.get("reach"):
        shown.append(("reached", _describe_reach(status["reach"], status.get("relayed") or {})))
    alone = "none: this node is alone" if following is None else "none"
    standing = status.get("standing", {})
    peers = [f"{peer} ({standing[peer]})" if standing.get(peer) else peer for peer in status.get("peers", [])]
    peers += [f"{peer} (reads from this node)" for peer in status.get("readers", []) if peer not in status["peers"]]
    shown.append(("peers", ", ".join(peers) or alone))
    if status.get("dht"):
        shown.append(("bootstrap", ", ".join(status["dht"])))
    answers = {None: "none", True: "answers", False: "does not answer; the node goes on without it"}
    refusal = status.get("coordinator_refusal")
    shown.append(("coordinator", refusal or answers[status.get("is_coordinator_reachable")]))
    if waiting := waits_for(status):
        shown.append(("waits for", waiting))
    if set_aside := set_aside_words(status.get("guard") or {}):
        shown.append(("guard", set_aside))
    if status.get("clock"):
        shown.append(("clock", status["clock"]))
    if "who_counts" in status:
        shown.append(("counts in full", status["who_counts"]))
    if "environments" in status:
        shown.append(("episodes", ", ".join(f"{name} {kind}" for name, kind in status["environments"].items())))
    if disk := _disk_words(status):
        shown.append(("disk", disk))
    shown += _figures(status)
    counts = ("num_local_used", "num_external_used", "num_set_aside", "num_entry_refused")
    return shown + [(key, str(status.get(key, ""))) for key in counts]


def computed_in(directory: Path) -> str:
    """The dtype that a node's worker computes in, in words; "" if the worker did not write it."""
    path = directory / COMPUTE_FILE
    if not path.is_file():  # such as a pipe, which would be waited for
        return ""
    with suppress(OSError), path.open("rb") as file:
        return printable(file.read(200).decode(errors="replace")).partition("\n")[0]
    return ""


def activity_words(status: JsonDict) -> str:
    """Activity of the worker and the age of that news; "" if it sent none, as in an older release."""
    activity = Activity.read(status.get("worker"))
    if activity is None:
        return ""
    since_s = status["at_s"] - activity.at_s
    return activity.words() + (f", unchanged for {since_s:.0f} s" if since_s >= OLD_NEWS_S else "")


def node_name(directory: Path, status: JsonDict) -> str:
    """Name that the owner gave the node, else the name of its directory."""
    name = str(status.get("name") or "")
    is_id = name == short(str(status.get("node_id", "")))  # an older release wrote it where there was no name
    return directory.resolve().name if is_id or not name else name


def _describe_reach(reach: JsonDict, relayed: JsonDict) -> str:
    if reach["kind"] == "outward":
        relays = [f"{each['node_id'][:8]} at {each['endpoint']} ({each['delay_ms']} ms)" for each in reach["relays"]]
        return f"through {', '.join(relays) or 'nobody yet'}: others cannot dial this node ({reach['detail']})"
    num_nodes = relayed.get("reservations", 0)
    passes = f"; passes on for {num_nodes} node{'s that are' if num_nodes > 1 else ' that is'} not" if num_nodes else ""
    if passes and relayed.get("connections") and not relayed.get("sockets"):
        passes += ", which costs more as nobody reached exchange.relay_port"
    is_tried = bool(reach.get("host"))  # as those saw it who tried
    dialled = "dialled by others" if is_tried else "dialled by others, as configured and not tried"
    if reach.get("detail"):
        dialled = f"dialled by others, but not by each that tried ({reach['detail']})"
    words = {
        "dialable": dialled,
        "local": "from this machine alone: it listens on a loopback address (exchange.listen)",
    }
    return f"{words.get(reach['kind'], 'not tried: nobody was there to ask')}{passes}"


def disk_bytes(directory: Path) -> int:
    """Bytes that the files of a node's directory take now (blocking)."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(OSError):  # deleted since
            total += path.lstat().st_size
    return total


def _disk_words(status: JsonDict) -> str:
    taken, most, written = (status.get(key) for key in ("disk_bytes", "max_disk_bytes", "written_bytes"))
    parts = [f"{byte_words(taken)} taken"] if taken is not None else []
    parts[:1] = [f"{parts[0]} of {byte_words(most)}"] if parts and most else parts
    return ", ".join(parts + ([] if written is None else [f"{byte_words(written)} written since this start"]))


def _figures(status: JsonDict) -> list[tuple[str, str]]:
    """Figures of progress, in words; figures that an older release did not write are left out."""
    shown: list[tuple[str, str]] = []
    if status.get("reward_mean") is not None:
        shown.append(("reward", f"{status['reward_mean']:.3f}, of the newest own groups"))
    if status.get("started_at_s"):
        seconds = max(1e-9, status["at_s"] - status["started_at_s"])
        speed = f", {status.get('tokens_generated', 0) / seconds:,.0f} tokens/s generated"
        shown.append(("runs for", f"{timedelta(seconds=round(seconds))}{speed}"))
    evaluations = {
        name.replace("/", " ").replace("_", " "): value for name, value in status.get("evaluations", {}).items()
    }
    shown.append(
        ("success", ", ".join(f"{name} {value:.2f}" for name, value in evaluations.items()) or "not yet known")
    )
    refused = ", ".join(f"{reason} {count}" for reason, count in status.get("refusals", {}).items())
    return [*shown, ("refused", refused or "no group of others")]


def _describe_following(following: JsonDict) -> str:
    if not following["policy"]:
        candidates = [*following["candidates"], *following["trainers_without_weights"]]
        return f"nobody (trainers: {', '.join(candidates) or 'none'})"
    connected = "connected" if following["is_trainer_connected"] else "not connected"
    if following["served_step"] is None:
        return f"{following['policy']} ({connected}; no version was taken yet)"
    steps = f"step {following['served_step']} is served, {following['head_step']} is the newest"
    return f"{following['policy']} ({connected}; {steps})"


def problems(
    status: JsonDict, now_s: float, max_idle_s: float, runs: bool = True, directory: Path = Path("swarm-node")
) -> list[str]:
    """Reasons why the node makes no progress; [] if it does. `swarm why` has the same rules, and more of them.

    Args:
        status: result of `read_status`.
        now_s: wall clock.
        max_idle_s: longest time without an optimizer step.
        runs: result of `is_running` for its directory.
        directory: directory of the node, for the commands in the messages and the warnings since an old status.
    """
    is_old = runs and now_s - status.get("at_s", now_s) > STALE_AFTER_S
    warnings = tuple(read_warnings(directory)) if is_old else ()
    snapshot = Snapshot(
        now_s=now_s,
        directory=directory,
        status=status,
        max_idle_s=max_idle_s,
        runs=runs,
        warnings=warnings,
        pid=lock_holder(directory) if is_old else None,
    )
    return [found.claim for found in status_findings(snapshot)]


def waits_for(status: JsonDict) -> str:
    """Groups that the learner waits for while no step is possible from the groups that came; "" otherwise."""
    return waiting_words(Snapshot(now_s=0.0, status=status))
