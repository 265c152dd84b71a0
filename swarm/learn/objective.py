"""The one equation of every objective: gradient = sum over tokens of c_t * grad log pi(token_t).

Invariant: a recipe sees log-probabilities, never a network; c_t = d(loss)/d(log pi_t) is exact, by
autograd on a detached leaf. Micro-batches give the gradient of the one big batch.
Shape letters: N rollouts, L longest response in tokens.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal, cast

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.learn.batch import Batch
from swarm.types import Correction

Params = Mapping[str, Any]

AdvantagePart = Callable[[Batch, Params], Tensor]
"""Advantages [N] or [N, L] from rewards and groups of the whole step."""
RatioPart = Callable[[Tensor, Batch, Params], Tensor]
"""(log-probs [N, L], batch, params) -> log-ratio [N, L], 0 off the mask."""
WeightPart = Callable[[Tensor, Tensor, Batch, Params], tuple[Tensor, Tensor]]
"""(log-probs, log-ratio, batch, params) -> token losses [N, L] and bool [N, L]: was bounded by the rule."""
AggregatePart = Callable[[Tensor, Batch, Params], Tensor]
"""(token losses [N, L], batch, params) -> scalar that adds up over micro-batches."""
TermPart = Callable[[Tensor, Tensor, Batch, Params], Tensor]
"""(log-probs [N, L], entropy [N, L], batch, params) -> scalar added to the loss."""


class Scope(StrEnum):
    """What a coefficient c_t depends on; beyond a rollout the step is scored before its first backward."""

    TOKEN = "token"
    ROLLOUT = "rollout"
    GROUP = "group"
    STEP = "step"


BEHAVIOR_LOGPROBS = "behavior_logprobs"  # in `needs`: every rollout must be EXACT


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A published method as a choice of parts.

    Example: see `swarm/recipes/grpo.py`.
    """

    name: str
    title: str  # of the paper
    acronym: str
    arxiv: str
    row: str  # row of the systems table, or ""
    verification: Literal["code", "paper", "secondary", "ours"]  # where the formula was read
    advantage: AdvantagePart
    ratio: RatioPart
    weight: WeightPart
    aggregate: AggregatePart
    terms: tuple[TermPart, ...] = ()
    scope: Scope = Scope.TOKEN
    needs: frozenset[str] = frozenset()
    params: Params = field(default_factory=dict[str, Any])  # named constants and their defaults

    def accepts(self, correction: Correction) -> bool:
        """True where this recipe may learn from rollouts of that correction."""
        return correction is Correction.EXACT or BEHAVIOR_LOGPROBS not in self.needs

    def with_params(self, overrides: Params) -> "Recipe":
        """The recipe with some constants replaced. Raises ConfigError on an unknown name or another type."""
        for name, value in overrides.items():
            if name not in self.params:
                known = ", ".join(sorted(self.params)) or "none"
                raise ConfigError(
                    f"learner.recipe_params.{name}: recipe {self.name} has no such constant; known: {known}"
                )
            default = self.params[name]
            is_number = isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool)
            if type(value) is not type(default) and not is_number:
                expected = type(default).__name__
                raise ConfigError(f"learner.recipe_params.{name}: expected {expected}, got {value!r}")
        return replace(self, params={**self.params, **overrides})


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """What the backward pass needs of a recipe."""

    logprobs: Tensor  # [N, L], d(loss)/d(log pi_t), 0 off the mask
    entropy: Tensor | None  # [N, L], d(loss)/d(entropy_t); None where no term uses entropy
    loss: float
    log_ratio: Tensor  # [N, L], detached, as the recipe formed it
    bounded: Tensor  # bool [N, L], trained tokens with an advantage that the weight rule clipped or capped

    def spread(self, members: Tensor, num_rollouts: int) -> "Coefficients":
        """The same at the places of `members` (int64 [N]) among `num_rollouts`, 0 elsewhere."""

        def place(values: Tensor) -> Tensor:
            whole = torch.zeros((num_rollouts, values.shape[1]), dtype=values.dtype, device=values.device)
            whole[members] = values
            return whole

        return Coefficients(
            logprobs=place(self.logprobs),
            entropy=None if self.entropy is None else place(self.entropy),
            loss=self.loss,
            log_ratio=place(self.log_ratio),
            bounded=place(self.bounded),
        )


def check_legal(recipe: Recipe, batch: Batch) -> None:
    """Refuses ratios that do not exist. Raises ConfigError naming the source and the fix."""
    for rollout, correction in enumerate(batch.corrections):
        if not recipe.accepts(correction):
            source = batch.sources[int(batch.group_index[rollout])]
            raise ConfigError(
                f"learner.recipe {recipe.name} needs behaviour log-probs, but a rollout of {source[:8]} is "
                f"{correction.value}: use swarm_sampling, or do not draw such groups"
            )


def with_advantages(recipe: Recipe, batch: Batch, foreign: Literal["all", "positive"]) -> Batch:
    """The whole step with advantages; under `positive`, foreign tokens with a negative one are masked.

    The group's statistics include the dropped members and the step totals keep counting them, so that
    the step size does not depend on how many were dropped.

    Raises:
        ConfigError: the recipe needs behaviour log-probs that a rollout lacks.
    """
    check_legal(recipe, batch)
    advantages = recipe.advantage(batch, recipe.params)
    if advantages.dim() == 1:
        advantages = advantages[:, None].expand(batch.mask.shape)
    mask = batch.mask
    if foreign == "positive":
        mask = mask & ~(batch.is_foreign[:, None] & (advantages < 0))
    zeros = torch.zeros_like(advantages)
    behavior = torch.where(mask, batch.behavior_logprobs, torch.zeros_like(batch.behavior_logprobs))
    return replace(batch, advantages=torch.where(mask, advantages, zeros), mask=mask, behavior_logprobs=behavior)


def coefficients(recipe: Recipe, batch: Batch, logprobs: Tensor, entropy: Tensor) -> Coefficients:
    """d(loss)/d(log pi_t) of a recipe at the current log-probs.

    Args:
        recipe: whose loss.
        batch: with advantages; the whole step where `recipe.scope` is group or step, else any part of it.
        logprobs: [N, L] nats under the policy being optimised; what is off the mask is ignored.
        entropy: [N, L] nats.
    """
    zeros = torch.zeros_like(logprobs)
    leaf = torch.where(batch.mask, logprobs.detach(), zeros).requires_grad_()
    entropy_leaf = torch.where(batch.mask, entropy.detach(), zeros).requires_grad_()
    with torch.enable_grad():
        log_ratio = recipe.ratio(leaf, batch, recipe.params)
        losses, bounded = recipe.weight(leaf, log_ratio, batch, recipe.params)
        loss = recipe.aggregate(torch.where(batch.mask, losses, zeros), batch, recipe.params)
        for term in recipe.terms:
            loss = loss + term(leaf, entropy_leaf, batch, recipe.params)
        found = torch.autograd.grad(loss, (leaf, entropy_leaf), allow_unused=True)
    by_logprob, by_entropy = cast(tuple[Tensor | None, Tensor | None], found)
    return Coefficients(
        logprobs=zeros if by_logprob is None else torch.where(batch.mask, by_logprob, zeros),
        entropy=None if by_entropy is None else torch.where(batch.mask, by_entropy, zeros),
        loss=float(loss.detach()),
        log_ratio=log_ratio.detach(),
        bounded=bounded & batch.mask & (batch.advantages != 0),
    )
