"""A game of two turns whose policy is two tables of logits: a recipe's updates, and the exact expected outcome.

Invariant: a quantity is a function of its seed; both sides start from equal tables and play as many episodes.
Shape letters: N episodes of a step.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from benchmarks._turn_played import GROUP_SIZE, NUM_STEP_GROUPS
from swarm.learn.step_plan import split_step
from swarm.objectives.batch import Batch
from swarm.objectives.coefficients import coefficients, with_advantages
from swarm.objectives.fallbacks import RecipeSet
from swarm.objectives.methods import load_recipe
from swarm.objectives.recipe import Recipe
from swarm.testing.batches import toy_batch

NUM_STEPS: Final = 300
OUTCOMES: Final = ((11.0, -30.0, 0.0), (-30.0, 7.0, 6.0), (0.0, 0.0, 5.0))
"""By first and second action, the climbing game: who plays the second turn at random does best with the third row."""


@dataclass(slots=True)
class Tables:
    """A policy: logits of the first action, and of the second one by the first."""

    first: Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64, requires_grad=True))
    second: Tensor = field(default_factory=lambda: torch.zeros((3, 3), dtype=torch.float64, requires_grad=True))

    @property
    def expected(self) -> float:
        """Outcome."""
        joint = self.first.detach().softmax(dim=0)[:, None] * self.second.detach().softmax(dim=1)
        return float((joint * torch.tensor(OUTCOMES, dtype=torch.float64)).sum())

    def play(self, dice: torch.Generator) -> tuple[Tensor, Batch]:
        """Actions int64 [N, 2] and what they came to."""
        count = NUM_STEP_GROUPS * GROUP_SIZE
        first = torch.multinomial(self.first.detach().softmax(dim=0), count, replacement=True, generator=dice)
        second = torch.multinomial(self.second.detach().softmax(dim=1)[first], 1, generator=dice)
        actions = torch.cat([first[:, None], second], dim=1)
        batch = toy_batch(
            torch.tensor(OUTCOMES, dtype=torch.float64)[actions[:, 0], actions[:, 1]],
            torch.ones((count, 2), dtype=torch.bool),
            groups=torch.arange(count) // GROUP_SIZE,
            behavior_logprobs=self.logprobs(actions).detach(),
            turn_ids=torch.arange(2).expand(count, 2),
            turn_rewards=torch.zeros((count, 2), dtype=torch.float64),
            num_turns=torch.full((count,), 2),
            num_calls=torch.zeros((count, 2), dtype=torch.int64),
        )
        return actions, batch

    def logprobs(self, actions: Tensor) -> Tensor:
        """[N, 2], with gradient."""
        first, second = actions.unbind(dim=1)
        return torch.stack([self.first.log_softmax(dim=0)[first], self.second.log_softmax(dim=1)[first, second]], dim=1)

    def learn(self, recipe: Recipe, actions: Tensor, batch: Batch, rate: float) -> None:
        """The updates of a step, by plain gradient descent."""
        recipes = RecipeSet(main=recipe)
        batch = with_advantages(recipe, batch, "all")
        for (update,) in split_step(batch, recipes.slices(batch), recipes, 1).updates:
            logprobs = self.logprobs(actions)
            found = coefficients(recipe, update.batch, logprobs.detach(), torch.zeros_like(logprobs))
            for table, grad in zip(
                (self.first, self.second),
                torch.autograd.grad((found.logprobs * logprobs).sum(), (self.first, self.second)),
                strict=True,
            ):
                table.data -= rate * grad


@functools.cache
def expected_outcomes(is_joint: bool, rate: float, seed: int) -> list[float]:
    """After each step, of `seeupo` or of its parts without what makes it go turn by turn."""
    recipe = load_recipe("seeupo")
    recipe = replace(recipe, shapers=()) if is_joint else recipe
    tables, dice = Tables(), torch.Generator().manual_seed(seed)
    found: list[float] = []
    for _ in range(NUM_STEPS):
        tables.learn(recipe, *tables.play(dice), rate)
        found.append(tables.expected)
    return found


def outcome_reached(rate: float) -> Callable[[int], tuple[float, float]]:
    """In the end, over the best there is."""
    best = max(map(max, OUTCOMES))
    return lambda seed: (
        expected_outcomes(False, rate, seed)[-1] / best,
        expected_outcomes(True, rate, seed)[-1] / best,
    )


def falls(rate: float) -> Callable[[int], tuple[float, float]]:
    """Share of steps after which the expected outcome is lower than before."""

    def share(is_joint: bool, seed: int) -> float:
        values = expected_outcomes(is_joint, rate, seed)
        return sum(after < before for before, after in pairwise(values)) / (len(values) - 1)

    return lambda seed: (share(False, seed), share(True, seed))
