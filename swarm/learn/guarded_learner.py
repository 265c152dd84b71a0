"""Learner under the off-policy guard, which chooses the recipe and the groups of each step.

Invariant: the guard's state is in the same checkpoint as the weights, so that a restart goes on with both.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Final

from torch import Tensor

from swarm.config import GuardConfig, GuardLimits
from swarm.learn.held_out_effect import HeldOutEffect
from swarm.learn.learner import PolicyLearner
from swarm.learn.off_policy_guard import GuardLevel, GuardState, decide
from swarm.objectives.recipe import Recipe
from swarm.types import Draw, DrawnGroup, Evaluation, NodeId, PolicyVersion, StepReport

logger = logging.getLogger(__name__)

_NOTE: Final = "guard"  # key of the state in a checkpoint's notes
_EFFECT_NOTE: Final = "held_out_effect"


class GuardedLearner:
    """Implements `swarm.interfaces.Learner` under the guard, whose level chooses the recipe of each step.

    Step reports carry `guard_level` and `guard_max_age_steps`, the bound for the next draws. Decisions
    outlive a restart: the state is in the same checkpoint as the weights.

    Example:
        learner = GuardedLearner(PolicyLearner(...).resume(), load_recipe(SAFE_RECIPE), config, max_age_steps=4)
    """

    def __init__(
        self,
        learner: PolicyLearner,
        safe: Recipe,
        config: GuardConfig,
        max_age_steps: int,
        generates: bool = True,
        limits: GuardLimits = GuardLimits(),
    ) -> None:
        """Wraps a learner; the guard continues from the state in the learner's checkpoint.

        Args:
            learner: makes the steps.
            safe: recipe of level SAFE.
            config: switches the guard on or off.
            max_age_steps: the configured lag bound.
            generates: True if this node makes groups itself. If False, the oldest established follower is used even
                after a fall of accuracy, and the least deviating sources even while all are set aside.
            limits: thresholds of the guard.
        """
        self._learner = learner
        self._safe = safe
        self._config = config
        self._limits = limits
        self._max_age_steps = max_age_steps
        self._generates = generates
        self._state = GuardState.from_json(learner.notes.get(_NOTE, {}) if config.enabled else {}, max_age_steps)
        self._effect = HeldOutEffect.from_json(learner.notes.get(_EFFECT_NOTE, {}) if config.enabled else {})
        self._trusted: frozenset[NodeId] | None = None  # sources used in spite of a fall; None without one

    @property
    def state(self) -> GuardState:
        """State of the guard for the next step."""
        return self._state

    @property
    def effect(self) -> HeldOutEffect:
        """Held-out accuracy so far, and the cuts of sources that followed from it."""
        return self._effect

    @property
    def version(self) -> PolicyVersion:
        """The newest version."""
        return self._learner.version

    @property
    def next_draw(self) -> int:
        """Number of the first draw that is not yet learned from."""
        return self._learner.next_draw

    def step(self, draw: Draw) -> StepReport:
        """One step as `PolicyLearner.step`, with the recipe of the present level, then the guard's decision.

        Leaves out groups of sources set aside, groups above the lag bound and, after a fall of accuracy, groups of
        other nodes, the newest sources first. A draw of such groups alone is only measured; for the exceptions see
        `generates` in `__init__`.
        """
        counted = (drawn.scored.group.producer for drawn in draw.groups if self._may_outlive_a_fall(drawn))
        self._effect = self._effect.after_draw(draw.step, counted)
        self._trusted = self._effect.in_use(self._generates) if self._effect.num_cuts else None
        kept = [index for index, drawn in enumerate(draw.groups) if self._may_use(drawn)]
        was_any_usable = any(map(self._is_usable, draw.groups))
        was_idle = not was_any_usable and any(map(self._is_young, draw.groups))
        spared = self._spared_of(draw) if was_idle else []
        kept = kept or spared
        level = self._state.level if kept else GuardLevel.FROZEN
        used = _part(draw, kept) if kept else draw
        report = self._learner.step(
            used,
            self._safe if level is GuardLevel.SAFE else None,
            is_frozen=level is GuardLevel.FROZEN,
            ratio_band=self._limits.cap if level is GuardLevel.CAPPED or spared else math.inf,
        )
        if self._config.enabled:
            self._state = decide(
                self._state,
                self._learner.off_policy_stats,
                self._limits,
                self._max_age_steps,
                self._learner.likelihood_stats,
                was_idle=was_idle,
            )
        self._learner.notes[_NOTE] = asdict(self._state)
        others_held = self._effect.num_cuts > 0
        is_any_left = was_any_usable or (was_idle and not self._generates)
        # Without a version there is no evaluation, so only idle draws can end a fall.
        self._effect = self._effect.after_step(is_idle=not kept and is_any_left)
        self._learner.notes[_EFFECT_NOTE] = self._effect.to_json()
        figures = {
            **self._state.figures(),
            "guard_groups_left_out": float(len(draw.groups) - len(kept)),
            "guard_others_held": float(others_held),
            "guard_groups_spared": float(len(spared)),
        }
        return replace(report, diagnostics={**report.diagnostics, **figures})

    def dry_run(self, draw: Draw) -> None:
        """`PolicyLearner.dry_run` of the whole draw, with the recipe of the present level."""
        self._learner.dry_run(draw, self._safe if self._state.level is GuardLevel.SAFE else None)

    def evaluated(self, evaluations: Sequence[Evaluation]) -> None:
        """Records evaluations of the newest version, if the guard is on; a fall of accuracy sets sources aside."""
        if self._config.enabled:
            self._effect = self._effect.after(evaluations, self._generates)
            self._learner.notes[_EFFECT_NOTE] = self._effect.to_json()

    def _spared_of(self, draw: Draw) -> list[int]:
        """Indices of groups to use although their sources are set aside, once `hold_steps` draws in a row were idle."""
        if self._generates or self._state.idle_draws < self._limits.hold_steps:
            return []
        spared = self._state.spared()
        kept = [
            index
            for index, drawn in enumerate(draw.groups)
            if drawn.scored.group.producer in spared and self._is_young(drawn) and self._outlives_a_fall(drawn)
        ]
        if kept and self._state.idle_draws == self._limits.hold_steps:
            extra = {"used": len(spared), "set_aside": len(self._state.held)}
            logger.warning("every source is set aside; the least deviating are used, with capped ratios", extra=extra)
        return kept

    def _may_use(self, drawn: DrawnGroup) -> bool:
        return self._outlives_a_fall(drawn) and self._is_usable(drawn)

    def _outlives_a_fall(self, drawn: DrawnGroup) -> bool:
        if self._trusted is None or drawn.scored.is_made_here:
            return True
        return self._may_outlive_a_fall(drawn) and drawn.scored.group.producer in self._trusted

    def _may_outlive_a_fall(self, drawn: DrawnGroup) -> bool:
        """True for a group of another node whose source a fall sets aside in its turn: an established source.

        Newcomers are set aside at once, and so are other lineages if this node makes no groups to compare them with.
        """
        is_ours = drawn.scored.is_own_policy(self._learner.version.policy_id)
        return not drawn.scored.is_made_here and drawn.is_established and (is_ours or self._generates)

    def _is_usable(self, drawn: DrawnGroup) -> bool:
        """True if the lag bound and the source's standing allow the group, whatever held-out accuracy is."""
        if not self._is_young(drawn):
            return False
        return drawn.scored.is_made_here or not self._state.is_held(drawn.scored.group.producer)

    def _is_young(self, drawn: DrawnGroup) -> bool:
        return drawn.age_steps <= self._state.max_age_steps

    def snapshot(self) -> tuple[PolicyVersion, dict[str, Tensor]]:
        """Version and published tensors that belong together."""
        return self._learner.snapshot()

    def save(self) -> None:
        """Writes a checkpoint (blocking). Raises as `PolicyLearner.save`."""
        self._learner.save()


def _part(draw: Draw, indices: Sequence[int]) -> Draw:
    baselines = tuple(draw.baselines[index] for index in indices) if draw.baselines else ()
    return replace(draw, groups=tuple(draw.groups[index] for index in indices), baselines=baselines)
