"""What each optimizer update of a step learns from: groups, and for recipes that ask for it one turn at a time.

Invariant: every trained token of the draw is learned from in exactly one update.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swarm.objectives.batch import Batch
from swarm.objectives.coefficients import with_mask
from swarm.objectives.fallbacks import RecipeSet, RecipeSlice
from swarm.objectives.part import Requirement


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """A draw with advantages, and what each optimizer update learns from; made once per step."""

    batch: Batch  # the whole draw
    slices: tuple[RecipeSlice, ...]  # of the whole draw, by recipe
    updates: tuple[tuple[RecipeSlice, ...], ...]  # one entry per update; `places` are rollouts of `batch`


def split_step(batch: Batch, slices: Sequence[RecipeSlice], recipes: RecipeSet, updates_per_step: int) -> StepPlan:
    """The updates of a draw that has its advantages: `updates_per_step` of them, or as many for each turn.

    Args:
        batch: the whole draw.
        slices: of it, by recipe.
        recipes: the main one says whether turns have updates of their own.
        updates_per_step: parts that groups are split into.

    Returns:
        A recipe that stands in for the main one learns turn by turn as well, but sees no turn behind: what it adds to
        the loss beside advantages would count those tokens in several updates.
    """
    by_turn = updates_by_turn(recipes)
    if updates_per_step == 1 and not by_turn:
        return StepPlan(batch=batch, slices=tuple(slices), updates=(tuple(slices),))
    parts = minibatches(batch, updates_per_step)
    if by_turn:
        turns = batch.turn_ids[batch.mask].unique().flip(0).tolist()
        parts = [(places, found) for turn in turns for places, part in parts if (found := of_turn(part, turn))]
    updates = [
        tuple(
            replace(each, places=places[each.places], batch=_seen_by_its_recipe(each)) for each in recipes.slices(part)
        )
        for places, part in parts
    ]
    return StepPlan(batch=batch, slices=tuple(slices), updates=tuple(updates))


def _seen_by_its_recipe(part: RecipeSlice) -> Batch:
    if part.batch.turn is None or Requirement.TURN_UPDATES in part.recipe.needs:
        return part.batch
    return with_mask(part.batch, part.batch.learned)


def updates_by_turn(recipes: RecipeSet) -> bool:
    """Whether the main recipe asks for an update of each turn: then the others learn turn by turn, too."""
    return Requirement.TURN_UPDATES in recipes.main.needs


def minibatches(batch: Batch, count: int) -> list[tuple[Tensor, Batch]]:
    """Splits a draw by whole groups into at most `count` batches, each with totals of its own.

    Group g goes to batch g mod count, so that each has local and external groups alike.

    Returns:
        (indices of its rollouts in `batch`, int64; the batch) of each.
    """
    num_groups = len(batch.prompts)
    split = [list(range(first, num_groups, count)) for first in range(min(count, num_groups))]
    return [batch.of_groups(groups) for groups in split]


def of_turn(batch: Batch, turn: int) -> Batch | None:
    """The batch to learn from one turn alone: advantages of the others are 0, and only those behind it are scored too.

    Returns:
        None where the turn has no trained token.
    """
    is_own = batch.turn_ids == turn
    if not bool((batch.mask & is_own).any()):
        return None
    advantages = torch.where(is_own, batch.advantages, torch.zeros_like(batch.advantages))
    return with_mask(replace(batch, turn=turn, advantages=advantages), batch.mask & (batch.turn_ids >= turn))
