"""The one equation of every objective: gradient = sum over tokens of c_t * grad log pi(token_t).

Invariant: a recipe sees log-probabilities, never a network; c_t = d(loss)/d(log pi_t) is exact, by
autograd on a detached leaf. Micro-batches give the gradient of the one big batch.
Shape letters: N rollouts, L longest response in tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from math import inf, log
from typing import Literal, cast

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.batch import Batch
from swarm.objectives.mass_clip import clip_factors, rollout_masses
from swarm.objectives.part import Requirement, Scored, on_mask
from swarm.objectives.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class Coefficients:
    """Derivatives of a recipe's loss, which the backward pass starts from, and figures of the step."""

    logprobs: Tensor  # [N, L], d(loss)/d(log pi_t), 0 off the mask
    entropy: Tensor | None  # [N, L], d(loss)/d(entropy_t); None where no part uses it with gradient
    loss: float
    log_ratio: Tensor  # [N, L], detached, as the recipe formed it
    bounded: Tensor  # bool [N, L], trained tokens with an advantage that the weight rule clipped or capped
    factor: Tensor  # [N, L], product of the corrections; 0 where a correction or the ceiling dropped a token
    masses: Tensor  # [N, 2], see `mass_clip.rollout_masses`, before the clip
    kept: Tensor  # [N, 2], masses after the clip

    def spread(self, members: Tensor, num_rollouts: int) -> "Coefficients":
        """Returns `num_rollouts` rows: these rows at the indices `members` (int64 [N]), 0 elsewhere."""

        def place(values: Tensor) -> Tensor:
            whole = torch.zeros((num_rollouts, values.shape[1]), dtype=values.dtype, device=values.device)
            whole[members] = values
            return whole

        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return replace(self, **{name: place(value) for name, value in values.items() if isinstance(value, Tensor)})


def check_legal(recipe: Recipe, batch: Batch) -> None:
    """Raises ConfigError, with source and fix, if the recipe needs behaviour log-probs that a rollout lacks."""
    for rollout, correction in enumerate(batch.corrections):
        if not recipe.accepts(correction):
            source = batch.sources[int(batch.group_index[rollout])]
            raise ConfigError(
                f"learner.recipe {recipe.name} needs behaviour log-probs, but a rollout of {source[:8]} is "
                f"{correction.value}: use sapo_swarm, or do not draw such groups"
            )


def with_advantages(recipe: Recipe, batch: Batch, external: Literal["all", "positive"]) -> Batch:
    """Returns the whole step with advantages and, unless its turns have roles, shaped rewards.

    Tokens whose advantage is NaN leave the mask; `external="positive"` also drops external tokens with a negative
    advantage. The group's statistics include the dropped members and the step totals keep counting them, so that
    the step size does not depend on how many were dropped.

    Raises:
        ConfigError: the recipe needs behaviour log-probs that a rollout lacks.
    """
    check_legal(recipe, batch)
    batch = replace(batch, outcomes=batch.rewards)
    if batch.turn_roles is None:
        batch, advantages = _advantages(recipe, batch)
    else:  # each role has rewards and statistics of its own, as if the others were not there
        advantages = torch.zeros_like(batch.advantages)
        for role, is_theirs in _tokens_of_roles(batch).items():
            own = replace(batch, rewards=_role_rewards(batch, role))
            own = with_mask(replace(own, outcomes=own.rewards), batch.mask & is_theirs)
            _, of_role = _advantages(recipe, replace(own, length=own.mask.sum(dim=1)))
            advantages = torch.where(is_theirs, of_role.to(advantages.dtype), advantages)
    mask = batch.mask & ~torch.isnan(advantages)
    if external == "positive":
        mask = mask & ~(batch.is_external[:, None] & (advantages < 0))
    return with_mask(replace(batch, advantages=advantages), mask)


