"""Reading a node's status file, and saying what is wrong with it.

Invariant: works on a running, stopped or crashed node alike: it only reads `<dir>/status.json`,
and asks the kernel whether a process holds `<dir>/lock`.
"""

import fcntl
import json
import os
from pathlib import Path

from swarm.errors import ConfigError
from swarm.types import JsonDict

LOCK = "lock"  # held by the daemon as long as it lives, however it ends
STALE_AFTER_S = 15.0  # the daemon writes the file every second


def lock_directory(directory: Path) -> int:
    """Takes a node's directory for this process, until the returned descriptor is closed or the process ends.

    Raises:
        ConfigError: another node runs there.
    """
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(f"{directory}: a node runs there already; stop it, or give this one another dir") from None
    return descriptor


def is_running(directory: Path) -> bool:
    """Whether a process holds the directory; True as well where that cannot be told (another user's file)."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except PermissionError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


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
    if idle_s > max_idle_s:
        found.append(f"no optimizer step for {idle_s:.0f} s (limit {max_idle_s:.0f} s), at step {status['step']}")
    if status["num_failures"]:
        found.append(f"{status['num_failures']} loops failed unexpectedly; see the log")
    if status["guard"] == "frozen":
        found.append("the coordinator advises to stop: every source is far off-policy (local limits still hold)")
    return found
