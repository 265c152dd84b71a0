"""A learner under the adaptive guard.

Invariant: what the guard decided after a step holds for the next one, also across a restart: its state is in
the same checkpoint as the weights.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, replace

from torch import Tensor

from swarm.config import GuardConfig
from swarm.learn.learner import PolicyLearner
from swarm.learn.off_policy_guard import GuardState, Level, decide, from_plain
from swarm.objectives.recipe import Recipe
from swarm.types import Draw, DrawnGroup, PolicyVersion, StepReport

_NOTE = "guard"


class GuardedLearner:
    """Implements `swarm.interfaces.Learner`: the recipe of each step is the one of the guard's level.

    Step reports carry `guard_level` and `guard_max_age_steps`: whoever draws groups keeps to that bound.

    Example:
        learner = GuardedLearner(PolicyLearner(...).resumed(), load_recipe(config.safe_recipe), config, max_age_steps=4)
    """

    def __init__(self, learner: PolicyLearner, safe: Recipe, config: GuardConfig, max_age_steps: int) -> None:
        """`safe`: recipe of level SAFE; `max_age_steps`: the configured lag bound."""
        self._learner = learner
        self._safe = safe
        self._config = config
        self._max_age_steps = max_age_steps
        self._state = from_plain(learner.notes.get(_NOTE, {}) if config.enabled else {}, max_age_steps)

    @property
    def state(self) -> GuardState:
        """What holds for the next step."""
        return self._state

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

        Groups of sources that are set aside, and those older than the bound, are left out; where nothing else was
        drawn they are measured only.
        """
        kept = [index for index, drawn in enumerate(draw.groups) if self._may_use(drawn)]
        level = self._state.level if kept else Level.FROZEN
        used = _part(draw, kept) if kept else draw
        report = self._learner.step(
            used,
            self._safe if level is Level.SAFE else None,
            is_frozen=level is Level.FROZEN,
            ratio_band=self._config.cap if level is Level.CAPPED else math.inf,
        )
        self._state = decide(self._state, self._learner.offness, self._config, self._max_age_steps)
        self._learner.notes[_NOTE] = asdict(self._state)
        figures = {**self._state.figures(), "guard_groups_left_out": float(len(draw.groups) - len(kept))}
        return replace(report, diagnostics={**report.diagnostics, **figures})

    def _may_use(self, drawn: DrawnGroup) -> bool:
        if drawn.age_steps > self._state.max_age_steps:
            return False
        return drawn.scored.is_made_here or not self._state.is_held(drawn.scored.group.producer)

    def snapshot(self) -> tuple[PolicyVersion, dict[str, Tensor]]:
        """Version and published tensors that belong together."""
        return self._learner.snapshot()

    def weights(self) -> dict[str, Tensor]:
        """The published tensors of the newest version."""
        return self._learner.weights()

    def save(self) -> None:
        """Writes a checkpoint (blocking)."""
        self._learner.save()


def _part(draw: Draw, places: Sequence[int]) -> Draw:
    baselines = tuple(draw.baselines[place] for place in places) if draw.baselines else ()
    return replace(draw, groups=tuple(draw.groups[place] for place in places), baselines=baselines)
