"""Events and event logs of a node, where a test gives only the fields that it is about."""

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final, TypeVar, cast, get_type_hints

from swarm.clock import ManualClock
from swarm.events import Event, GroupUse, PolicyEvaluated
from swarm.telemetry import EventLog
from swarm.types import EdgeReport, WarmUpReport

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


def evaluated(step: int, right: Sequence[int], env: str = "sort", **changes: Any) -> PolicyEvaluated:
    """A held-out evaluation with so many right tries at each problem, -1 for a problem that was not scored."""
    known, tries = [each for each in right if each >= 0], changes.get("num_tries", 1)
    figures: dict[str, Any] = {
        **{"accuracy": sum(known) / len(known) / tries, "num_problems": len(known), "majority_baseline": 0.1},
        **{"num_right": tuple(right), "problems": "p", "split": "held_out"},
    }
    return PolicyEvaluated(step=step, env=env, **figures | changes)


def write_events(path: Path, events: Iterable[Event], start_s: float = 1_700_000_000.0, every_s: float = 60.0) -> None:
    """Writes a log of these events to a file, one after the other at equal distances."""
    clock = ManualClock(start_s)
    log = EventLog(path, clock)
    for event in events:
        log.write(event)
        clock.advance(every_s)
    log.close()


_USE = GroupUse(digest="d", producer="p", policy_id="p", age_steps=1, is_own_policy=True)
_EDGE = EdgeReport(source="p", num_groups=1, age_mean_steps=1.0, ess_share=0.5, mismatch_kl=0.1, reward_mean=0.2)
_VALUES: dict[str, Any] = {
    "endpoints": ("a:1", "b:2"),
    "held": (("d", True), ("e", False)),
    "versions": ((1, "d"), (2, "e")),
    "groups": (_USE, _USE),
    "zero_variance": ("d",),
    "too_old": ("d",),
    "reward_parts": {"found": 0.5},
    "finishes": {"stop": 7, "length": 1},
    "diagnostics": {"ess_share": 0.5},
    "seconds": {"learn": 1.5},
    "refused": {"too_old": 3},
    "ages_steps": (0, 2),
    "edges": (_EDGE,),
    "num_right": (0, 2),
    "rewards": (0.25, 0.5),
    "report": WarmUpReport(num_steps=8, num_groups=16, signal_before=0, signal_after=6, accuracy={"sort": 0.25}),
}
_SIMPLE: dict[Any, Any] = {float: 0.25, int: 7, str: "text", bool: True, int | None: None}


def example(cls: type[Event]) -> Event:
    """An event with a value in every field."""
    hints = get_type_hints(cls)
    values: dict[str, Any] = {f.name: _VALUES.get(f.name, _SIMPLE.get(hints[f.name])) for f in fields(cls)}
    return cls(**values)
