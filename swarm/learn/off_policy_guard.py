"""Off-policy guard of a learner: sets the caution of the next step from off-policy figures by source and age.

Invariant: `decide` is a pure function of state, figures and settings; the state is plain numbers, kept with
the checkpoint, so that a restart decides the same. Tightening is immediate, loosening waits (hysteresis).

Figures of another node are claims: its generator's log-probs cannot be checked. So a source that looks bad is set
aside, and one source alone changes nothing else. The lag bound follows several sources, or our own groups; the
level (a cap on ratios, the safe recipe, no update at all) follows our own groups only. Own groups are those made
here; if nothing is made here, the majority of the followers (nodes that generate with our policy) stands for them,
newcomers among them only if nobody else reports. Two figures need no trust: the likelihood of a source's tokens under
our own policy, and held-out accuracy (`held_out_effect`), whose fall sets the groups of all others aside.

If nothing is made here the guard does not set every source aside for good: after `hold_steps` draws from sources
that are all set aside, those that deviate least are used under a cap on ratios (`GuardState.spared`), until another
source appears.

The coordinator's `OffPolicyAdvisor` shares the thresholds (`GuardLimits`) and steps in later, for all nodes at once.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from statistics import median_high, median_low
from typing import Any, Final, cast

from swarm.config import GuardLimits
from swarm.learn.diagnostics import AGE_BUCKETS, LikelihoodStats, OffPolicyStats

logger = logging.getLogger(__name__)

MAX_PATIENCE: Final = 16
MAX_HELD: Final = 256  # sources that are remembered
MAX_DEVIATION: Final = 1e6  # also stands for figures that are not finite


class GuardLevel(IntEnum):
    """Level of caution of a step."""

    OPEN = 0  # the configured recipe
    CAPPED = 1  # tokens whose ratio to the generator is far from 1 are left out
    SAFE = 2  # the safe recipe
    FROZEN = 3  # no update


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantine:
    """Period in which a source is set aside because a figure passed its threshold."""

    until: int  # first step of the guard in which the source is used again
    patience: int  # factor on hold_steps the next time
    deviation: float = MAX_DEVIATION  # newest, as a multiple of the threshold
    is_newcomer: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class GuardState:
    """State of the guard between steps: level, lag bound, quarantined sources, counters; part of the checkpoint."""

    level: GuardLevel = GuardLevel.OPEN
    max_age_steps: int  # lag bound, never above the configured one
    step: int = 0  # decisions made
    calm_steps: int = 0  # good steps in a row
    frozen_steps: int = 0  # of the present freeze
    patience: int = 1  # factor on hold_steps: doubled by each tightening, 1 again once all is open and calm
    held: Mapping[str, Quarantine] = field(default_factory=dict[str, Quarantine])  # by source, oldest first
    own_nll: float | None = None  # nats per token of own groups, of the newest step with some
    idle_draws: int = 0  # draws in a row whose groups were all of sources set aside

    def is_held(self, source: str) -> bool:
        """True while groups of this source are set aside."""
        return source in self.held and self.step < self.held[source].until

    def spared(self) -> frozenset[str]:
        """The less deviating half of established sources set aside, or else of newcomers; none at MAX_DEVIATION."""
        held = {source: hold for source, hold in self.held.items() if self.is_held(source)}
        ranked = sorted(held, key=lambda source: held[source].deviation)
        ranked = [source for source in ranked if not held[source].is_newcomer] or ranked
        half = ranked[: (len(ranked) + 1) // 2]
        return frozenset(source for source in half if held[source].deviation < MAX_DEVIATION)

    def figures(self) -> dict[str, float]:
        """Figures of the state for step diagnostics, by name."""
        return {
            "guard_level": float(self.level),
            "guard_max_age_steps": float(self.max_age_steps),
            "guard_held_sources": float(sum(self.is_held(source) for source in self.held)),
            "guard_idle_draws": float(self.idle_draws),
        }

    @staticmethod
    def from_json(data: Mapping[str, Any], max_age_steps: int) -> "GuardState":
        """The inverse of `dataclasses.asdict`, also after a JSON round trip; an empty mapping gives the first state."""
        if not data:
            return GuardState(max_age_steps=max_age_steps)
        held = {source: Quarantine(**hold) for source, hold in cast("dict[str, dict[str, Any]]", data["held"]).items()}
        numbers = {name: int(data[name]) for name in ("step", "calm_steps", "frozen_steps", "patience")}
        numbers["idle_draws"] = data.get("idle_draws", 0)
        bound = min(int(data["max_age_steps"]), max_age_steps)
        own_nll = data.get("own_nll")
        return GuardState(level=GuardLevel(data["level"]), max_age_steps=bound, held=held, own_nll=own_nll, **numbers)


def decide(
    state: GuardState,
    stats: Sequence[OffPolicyStats],
    limits: GuardLimits,
    max_age_steps: int,
    likelihoods: Sequence[LikelihoodStats] = (),
    *,
    was_idle: bool = False,
) -> GuardState:
    """The state for the next step.

    Args:
        state: the state for this step.
        stats: `off_policy_by_source` of this step.
        limits: thresholds.
        max_age_steps: the configured lag bound.
        likelihoods: `likelihood_by_source` of this step.
        was_idle: True if no group of the draw was usable, and at least one only because its source is set aside.
    """
    informative = [each for each in stats if each.num_tokens >= limits.min_tokens]
    trusted = [each for each in informative if not each.is_newcomer] or informative
    own = _own([each for each in trusted if each.first_age is None])
    level, frozen, why = _level(state, own, limits)
    bound, late = _lag_bound(state, trusted, limits, max_age_steps)
    own_nll = _own_nll(state, likelihoods)
    is_calm = own is not None and _is_calm(own, limits)
    is_tighter = level > state.level or bound < state.max_age_steps
    if is_calm and not is_tighter and state.calm_steps + 1 >= limits.hold_steps * state.patience:
        level, bound = GuardLevel(max(level - 1, GuardLevel.OPEN)), min(max_age_steps, 2 * bound + 1)
        why = f"{state.calm_steps + 1} calm steps"
    changed = (level, bound) != (state.level, state.max_age_steps)
    after = GuardState(
        level=level,
        max_age_steps=bound,
        step=state.step + 1,
        calm_steps=0 if changed or (own is not None and not is_calm) else state.calm_steps + is_calm,
        frozen_steps=frozen,
        patience=_patience(state, is_tighter, changed, is_calm, limits),
        held=_quarantine(state, informative, _unlikely(own_nll, likelihoods, limits), limits),
        own_nll=own_nll,
        idle_draws=state.idle_draws + 1 if was_idle else 0,
    )
    if changed:
        _log(state, after, "; ".join(filter(None, (why, late))))
    return after


def _own(whole: Sequence[OffPolicyStats]) -> OffPolicyStats | None:
    """Figures of our own groups from `whole`, statistics over all ages; None if there are none.

    If nothing is made here, the followers stand for own groups: each figure is their median (the better of two middle
    ones), so that only more than half of the followers can raise the level.
    """
    made_here = next((each for each in whole if each.is_made_here), None)
    followers = [each for each in whole if each.is_follower]
    if made_here is not None or not followers:
        return made_here
    return replace(
        followers[0],
        source="followers",
        num_tokens=sum(each.num_tokens for each in followers),
        ess_share=median_high([each.ess_share for each in followers]),
        mismatch_kl=median_low([each.mismatch_kl for each in followers]),
        log_ratio_m2=median_low([each.log_ratio_m2 for each in followers]),
    )


def _level(state: GuardState, own: OffPolicyStats | None, limits: GuardLimits) -> tuple[GuardLevel, int, str]:
    """(level, frozen steps, reason) from our own groups; loosens only from FROZEN to SAFE."""
    if own is None:
        return (GuardLevel.SAFE, 0, "nothing to measure") if state.level is GuardLevel.FROZEN else (state.level, 0, "")
    alarm = _first_of(
        _below("ess_share", own.ess_share, limits.alarm_ess), _above("mismatch_kl", own.mismatch_kl, limits.alarm_kl)
    )
    if alarm and state.frozen_steps < limits.freeze_steps:
        return GuardLevel.FROZEN, state.frozen_steps + 1, alarm
    if state.level is GuardLevel.FROZEN:
        return GuardLevel.SAFE, 0, f"{state.frozen_steps} steps frozen"
    if trouble := _trouble(own, limits):
        return max(state.level, min(GuardLevel(state.level + 1), GuardLevel.SAFE)), 0, trouble
    return state.level, 0, ""


def _lag_bound(
    state: GuardState, informative: Sequence[OffPolicyStats], limits: GuardLimits, max_age_steps: int
) -> tuple[int, str]:
    """(lag bound, reason); the bound falls if our own groups of an age look bad, or those of most of several sources.

    If nothing is made here, a majority of the followers stands for our own groups. The reason is "" if the bound stays.
    """
    bound = min(state.max_age_steps, max_age_steps)
    makes_own = _makes_own(informative)
    for first_age in AGE_BUCKETS[1:]:
        of_age = [each for each in informative if each.first_age == first_age]
        bad = [(each, trouble) for each in of_age if (trouble := _trouble(each, limits))]
        is_own = any(each.is_made_here for each, _ in bad) or (not makes_own and _are_most_followers(bad, of_age))
        if first_age <= bound and bad and (is_own or (len(bad) > 1 and 2 * len(bad) > len(of_age))):
            return first_age - 1, f"age {first_age} and above, {len(bad)} of {len(of_age)} sources: {bad[0][1]}"
    return bound, ""


def _makes_own(informative: Sequence[OffPolicyStats]) -> bool:
    return any(each.is_made_here for each in informative)


def _are_most_followers(bad: Sequence[tuple[OffPolicyStats, str]], stats: Sequence[OffPolicyStats]) -> bool:
    return 2 * sum(each.is_follower for each, _ in bad) > sum(each.is_follower for each in stats)


def _own_nll(state: GuardState, likelihoods: Sequence[LikelihoodStats]) -> float | None:
    """Nats per token of groups made here, else the median over established sources, else the value of `state`."""
    own = [each.nll for each in likelihoods if each.is_made_here]
    established = [each.nll for each in likelihoods if not each.is_newcomer]
    return median_low(own or established) if own or established else state.own_nll


@dataclass(frozen=True, kw_only=True, slots=True)
class _Bad:
    """A source whose figures are beyond a threshold."""

    trouble: str
    deviation: float  # multiple of the threshold
    is_newcomer: bool


def _unlikely(
    own_nll: float | None, likelihoods: Sequence[LikelihoodStats], limits: GuardLimits
) -> list[tuple[str, _Bad]]:
    """Sources of other nodes whose mean negative log-likelihood exceeds that of own groups by over `tight_nll`."""
    if own_nll is None:
        return []
    return [
        (
            each.source,
            _Bad(
                trouble=trouble,
                deviation=_bounded((each.nll - own_nll) / limits.tight_nll),
                is_newcomer=each.is_newcomer,
            ),
        )
        for each in likelihoods
        if not each.is_made_here
        and each.num_tokens >= limits.min_tokens
        and (trouble := _above("nll over that of own groups", each.nll - own_nll, limits.tight_nll))
    ]


def _quarantine(
    state: GuardState,
    informative: Sequence[OffPolicyStats],
    unlikely: Sequence[tuple[str, _Bad]],
    limits: GuardLimits,
) -> dict[str, Quarantine]:
    """Quarantines after this step; a source that behaves after its hold for the length of the next one is forgotten.

    If nothing is made here and most followers look bad, their off-policy figures set none of them aside: the policy
    moved away from all of them, which level and lag bound answer, and nothing else would be left to learn from. A
    source that looks bad while set aside stays set aside, at unchanged patience: it was used for lack of others.
    """
    step = state.step + 1
    held = {
        source: hold for source, hold in state.held.items() if step < hold.until + limits.hold_steps * hold.patience
    }
    whole = [each for each in informative if each.first_age is None]
    bad = [(each, trouble) for each in whole if not each.is_made_here and (trouble := _trouble(each, limits))]
    spares_followers = not _makes_own(informative) and _are_most_followers(bad, whole)
    found = {
        each.source: _Bad(trouble=trouble, deviation=_deviation(each, limits), is_newcomer=each.is_newcomer)
        for each, trouble in bad
        if not (each.is_follower and spares_followers)
    }
    for source, beyond in {**dict(unlikely), **found}.items():
        before = held.pop(source, None)
        if before is not None and state.is_held(source):
            until, patience = max(before.until, step + limits.hold_steps), before.patience
        else:
            factor = 1 if before is None else before.patience
            until, patience = step + limits.hold_steps * factor, min(2 * factor, MAX_PATIENCE)
            logger.info("source set aside", extra={"source": source, "reason": beyond.trouble})
        held[source] = Quarantine(
            until=until, patience=patience, deviation=beyond.deviation, is_newcomer=beyond.is_newcomer
        )
    while len(held) > MAX_HELD:
        del held[next(iter(held))]
    return held


def _deviation(stats: OffPolicyStats, limits: GuardLimits) -> float:
    """The worst figure of a source, as a multiple of its tight threshold, at most MAX_DEVIATION."""
    ess = limits.tight_ess / stats.ess_share if stats.ess_share > 0 else MAX_DEVIATION
    figures = (ess, stats.mismatch_kl / limits.tight_kl, stats.log_ratio_m2 / limits.tight_m2)
    return max(map(_bounded, figures))


def _bounded(figure: float) -> float:
    return min(figure, MAX_DEVIATION) if math.isfinite(figure) else MAX_DEVIATION


def _patience(state: GuardState, is_tighter: bool, changed: bool, is_calm: bool, limits: GuardLimits) -> int:
    if is_tighter:
        return min(2 * state.patience, MAX_PATIENCE)
    is_settled = is_calm and not changed and state.calm_steps + 1 >= limits.hold_steps * state.patience
    return 1 if is_settled else state.patience


def _trouble(stats: OffPolicyStats, limits: GuardLimits) -> str:
    """The first figure beyond the tight threshold, with both numbers; "" if none is."""
    return _first_of(
        _below("ess_share", stats.ess_share, limits.tight_ess),
        _above("mismatch_kl", stats.mismatch_kl, limits.tight_kl),
        _above("log_ratio_m2", stats.log_ratio_m2, limits.tight_m2),
    )


def _is_calm(stats: OffPolicyStats, limits: GuardLimits) -> bool:
    """True if every figure is on the good side of its loose threshold."""
    return (
        stats.ess_share >= limits.loose_ess
        and stats.mismatch_kl <= limits.loose_kl
        and stats.log_ratio_m2 <= limits.loose_m2
    )


def _first_of(*reasons: str) -> str:
    return next(filter(None, reasons), "")


def _below(name: str, value: float, bound: float) -> str:
    return "" if value >= bound else f"{name} {value:.3g} below {bound:g}"


def _above(name: str, value: float, bound: float) -> str:
    return "" if value <= bound else f"{name} {value:.3g} above {bound:g}"


def _log(before: GuardState, after: GuardState, reason: str) -> None:
    logger.info(
        "guard changed",
        extra={
            "level": after.level.name.lower(),
            "level_before": before.level.name.lower(),
            "max_age_steps": after.max_age_steps,
            "max_age_steps_before": before.max_age_steps,
            "reason": reason,
        },
    )