def _advantages(recipe: Recipe, batch: Batch) -> tuple[Batch, Tensor]:
    """Returns the batch with shaped rewards, and the advantages [N, L]."""
    for part in recipe.rewards:
        batch = replace(batch, rewards=part(batch))
    advantages = recipe.advantage(batch)
    return batch, advantages[:, None].expand(batch.mask.shape) if advantages.dim() == 1 else advantages


def _tokens_of_roles(batch: Batch) -> dict[str, Tensor]:
    """Role -> bool [N, L], True on tokens of the role's turns; the role "" stands for turns without a role."""
    found: dict[str, Tensor] = {}
    for rollout, turns in enumerate(batch.turn_roles or ()):
        for turn, role in enumerate(turns):
            tokens = found.setdefault(role, torch.zeros_like(batch.mask))
            tokens[rollout] |= batch.turn_ids[rollout] == turn
    return found


def _role_rewards(batch: Batch, role: str) -> Tensor:
    """Reward [N] of each episode for a role; for "" the episode's own, for a role without a named reward 0."""
    if not role:
        return batch.rewards
    rewards = batch.reward_parts.get(role)
    return torch.zeros_like(batch.rewards) if rewards is None else rewards.to(batch.rewards.dtype)


def scored(
    recipe: Recipe, batch: Batch, logprobs: Tensor, entropy: Tensor, probes: Mapping[str, Tensor] | None = None
) -> Scored:
    """Returns the batch as the recipe's later parts see it: `within_bounds`, with shaped advantages and log-ratio.

    Log-ratios of tokens that `within_bounds` checks against the ceiling are at most the log of that ceiling.

    Args:
        recipe: supplies shapers and ratio.
        batch: has advantages, and at least one token within bounds.
        logprobs: [N, L] nats; values off the mask are ignored.
        entropy: [N, L] nats; values off the mask are ignored.
        probes: name -> [N, L], for a recipe with probes.
    """
    batch, is_claimed = within_bounds(recipe, batch, logprobs), _is_claimed(recipe, batch)
    seen = Scored(
        batch=batch,
        logprobs=on_mask(logprobs, batch.mask),
        entropy=on_mask(entropy, batch.mask),
        advantages=batch.advantages.to(logprobs.dtype),
        log_ratio=torch.zeros_like(logprobs),
        probes={name: on_mask(values.detach(), batch.mask) for name, values in (probes or {}).items()},
    )
    for part in recipe.shapers:
        seen = replace(seen, advantages=on_mask(part(seen).detach(), batch.mask))
    log_ratio = recipe.ratio(seen)
    if is_claimed is not None:
        log_ratio = torch.where(is_claimed[:, None], log_ratio.clamp(max=log(batch.ratio_ceiling)), log_ratio)
    return replace(seen, log_ratio=log_ratio)


def within_bounds(recipe: Recipe, batch: Batch, logprobs: Tensor) -> Batch:
    """Returns the batch without the tokens whose ratio to the generator is out of bounds; all tokens may be dropped.

    The bounds are `batch.ratio_band` for every token and, if the recipe needs behaviour log-probs, the ceiling for
    tokens of other nodes: their ratio must not exceed `batch.ratio_ceiling`, nor fall below its inverse at a negative
    advantage. Tokens leave the mask before the recipe forms a ratio, so a sequence's ratio is that of its other tokens.
    """
    is_claimed = _is_claimed(recipe, batch)
    if is_claimed is None and batch.ratio_band == inf:
        return batch
    log_ratio = logprobs.detach() - batch.behavior_logprobs.to(logprobs.dtype)  # NaN where unknown: never beyond
    is_beyond = log_ratio.abs() > log(batch.ratio_band)
    if is_claimed is not None:
        most = log(batch.ratio_ceiling)
        is_lie = (log_ratio > most) | ((log_ratio < -most) & (batch.advantages < 0))
        is_beyond |= is_lie & is_claimed[:, None]
    return with_mask(batch, batch.mask & ~is_beyond)


