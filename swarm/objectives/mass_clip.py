"""Bound on the influence of other nodes: scales the coefficients of their groups down to those of a typical own group.

The clip follows the recipe and is the same for every recipe.

Invariant: a newcomer's group has at most 1 / (I + J) of the mass of a typical step of own groups, and an established
node's group at most MASS_FACTOR times that; n groups of one source have at most n times as much. Own groups, and all
other groups within the bound, are unchanged bit for bit.
Shape letters: N rollouts, L longest response in tokens, M groups.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median, median_low
from typing import Any, Final

import torch
from torch import Tensor

from swarm.objectives.batch import Batch, MassClip, Masses
from swarm.objectives.part import Scope, on_mask
from swarm.objectives.recipe import Recipe
from swarm.trust_policy import MASS_FACTOR

WINDOW: Final = 64  # updates whose own groups are the reference


def rollout_masses(by_logprob: Tensor, by_entropy: Tensor | None, logprobs: Tensor, mask: Tensor) -> Tensor:
    """Masses [N, 2] of rollouts: sum |c_t| and sum |c_t| (1 - pi_t), plus the sum of |entropy coefficients| in both.

    Args:
        by_logprob: [N, L], coefficients.
        by_entropy: [N, L], coefficients of the entropy, or None.
        logprobs: [N, L] nats, log pi.
        mask: bool [N, L].
    """
    size, doubt = by_logprob.detach().abs(), -torch.expm1(on_mask(logprobs.detach(), mask).clamp(max=0))
    more = torch.zeros_like(size) if by_entropy is None else by_entropy.detach().abs()
    return torch.stack(((size + more).sum(dim=1), (size * doubt + more).sum(dim=1)), dim=1)


def clip_factors(batch: Batch, masses: Tensor) -> Tensor | None:
    """Factor [N] in [0, 1] for each rollout's coefficients; None if nothing is to be clipped.

    Args:
        batch: has in `mass_clip.used` the part of each group's bound that earlier micro-batches used.
        masses: [N, 2], of the batch's rollouts, before the clip.
    """
    clip = batch.mass_clip
    if clip is None or not bool(batch.from_peers.any()):
        return None
    reference = clip.reference or reference_masses([(batch, masses)])
    if reference is None:
        return None
    share = [each / clip.num_groups for each in (reference.coefficients, reference.pull)]
    of_group = group_masses(batch, masses)
    factor = torch.full_like(of_group, MASS_FACTOR).index_fill_(0, batch.group_index[batch.newcomers], 1.0)
    left = factor * of_group.new_tensor(share) - (0 if clip.used is None else clip.used)
    is_beyond = ((of_group > left) & (of_group > 0))[batch.group_index] & batch.from_peers[:, None]
    if not bool(is_beyond.any()):
        return None
    factors = torch.where(is_beyond, (left.clamp(min=0) / of_group)[batch.group_index], 1.0)
    return factors.min(dim=1).values


def group_masses(batch: Batch, masses: Tensor) -> Tensor:
    """Masses of groups, the sums over their rollouts: float64 [M, 2]."""
    total = torch.zeros((len(batch.sources), 2), dtype=torch.float64, device=masses.device)
    return total.index_add_(0, batch.group_index, masses.double())


def clip_figures(parts: Iterable[tuple[Batch, Tensor]]) -> tuple[int, float]:
    """Returns (number of clipped groups, share of other nodes in sum |c_t| after the clip) of one update.

    Args:
        parts: each batch of the update with the masses [N, 2] of its rollouts, before the clip.
    """
    num_clipped, own, others = 0, 0.0, 0.0
    for batch, masses in parts:
        factors = clip_factors(batch, masses)
        left = masses[:, 0].double()
        if factors is not None:
            num_clipped += len(batch.group_index[factors < 1].unique())
            left = left * factors
        own += float(left[~batch.from_peers].sum())
        others += float(left[batch.from_peers].sum())
    return num_clipped, others / (own + others) if own + others > 0 else 0.0


def scope_of(recipe: Recipe, batch: Batch, num_ranks: int = 1) -> Scope:
    """Returns the scope of a coefficient with the clip: STEP if the clip has no reference but the step itself.

    In one process, each micro-batch gets what earlier ones left of a group's bound. Several processes share no such
    count, so their micro-batches contain whole groups.
    """
    if batch.mass_clip is None or not bool(batch.from_peers.any()):
        return recipe.scope
    if batch.mass_clip.reference is None:
        return Scope.STEP
    return recipe.scope if num_ranks == 1 else max(recipe.scope, Scope.GROUP, key=lambda scope: scope.reach)


def reference_masses(parts: Iterable[tuple[Batch, Tensor]]) -> Masses | None:
    """Masses of a typical group of one update, times the number of groups; None if all masses are 0.

    The mean of own groups; without own groups, the median of the means of established sources; without these, of
    newcomers. Fewer than half of the sources cannot move the median beyond the other values.

    Args:
        parts: each batch of the update with the masses [N, 2] of its rollouts, before the clip.
    """
    own: list[tuple[float, float]] = []
    established: dict[str, list[tuple[float, float]]] = {}
    newcomers: dict[str, list[tuple[float, float]]] = {}
    for batch, masses in parts:
        of_group = (group_masses(batch, masses) * batch.step_groups).tolist()
        by_peers = set(batch.group_index[batch.from_peers].tolist())
        fresh = set(batch.group_index[batch.newcomers].tolist())
        for group, (size, pull) in enumerate(of_group):
            if size > 0 and group not in by_peers:
                own.append((size, pull))
            elif size > 0:
                sources = newcomers if group in fresh else established
                sources.setdefault(batch.sources[group], []).append((size, pull))
    if own:
        return Masses(coefficients=fmean(size for size, _ in own), pull=fmean(pull for _, pull in own))
    means = [[fmean(column) for column in zip(*found, strict=True)] for found in (established or newcomers).values()]
    if not means:
        return None
    return Masses(coefficients=median_low(size for size, _ in means), pull=median_low(pull for _, pull in means))


@dataclass(slots=True)
class MassHistory:
    """Reference masses of the last WINDOW updates of each recipe, as plain data for checkpoints."""

    seen: dict[str, list[list[float]]]  # name of the recipe -> (sum |c_t|, pull), oldest first

    def clip(self, recipe: Recipe, num_groups: float, parts: Sequence[tuple[Batch, Tensor]]) -> MassClip:
        """Returns the bound for the next batch of an update: from the median of remembered updates, else from `parts`.

        Args:
            recipe: main recipe of the step.
            num_groups: nominal groups of an update, I + J.
            parts: batches of this update so far, with masses [N, 2]; used if no update is remembered.
        """
        columns = list(zip(*self.seen.get(recipe.name, ()), strict=True))
        if not columns:
            return MassClip(num_groups=num_groups, reference=reference_masses(parts))
        return MassClip(
            num_groups=num_groups, reference=Masses(coefficients=median(columns[0]), pull=median(columns[1]))
        )

    def observe(self, recipe: Recipe, parts: Sequence[tuple[Batch, Tensor]]) -> None:
        """Appends the reference masses of a finished update, if any mass is above 0."""
        found = reference_masses(parts)
        if found is not None:
            self.seen[recipe.name] = [*self.seen.get(recipe.name, ()), [found.coefficients, found.pull]][-WINDOW:]

    @staticmethod
    def from_json(data: Any) -> "MassHistory":
        """Loads the history from the data of a checkpoint; empty data gives an empty history."""
        return MassHistory({name: [list(pair) for pair in pairs] for name, pairs in dict(data).items()})
