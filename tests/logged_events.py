"""Events and event logs of a node, where a test gives only the fields that it is about."""

from collections.abc import Iterable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from swarm.clock import ManualClock
from swarm.events import Event, GroupUse
from swarm.telemetry import EventLog

ADA, BELL = "a" * 64, "b" * 64
Kind = TypeVar("Kind", bound=Event | GroupUse)
_PLAIN: Final[dict[str, Any]] = {
    **{"digest": "d", "producer": ADA, "policy_id": ADA, "via": ADA, "node_id": ADA, "env": "sort", "split": "all"},
    **{"oldest_step": 0, "size_bytes": 500, "reward_mean": 0.5, "age_s": 0.0, "age_steps": 1, "is_own_policy": True},
    **{"step": 0, "draw_step": 0, "loss": 0.0, "grad_norm": 1.0, "num_tokens": 10, "groups": (), "reason": "too_old"},
    **{"max_age_steps": 4, "max_reuse": 1, "accuracy": 0.5, "num_problems": 64, "majority_baseline": 0.1},
}


def make(kind: type[Kind], **given: Any) -> Kind:
    """An event with the given fields, and a plain value in every other one that has no default."""
    needed = [each.name for each in fields(cast("Any", kind)) if each.default is MISSING is each.default_factory]
    return kind(**{name: _PLAIN[name] for name in needed if name not in given} | given)


def write_events(path: Path, events: Iterable[Event], start_s: float = 1_700_000_000.0, every_s: float = 60.0) -> None:
    """Writes a log of these events to a file, one after the other at equal distances."""
    clock = ManualClock(start_s)
    log = EventLog(path, clock)
    for event in events:
        log.write(event)
        clock.advance(every_s)
    log.close()
