"""Step plan: splits a draw into optimizer updates by groups and, for recipes that ask for it, by turns.

Invariant: every trained token of the draw is learned from in exactly one update.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median_low

import torch
from torch import Tensor

from swarm.objectives.batch import Batch
from swarm.objectives.coefficients import with_mask
from swarm.objectives.fallbacks import RecipeSet, RecipeSlice
from swarm.objectives.part import Requirement


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """A draw with advantages, and its slices by recipe for each optimizer update; made once per step."""

    batch: Batch  # the whole draw
    slices: tuple[RecipeSlice, ...]  # of the whole draw, by recipe
    updates: tuple[tuple[RecipeSlice, ...], ...]  # one entry per update; `places` are rollouts of `batch`


def split_step(batch: Batch, slices: Sequence[RecipeSlice], recipes: RecipeSet, updates_per_step: int) -> StepPlan:
    """Splits a draw with advantages into at most `updates_per_step` updates, or as many for each range of turns.

    Args:
        batch: the whole draw.
        slices: the whole draw's slices, by recipe.
        recipes: the main recipe decides if ranges of turns have their own updates.
        updates_per_step: most parts that the groups are split into.

    Returns:
        The plan. A fallback recipe without TURN_UPDATES learns turn by turn as well, but sees no later turns: its other
        loss terms, such as a KL penalty, would count tokens of later turns in several updates.
    """
    by_turn = updates_by_turn(recipes)
    if updates_per_step == 1 and not by_turn:
        return StepPlan(batch=batch, slices=tuple(slices), updates=(tuple(slices),))
    parts = minibatches(batch, updates_per_step)
    if by_turn:
        parts = [
            (places, found)
            for turns in turn_ranges(batch)
            for places, part in parts
            if (found := of_turns(part, turns))
        ]
    updates = [
        tuple(
            replace(each, places=places[each.places], batch=_seen_by_its_recipe(each)) for each in recipes.slices(part)
        )
        for places, part in parts
    ]
    return StepPlan(batch=batch, slices=tuple(slices), updates=tuple(updates))


def _seen_by_its_recipe(part: RecipeSlice) -> Batch:
    if part.batch.turns is None or Requirement.TURN_UPDATES in part.recipe.needs:
        return part.batch
    return with_mask(part.batch, part.batch.learned)


def updates_by_turn(recipes: RecipeSet) -> bool:
    """True if the main recipe asks for updates by turn; the other recipes then learn turn by turn, too."""
    return Requirement.TURN_UPDATES in recipes.main.needs


def minibatches(batch: Batch, count: int) -> list[tuple[Tensor, Batch]]:
    """Splits a draw by whole groups into at most `count` batches, each with its own totals.

    Group g goes to batch g mod count, which mixes local and external groups.

    Returns:
        For each batch, the int64 indices of its rollouts in `batch`, and the batch.
    """
    num_groups = len(batch.prompts)
    split = [list(range(first, num_groups, count)) for first in range(min(count, num_groups))]
    return [batch.of_groups(groups) for groups in split]


def turn_ranges(batch: Batch) -> list[tuple[int, int]]:
    """(first, last) turn of each update, the deepest turns first.

    Turns from the deepest turn of our own episodes onwards share an update: deeper episodes of other nodes add none.
    Without own episodes, the median of the deepest turns of established sources, else of all sources, replaces it.
    """
    turns: list[int] = batch.turn_ids[batch.mask].unique().tolist()
    depth = torch.where(batch.mask, batch.turn_ids, 0).amax(dim=1)
    has_tokens = batch.mask.any(dim=1)
    own = has_tokens & ~batch.from_peers
    if bool(own.any()):
        deepest = int(depth[own].max())
    else:
        counted = has_tokens & ~batch.newcomers
        longest: dict[str, int] = {}
        for row in (counted if bool(counted.any()) else has_tokens).nonzero().flatten().tolist():
            source = batch.sources[int(batch.group_index[row])]
            longest[source] = max(longest.get(source, 0), int(depth[row]))
        deepest = median_low(longest.values()) if longest else 0
    kept = [turn for turn in turns if turn < deepest]
    return [(deepest, max(turns, default=deepest)), *((turn, turn) for turn in reversed(kept))]


def of_turns(batch: Batch, turns: tuple[int, int]) -> Batch | None:
    """The batch for an update of `turns` (first, last): earlier turns leave the mask, later turns have advantage 0.

    Returns:
        The batch; None if the turns have no trained token.
    """
    part = with_mask(replace(batch, turns=turns), batch.mask & (batch.turn_ids >= turns[0]))
    learned = part.learned
    if not bool(learned.any()):
        return None
    return replace(part, advantages=torch.where(learned, part.advantages, torch.zeros_like(part.advantages)))