def _is_claimed(recipe: Recipe, batch: Batch) -> Tensor | None:
    """bool [N], rollouts of other nodes with log-probs that the recipe needs; None if none, or without a ceiling."""
    if Requirement.BEHAVIOR_LOGPROBS not in recipe.needs or batch.ratio_ceiling == inf:
        return None
    is_claimed = batch.from_peers & batch.has_logprobs
    return is_claimed if bool(is_claimed.any()) else None


def with_mask(batch: Batch, mask: Tensor) -> Batch:
    """Returns the batch with this mask; advantages and log-probs become 0 off the mask."""
    return replace(
        batch,
        mask=mask,
        advantages=on_mask(batch.advantages, mask),
        behavior_logprobs=on_mask(batch.behavior_logprobs, mask),
        proximal_logprobs=None if batch.proximal_logprobs is None else on_mask(batch.proximal_logprobs, mask),
        reference_logprobs=None if batch.reference_logprobs is None else on_mask(batch.reference_logprobs, mask),
    )


def coefficients(
    recipe: Recipe, batch: Batch, logprobs: Tensor, entropy: Tensor, probes: Mapping[str, Tensor] | None = None
) -> Coefficients:
    """Computes d(loss)/d(log pi_t) of a recipe at the current log-probs, clipped by mass; 0 if no token is in bounds.

    Args:
        recipe: supplies the loss.
        batch: has advantages; contains whole rollouts, groups or the step, as `mass_clip.scope_of` requires.
        logprobs: [N, L] nats under the policy being optimised; values off the mask are ignored.
        entropy: [N, L] nats; values off the mask are ignored.
        probes: name -> [N, L], for a recipe with probes.
    """
    if not bool(within_bounds(recipe, batch, logprobs).mask.any()):
        return _nothing(batch, logprobs)
    leaf = on_mask(logprobs.detach(), batch.mask).requires_grad_()
    entropy_leaf = on_mask(entropy.detach(), batch.mask).requires_grad_()
    with torch.enable_grad():
        seen = scored(recipe, batch, leaf, entropy_leaf, probes)
        batch = seen.batch
        tokens = recipe.weight(seen)
        factor = torch.ones_like(leaf, requires_grad=False)
        for part in recipe.corrections:
            factor = factor * part(seen).detach()
        loss = recipe.aggregate(on_mask(tokens.losses * factor, batch.mask), seen)
        for term in recipe.terms:
            loss = loss + term(seen)
        found = (
            torch.autograd.grad(loss, (leaf, entropy_leaf), allow_unused=True) if loss.requires_grad else (None,) * 2
        )
    by_logprob, by_entropy = cast(tuple[Tensor | None, Tensor | None], found)
    by_logprob = torch.zeros_like(logprobs) if by_logprob is None else on_mask(by_logprob, batch.mask)
    by_entropy = None if by_entropy is None else on_mask(by_entropy, batch.mask)
    masses = rollout_masses(by_logprob, by_entropy, logprobs, batch.mask)
    clip = clip_factors(batch, masses)
    if clip is not None:
        by_logprob, by_entropy = _scaled(by_logprob, clip), None if by_entropy is None else _scaled(by_entropy, clip)
    return Coefficients(
        logprobs=by_logprob,
        entropy=by_entropy,
        loss=float(loss.detach()),
        log_ratio=seen.log_ratio.detach(),
        bounded=tokens.bounded & batch.mask & (seen.advantages != 0),
        factor=on_mask(factor, batch.mask),
        masses=masses,
        kept=masses if clip is None else _scaled(masses, clip),
    )


def _nothing(batch: Batch, logprobs: Tensor) -> Coefficients:
    """Returns zero coefficients, for a batch without a token to learn from."""
    zeros = torch.zeros_like(logprobs)
    return Coefficients(
        logprobs=zeros,
        entropy=None,
        loss=0.0,
        log_ratio=zeros,
        bounded=torch.zeros_like(batch.mask),
        factor=zeros,
        masses=(none := zeros.new_zeros((batch.num_rollouts, 2))),
        kept=none,
    )


def _scaled(values: Tensor, factors: Tensor) -> Tensor:
    return values * factors.to(values.dtype)[:, None]
