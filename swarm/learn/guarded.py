"""A learner under the adaptive guard.

Invariant: what the guard decided after a step holds for the next one, also across a restart: its state is in
the same checkpoint as the weights.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace

from torch import Tensor

from swarm.config import GuardConfig
from swarm.learn.guard import GuardState, Level, decide, from_plain
from swarm.learn.learner import PolicyLearner
from swarm.learn.recipe import Recipe
from swarm.types import Draw, PolicyVersion, StepReport

_NOTE = "guard"


class GuardedLearner:
    """Implements `swarm.interfaces.Learner`: the recipe of each step is the one of the guard's level.

    Step reports carry `guard_level` and `guard_max_age_steps`: whoever draws groups keeps to that bound.

    Example:
        careful = {Level.CAPPED: capped(recipe, config.cap), Level.SAFE: load_recipe(config.safe_recipe)}
        learner = GuardedLearner(PolicyLearner.open(...), careful, config, replay.max_age_steps)
    """

    def __init__(
        self, learner: PolicyLearner, careful: Mapping[Level, Recipe], config: GuardConfig, max_age_steps: int
    ) -> None:
        """`careful`: what levels CAPPED and SAFE use; `max_age_steps`: the configured lag bound."""
        self._learner = learner
        self._careful = dict(careful)
        self._config = config
        self._max_age_steps = max_age_steps
        self._state = from_plain(learner.notes.get(_NOTE, {}), max_age_steps)

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
        """One step as `PolicyLearner.step`, with the recipe of the present level, then the guard's decision."""
        level = self._state.level
        report = self._learner.step(draw, self._careful.get(level), is_frozen=level is Level.FROZEN)
        self._state = decide(self._state, report.diagnostics, self._config, self._max_age_steps)
        self._learner.notes[_NOTE] = asdict(self._state)
        return replace(report, diagnostics={**report.diagnostics, **self._state.figures()})

    def snapshot(self) -> tuple[PolicyVersion, dict[str, Tensor]]:
        """Version and published tensors that belong together."""
        return self._learner.snapshot()

    def weights(self) -> dict[str, Tensor]:
        """The published tensors of the newest version."""
        return self._learner.weights()

    def save(self) -> None:
        """Writes a checkpoint (blocking)."""
        self._learner.save()
