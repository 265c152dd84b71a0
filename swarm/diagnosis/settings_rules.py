"""The rule about settings: values of node.toml outside of their usual span.

Invariant: a value counts as a cause only if the node fails at something that the value affects; else it is a note.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from swarm.config import NodeConfig
from swarm.config.section import Usual
from swarm.diagnosis import evidence_rules as evidence
from swarm.diagnosis import learning_rules as learning
from swarm.diagnosis import network_rules as network
from swarm.diagnosis import process_rules as process
from swarm.diagnosis import signal_rules as signal
from swarm.diagnosis.snapshot import Diagnosed, Find, Gravity, Snapshot, as_toml, shortened

MOST_KEYS: Final = 3  # that are listed
FAR_NUMBER: Final = 0.5  # factors of ten: the least where a healthy node may look the same


@dataclass(frozen=True, kw_only=True, slots=True)
class FarValue:
    """A value of node.toml outside of its usual span."""

    key: str
    value: object
    default: object
    usual: Usual
    distance: float  # factors of ten

    @property
    def words(self) -> str:
        """Key, value and usual span as text, such as `generator.temperature = 5 (usual 0.5..1.4)`."""
        return f"{self.key} = {shortened(as_toml(self.value))[:60]} (usual {self.usual.span})"


def far_values(config: NodeConfig) -> list[FarValue]:
    """Returns the values outside of the usual span of their field, the farthest first; a default is always usual."""
    found = list(_far_values(config, ""))
    return sorted(found, key=lambda each: -each.distance)


def _far_values(section: BaseModel, prefix: str) -> Iterable[FarValue]:
    for name, field in type(section).model_fields.items():
        value: Any = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _far_values(value, f"{prefix}{name}.")
        default: Any = field.get_default(call_default_factory=True)
        for usual in (each for each in field.metadata if isinstance(each, Usual) and value != default):
            if distance := usual.distance(value):
                yield FarValue(key=prefix + name, value=value, default=default, usual=usual, distance=distance)


def _shortfall(snapshot: Snapshot, kind: str) -> tuple[str, bool]:
    """Returns (failure of the node at `kind` in words, "" if none; True if a healthy node may look the same)."""
    certain, unsure = SHORTFALLS[kind]
    for find in certain:
        if (found := find(snapshot)) is not None and found.gravity is not Gravity.NOTE:
            return found.claim, False
    signs = () if snapshot.learning.is_shown else unsure
    return next(((words, True) for words, is_seen in signs if is_seen(snapshot)), ("", True))


def far_from_usual(snapshot: Snapshot, kind: str = "") -> Diagnosed | None:
    """Finds up to three values far from usual that affect `kind`, if the node fails at `kind`; without `kind`, any."""
    far = [] if snapshot.config is None else far_values(snapshot.config)
    seen: list[str] = []
    if kind and far:
        failure, is_unsure = _shortfall(snapshot, kind)
        least = FAR_NUMBER if is_unsure else 0.0
        far = [each for each in far if failure and kind in each.usual.bears_on.split() and each.distance > least]
        seen = [f"seen of it: {failure}"]
    if not far:
        return None
    words = [each.words for each in far[:MOST_KEYS]]
    first = far[0]
    usual = first.default
    if first.key == "learner.learning_rate" and snapshot.config is not None:
        usual = snapshot.config.model.usual_rate  # a rule gives it, no default of the field
    return Diagnosed(
        claim=f"settings are far from usual: {'; '.join(words)}",
        fix=snapshot.set_key(first.key, usual, why=f" (the default; {first.usual.span} is usual)"),
        evidence=(*seen, *words, "node.toml"),
        key=first.key,
        gravity=Gravity.HARMS if kind else Gravity.NOTE,
    )


# Words of `Usual.bears_on` -> rules that are certain, and signs that healthy nodes show, too.
SHORTFALLS: Final[dict[str, tuple[tuple[Find, ...], tuple[tuple[str, Callable[[Snapshot], bool]], ...]]]] = {
    "machine": ((process.out_of_memory, process.worker_dies), ()),
    "signal": ((signal.equal_rewards, signal.cut_off), (("answers are nearly random", signal.draws_noise),)),
    "steps": (
        (
            *(learning.steps_change_nothing, learning.gets_worse, evidence.did_not_learn, learning.tokens_left_out),
            *(learning.overfits, learning.held_out_falls),
        ),
        (
            ("answers are nearly random", signal.draws_noise),
            ("steps are small, and the reward does not rise", learning.has_small_steps),
            ("the reward does not rise beyond chance", signal.has_flat_reward),
        ),
    ),
    "pace": (
        (*(learning.no_steps, learning.step_needs_many, learning.halted),),
        (
            ("steps wait for groups most of the time", learning.waits_for_groups),
            ("neither a step nor a group came since the start", learning.has_no_product_yet),
        ),
    ),
    "peers": (
        (network.cannot_dial, network.nobody_follows, network.trainer_away, network.alone),
        (("no other node is connected", network.is_lonely),),
    ),
    "exchange": ((network.come_too_late, network.no_external, network.others_refused, network.no_weights_yet), ()),
}
