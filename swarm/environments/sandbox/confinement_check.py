"""Tests from inside that a scoring process is confined; refuses answers of other machines if it is not.

Invariant: a limit counts as in force only if a process under that limit tried to break it and was refused. The
code that tries it uses the standard library only.
"""

import os
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from io import IOBase
from pathlib import Path
from typing import TYPE_CHECKING, Final

from swarm.errors import ConfigError

if TYPE_CHECKING:
    from swarm.config import NodeConfig

TESTED: Final = ("network", "files", "processes")
"""Limits that must be in force before an answer of another machine may reach code that is not closed (`_CLOSED`)."""
# Kinds that judge an answer by code of this package alone, which compares it or reads it by a grammar of its own. The
# others pass it to code of a user or a library, or execute it.
_CLOSED: Final = frozenset(
    {"char", "jsonl", "calculator", "look_up", "grid_world", "apps", "dialogue", "nim", "notes"}
)  # `retry` is as its inner environment is
FIX: Final = (
    "Confinement needs Linux on x86-64 or arm64 with seccomp, and Landlock (5.13 or newer, named in lsm=) or user "
    'namespaces. Without it set exchange = "own" for these environments, leave them out, or train alone: '
    'directory.kind = "none"'
)
_OUTSIDE: Final = (sys.executable, "/etc/passwd", "/etc/hosts")


def file_outside(places: Iterable[Path]) -> str:
    """Path of a file that can be read now and lies below none of `places`; "" if there is none."""
    roots = {place.resolve() for place in places}
    for path in map(Path, _OUTSIDE):
        if not roots.intersection({path.resolve(), *path.resolve().parents}) and not _is_refused(path.open):
            return str(path)
    return ""


def refusals(outside: str) -> dict[str, bool]:
    """Tries to open a socket and a file, and to start a process.

    Args:
        outside: file that could be read before the limits (`file_outside`); "": reading counts as not refused.

    Returns:
        Name of each of TESTED -> True if the system refused every attempt.
    """
    families = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
    return {
        "network": all(_is_refused(partial(socket.socket, family)) for family in families),
        "files": bool(outside) and _is_refused(Path(outside).open),
        "processes": _is_refused(_start_process),
    }


def _is_refused(attempt: Callable[[], object]) -> bool:
    try:
        made = attempt()
    except OSError:
        return True
    if isinstance(made, IOBase | socket.socket):
        made.close()
    return False


def _start_process() -> None:
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def missing_limits(limits: Mapping[str, bool]) -> list[str]:
    """Limits of TESTED that are not in force."""
    return [name for name in TESTED if not limits.get(name, False)]


def refusal(config: "NodeConfig", limits: Mapping[str, bool]) -> str:
    """Reason why a node must not score answers of other machines here; "" if it may.

    Args:
        config: configuration of the node.
        limits: name of each limit of its scoring processes -> True if it is in force.
    """
    exposed, missing = exposed_environments(config), missing_limits(limits)
    if not exposed or not missing or config.is_on_one_machine:
        return ""
    return (
        f"environments {', '.join(exposed)}: answers of other machines reach code there, and the process that scores "
        f"them is not confined here: {', '.join(missing)} were tried and not refused. {FIX}"
    )


def exposed_environments(config: "NodeConfig") -> list[str]:
    """Names and kinds of the environments where answers of other machines reach code that is not closed."""
    if config.is_alone:
        return []
    kinds = {each.name: (each.inner or each).kind for each in config.environments if each.exchange != "own"}
    return [f"{name} ({kind})" for name, kind in kinds.items() if kind not in _CLOSED]


async def require_confinement(
    config: "NodeConfig", limits_in_force: Callable[[], Awaitable[Mapping[str, bool]]]
) -> bool:
    """Starts a scoring process and checks its confinement, if answers of others may reach code that is not closed.

    Args:
        config: configuration of the node.
        limits_in_force: starts a scoring process and returns its limits (`SandboxVerifier.limits_in_force`).

    Returns:
        False if the process is not confined, so that only nodes of this machine may be dialled; else True.

    Raises:
        ConfigError: the process is not confined, and the node knows addresses beyond this machine; the message names
            environments, limits and the fix.
        RolloutFailed: the process does not start.
    """
    if not exposed_environments(config):
        return True
    limits = await limits_in_force()
    if reason := refusal(config, limits):
        raise ConfigError(reason)
    return not missing_limits(limits)
