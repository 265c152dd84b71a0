"""Reading a node's status file, and saying what is wrong with it.

Invariant: works on a running, stopped or crashed node alike: it only reads `<dir>/status.json`
and is told whether a process holds the directory (`swarm.process.is_running`).
"""

import json
from pathlib import Path

from swarm.errors import ConfigError
from swarm.types import JsonDict, short

STALE_AFTER_S = 15.0  # the daemon writes the file every second


def read_status(directory: Path) -> JsonDict:
    """The newest status of the node that lives in `directory`.

    Raises:
        ConfigError: there is none; names the directory and the fix.
    """
    path = directory / "status.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no status; is {directory} the directory of a node that was started?") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: damaged ({error}); start the node again") from None


def problems(status: JsonDict, now_s: float, max_idle_s: float, runs: bool = True) -> list[str]:
    """Why the node is not making progress; empty when it is.

    Args:
        status: as read by `read_status`.
        now_s: wall clock.
        max_idle_s: longest time without an optimizer step.
        runs: what `is_running` says of its directory.
    """
    found: list[str] = []
    silent_s = now_s - status["at_s"]
    if not runs:
        found.append(f"the node does not run: it stopped or was killed {silent_s:.0f} s ago (pid was {status['pid']})")
    elif silent_s > STALE_AFTER_S:
        found.append(f"the node wrote nothing for {silent_s:.0f} s: it hangs (pid {status['pid']})")
    idle_s = now_s - status["last_step_at_s"]
    following = status.get("following")
    if idle_s > max_idle_s:
        what = "optimizer step" if following is None else "group"
        found.append(f"no {what} for {idle_s:.0f} s (limit {max_idle_s:.0f} s), at step {status['step']}")
    if following is not None:
        found += _following_problems(following)
    if status["num_failures"]:
        found.append(f"{status['num_failures']} loops failed unexpectedly; see the log")
    if status.get("num_events_lost"):
        found.append(f"{status['num_events_lost']} events could not be written: is the disk full?")
    if status["guard"] == "frozen":
        found.append("the coordinator advises to stop: every source is far off-policy (local limits still hold)")
    return found


def _following_problems(following: JsonDict) -> list[str]:
    found: list[str] = []
    rivals, silent = following.get("rivals"), following.get("silent", [])
    if rivals:
        names = ", ".join(map(short, rivals))
        found.append(f"the run has {len(rivals)} trainers ({names}): set follow.policy to the id of the one to follow")
    elif not following["policy"] and silent:
        names = ", ".join(map(short, silent))
        found.append(f"no trainer publishes weights (there is {names}): on the trainer set weights.publish=true")
    elif not following["policy"]:
        found.append("no trainer is in the directory: nobody to follow (follow.policy names one)")
    elif following["policy"] in silent and following["served_step"] is None:
        found.append(f"the trainer {short(following['policy'])} publishes no weights: set weights.publish=true there")
    elif not following["is_trainer_connected"]:
        found.append(f"the trainer {short(following['policy'])} does not answer: generation waits for its leave")
    if following["last_error"]:
        served = following["served_step"]
        found.append(f"the engine did not take a version and serves step {served} on: {following['last_error']}")
    return found
