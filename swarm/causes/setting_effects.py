"""Effects of settings: families of what is seen of a bad value, and rows of the table of keys.

Invariant: families are names of findings that rules have; a row looks at a value and its configuration alone.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from swarm.causes.finding import Certainty
from swarm.causes.signal_rules import NO_SIGNAL
from swarm.config import NodeConfig
from swarm.model.source import is_char_model

USUAL_RATE: Final = 1e-5  # all weights of a language model
USUAL_SMALL_RATE: Final = 1e-4  # adapters, and the tiny models
# What settings lead to, as names of findings.
LITTLE: Final = frozenset({"steps_change_nothing", "learns_nothing", "nothing_trained"})
WILD: Final = frozenset(
    {"gets_worse", "steps_move_far", "held_out_falls", "stays_on_policy", "tokens_left_out", "not_a_number"}
    | {"nothing_trained", "one_answer", "overfits", "answers_alike"}
)
ALIKE: Final = (NO_SIGNAL - {"cannot_be_scored"}) | {
    "answers_alike",
    "one_answer",
    "small_signal",
    "step_needs_many",
    "learns_nothing",
    "no_steps",
}
TOO_SLOW: Final = frozenset({"step_needs_many", "no_steps", "stale", "come_too_late", "far_behind", "no_credit"})
# Seen after some steps, where `LITTLE` and `WILD` take many.
EARLY: Final = frozenset({"no_progress"})
EARLY_LITTLE: Final = frozenset({"steps_are_small"})
SLOW: Final = TOO_SLOW | {"waits_for_groups", "no_group_yet", "no_step_yet"}
LONELY: Final = frozenset(
    {"alone", "no_external", "cannot_dial", "no_trainer", "trainer_away", "nobody_follows", "turns_others_away"}
)
UNUSED: Final = frozenset({"no_external", "others_refused", "no_steps"})
SET_ASIDE: Final = frozenset(
    {"stays_on_policy", "all_set_aside", "tokens_left_out", "nothing_trained", "no_external", "no_steps"}
    | {"held_out_falls", "waits_for_groups", "step_needs_many", "no_step_yet", "stale"}
)
SCORING: Final = frozenset({"cannot_be_scored", "helpers_die", "ended_with_error", "never_ran"})
OF_WEIGHTS: Final = frozenset(
    {"not_published", "versions_refused", "far_behind", "trainer_away", "no_weights_yet", "ended_with_error"}
    | {"never_ran", "disk_full"}
)


def usual_rate(config: NodeConfig) -> float:
    """What such a model is mostly trained with."""
    is_small = config.model.lora_rank > 0 or is_char_model(config.model.source)
    return USUAL_SMALL_RATE if is_small else USUAL_RATE


@dataclass(frozen=True, kw_only=True, slots=True)
class Far:
    """A key whose value is suspect."""

    key: str  # section.key
    is_far: Callable[[Any, NodeConfig], bool]  # (value, configuration)
    usual: object  # what to set, or a function of the configuration that tells it; None: it depends
    does: str  # what such a value does, in words
    explains: frozenset[str]
    how: str  # low, high, or set
    certainty: Certainty = Certainty.LIKELY  # POSSIBLE: mostly such a value does no harm


def low(key: str, least: float, usual: object, does: str, *explains: frozenset[str]) -> Far:
    """A key that is suspect below a value."""
    return Far(
        key=key, is_far=lambda v, _: v < least, usual=usual, does=does, explains=frozenset().union(*explains), how="low"
    )


def high(key: str, most: float, usual: object, does: str, *explains: frozenset[str]) -> Far:
    """A key that is suspect above a value."""
    return Far(
        key=key, is_far=lambda v, _: v > most, usual=usual, does=does, explains=frozenset().union(*explains), how="high"
    )


def odd(
    key: str,
    is_far: Callable[[Any, NodeConfig], bool],
    usual: object,
    does: str,
    *explains: frozenset[str],
    how: str = "set",
) -> Far:
    """A key that is suspect by a condition."""
    return Far(key=key, is_far=is_far, usual=usual, does=does, explains=frozenset().union(*explains), how=how)


def hint(
    key: str, is_far: Callable[[Any, NodeConfig], bool], usual: object, does: str, *explains: frozenset[str]
) -> Far:
    """A key that mostly does no harm, and is named after what it may explain."""
    return replace(odd(key, is_far, usual, does, *explains), certainty=Certainty.POSSIBLE)


def of(*names: str) -> frozenset[str]:
    """Names of findings."""
    return frozenset(names)
