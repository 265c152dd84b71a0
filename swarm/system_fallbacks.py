"""Table of Linux features that other systems lack: a check for each, and the fallback without it.

Invariant: each check tests for the very call or file that the code with the fallback needs. Confinement is not listed:
it has no fallback (`swarm.environments.sandbox.confinement_check`).
"""

import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from swarm import process
from swarm.addresses import has_whole_loopback
from swarm.environments.sandbox.verifier import cpu_s_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Fallback:
    """A system feature with the check for it, and the behaviour without it."""

    name: str
    is_needed: Callable[[], bool]  # True if this system lacks the feature
    instead: str  # behaviour without the feature, for people


FALLBACKS: Final = (
    Fallback(
        name="signal at a parent's end",
        is_needed=lambda: not process.has_parent_signal(),
        instead="a worker looks once a second if its node still runs; what scores answers ends when its socket does",
    ),
    Fallback(
        name="id of the machine's start",
        is_needed=lambda: not process.BOOT_ID.exists(),
        instead="the minute of the start stands for it, so where the clock is set a store may take itself for one of "
        "before a power cut: neighbours ask for its newest groups again",
    ),
    Fallback(
        name="bytes that a process wrote",
        is_needed=lambda: process.written_bytes() is None,
        instead="status and metrics count none, and CPU alone is a sign of life of a process that writes for minutes",
    ),
    Fallback(
        name="CPU time of a scoring process",
        is_needed=lambda: cpu_s_of(os.getpid()) == math.inf,
        instead="groups of other nodes are charged for the time that passed, so a busy machine scores fewer of them",
    ),
    Fallback(
        name="memory limit of a container",
        is_needed=lambda: sys.platform == "linux" and not (process.CONTROL_GROUPS / "cgroup.controllers").exists(),
        instead="the machine's memory counts as free, also where a container (control groups, version 2) has less",
    ),
    Fallback(
        name="addresses 127.0.0.0/8",
        is_needed=lambda: not has_whole_loopback(),
        instead="all nodes that reach this one through relays share the bounds of one address",
    ),
    Fallback(
        name="fork after imports",
        is_needed=lambda: not process.can_fork_after_imports(),
        instead="swarm simulate starts each process anew, which takes seconds and memory for each",
    ),
    Fallback(
        name="cores of a process",
        is_needed=lambda: not hasattr(os, "sched_getaffinity"),
        instead="all cores of the machine are counted, also where this process may use fewer",
    ),
    Fallback(
        name="flags of the processor",
        is_needed=lambda: not Path("/proc/cpuinfo").exists(),
        instead="measured speeds are remembered by the processor's family alone, which two machines may share",
    ),
)


def needed_fallbacks() -> list[Fallback]:
    """Fallbacks in use on this system, in the order of FALLBACKS."""
    return [each for each in FALLBACKS if each.is_needed()]
