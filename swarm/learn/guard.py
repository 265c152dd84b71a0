"""The adaptive guard: from how off-policy a step was to how careful the next one is.

Invariant: `decide` is a pure function of state, figures and settings; the state is plain numbers, kept with
the checkpoint, so that a restart decides the same. Tightening is immediate, loosening waits (hysteresis).

Two remedies for two causes. Data that is *old* (age buckets that look bad) is cured by a lower lag bound; a
step that is off policy *as a whole* is cured by more careful arithmetic: first a cap on ratios, then the
safe recipe, and on alarm no update at all.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum

from swarm.config import GuardConfig
from swarm.learn.diagnostics import AGE_BUCKETS, age_suffix

logger = logging.getLogger(__name__)

MAX_PATIENCE = 16


class Level(IntEnum):
    """How careful a step is."""

    OPEN = 0  # the configured recipe
    CAPPED = 1  # tokens whose ratio to the generator is far from 1 are left out
    SAFE = 2  # the safe recipe
    FROZEN = 3  # no update


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardState:
    """What the guard knows."""

    level: Level = Level.OPEN
    max_age_steps: int  # lag bound, never above the configured one
    calm_steps: int = 0  # good steps in a row
    frozen_steps: int = 0  # of the present freeze
    patience: int = 1  # factor on hold_steps: doubled by each tightening, 1 again once all is open and calm
    reason: str = ""  # of the newest change

    def figures(self) -> dict[str, float]:
        """As step diagnostics."""
        return {"guard_level": float(self.level), "guard_max_age_steps": float(self.max_age_steps)}


def decide(state: GuardState, figures: Mapping[str, float], config: GuardConfig, max_age_steps: int) -> GuardState:
    """The state for the next step.

    Args:
        state: of this step.
        figures: `step_diagnostics` of this step (those missing say nothing).
        config: thresholds.
        max_age_steps: the configured lag bound.
    """
    if not config.enabled:
        return GuardState(max_age_steps=max_age_steps)
    bound, late = _lag_bound(state, figures, config, max_age_steps)
    level, calm, frozen, why = _level(state, figures, config)
    changed = (level, bound) != (state.level, state.max_age_steps)
    found = GuardState(
        level=level,
        max_age_steps=bound,
        calm_steps=0 if changed else calm,
        frozen_steps=frozen,
        patience=_patience(state, level, bound, calm, config, max_age_steps),
        reason="; ".join(filter(None, (why, late))) if changed else state.reason,
    )
    if changed:
        logger.info(
            "guard changed",
            extra={
                "level": level.name.lower(),
                "level_before": state.level.name.lower(),
                "max_age_steps": bound,
                "max_age_steps_before": state.max_age_steps,
                "reason": found.reason,
            },
        )
    return found


def _level(state: GuardState, figures: Mapping[str, float], config: GuardConfig) -> tuple[Level, int, int, str]:
    """(level, calm steps, frozen steps, why) for the next step."""
    alarm = _first_of(
        _below(figures, "ess_share", config.alarm_ess), _above(figures, "mismatch_kl_k3", config.alarm_kl)
    )
    if alarm and state.frozen_steps < config.freeze_steps:
        return Level.FROZEN, 0, state.frozen_steps + 1, alarm
    if state.level is Level.FROZEN:
        return Level.SAFE, 0, 0, f"{state.frozen_steps} steps frozen"
    if trouble := _trouble(figures, config):
        return max(state.level, min(Level(state.level + 1), Level.SAFE)), 0, 0, trouble
    if not _is_calm(figures, config):
        return state.level, 0, 0, ""
    if state.level > Level.OPEN and _is_due(state, config):
        return Level(state.level - 1), 0, 0, f"{state.calm_steps + 1} calm steps"
    return state.level, state.calm_steps + 1, 0, ""


def _lag_bound(
    state: GuardState, figures: Mapping[str, float], config: GuardConfig, max_age_steps: int
) -> tuple[int, str]:
    """(lag bound, why it changed) for the next step."""
    bound = min(state.max_age_steps, max_age_steps)
    for first_age in AGE_BUCKETS[1:]:
        trouble = _trouble(figures, config, age_suffix(first_age))
        if first_age <= bound and trouble:
            return first_age - 1, f"age {first_age} and above: {trouble}"
    if bound < max_age_steps and _is_calm(figures, config) and _is_due(state, config):
        return min(max_age_steps, 2 * bound + 1), f"{state.calm_steps + 1} calm steps"
    return bound, ""


def _is_due(state: GuardState, config: GuardConfig) -> bool:
    """True when one more calm step loosens."""
    return state.calm_steps + 1 >= config.hold_steps * state.patience


def _patience(
    state: GuardState, level: Level, bound: int, calm_steps: int, config: GuardConfig, max_age_steps: int
) -> int:
    if level > state.level or bound < state.max_age_steps:
        return min(2 * state.patience, MAX_PATIENCE)
    is_open = level is Level.OPEN and bound == max_age_steps
    return 1 if is_open and calm_steps >= config.hold_steps * state.patience else state.patience


def _trouble(figures: Mapping[str, float], config: GuardConfig, suffix: str = "") -> str:
    """Which figure is beyond its tight threshold; "" where none is."""
    if figures.get(f"num_tokens{suffix}", 0.0) < config.min_tokens:
        return ""
    return _first_of(
        _below(figures, f"ess_share{suffix}", config.tight_ess),
        _above(figures, f"mismatch_kl_k3{suffix}", config.tight_kl),
        _above(figures, f"log_ratio_m2{suffix}", config.tight_m2),
    )


def _is_calm(figures: Mapping[str, float], config: GuardConfig) -> bool:
    """Every overall figure is on the good side of its loose threshold."""
    return (
        figures.get("ess_share", 1.0) >= config.loose_ess
        and figures.get("mismatch_kl_k3", 0.0) <= config.loose_kl
        and figures.get("log_ratio_m2", 0.0) <= config.loose_m2
    )


def _first_of(*reasons: str) -> str:
    return next(filter(None, reasons), "")


def _below(figures: Mapping[str, float], name: str, bound: float) -> str:
    value = figures.get(name)
    return f"{name} {value:.3g} below {bound:g}" if value is not None and not value >= bound else ""


def _above(figures: Mapping[str, float], name: str, bound: float) -> str:
    value = figures.get(name)
    return f"{name} {value:.3g} above {bound:g}" if value is not None and not value <= bound else ""


def opened(max_age_steps: int) -> GuardState:
    """The state of a run that begins."""
    return GuardState(max_age_steps=max_age_steps)


def from_plain(data: Mapping[str, object], max_age_steps: int) -> GuardState:
    """The state that `dataclasses.asdict` and JSON made plain; an empty mapping is a run that begins."""
    if not data:
        return opened(max_age_steps)
    state = GuardState(**data)  # pyright: ignore[reportArgumentType]
    return replace(state, level=Level(state.level), max_age_steps=min(state.max_age_steps, max_age_steps))
