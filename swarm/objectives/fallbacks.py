"""Recipes by kind of rollout, and slices of steps that mix kinds.

Invariant: exactly one recipe, which accepts the kind, learns from each group of a step, and losses are divided by
totals of the whole step, so that slices add up as micro-batches do. Newcomers have separate slices, and the totals do
not depend on the number of their tokens: the content of a newcomer's rollouts changes no coefficient of other nodes.
Shape letters: N rollouts, L longest response in tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.batch import Batch
from swarm.objectives.part import Requirement
from swarm.objectives.recipe import Recipe
from swarm.types import Correction

MAIN = ""
"""Name of the slice of the learner's own recipe."""

KEYS = {Correction.NO_LOGPROBS: "recipe_without_logprobs", Correction.TEXT_ONLY: "recipe_text_only"}
"""Kind of rollout -> key of the `[learner]` section that names its fallback recipe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeSlice:
    """The groups of a batch that one recipe learns from."""

    name: str  # MAIN, or the kind whose fallback it is; what its parts remember is kept under this name
    recipe: Recipe
    places: Tensor  # int64 [n], of its rollouts in the whole batch
    batch: Batch  # its rollouts, with the totals of the whole batch
    is_newcomers: bool = False  # made by nodes that are not established: read what parts remember, and add nothing


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeSet:
    """The learner's recipe, and fallback recipes for rollouts without the log-probs that it needs.

    Example:
        RecipeSet(main=load_recipe("grpo"), fallbacks={Correction.TEXT_ONLY: load_recipe("sapo_swarm")})
    """

    main: Recipe
    fallbacks: Mapping[Correction, Recipe] = field(default_factory=dict[Correction, Recipe])

    def __post_init__(self) -> None:
        for kind, recipe in self.fallbacks.items():
            if not recipe.accepts(kind):
                raise ConfigError(
                    f"learner.{KEYS[kind]}: {recipe.name} needs behaviour log-probs, which {kind} groups do not have; "
                    'use sapo_swarm, or "" to refuse such groups'
                )

    def of(self, kind: Correction) -> tuple[str, Recipe] | None:
        """Returns the slice name and the recipe of a kind; None if no recipe accepts the kind."""
        if self.main.accepts(kind):
            return MAIN, self.main
        return (str(kind), self.fallbacks[kind]) if kind in self.fallbacks else None

    @property
    def used(self) -> dict[str, Recipe]:
        """Every recipe that may learn from a group of some kind, by slice name."""
        return dict(found for kind in Correction if (found := self.of(kind)))

    @property
    def usable(self) -> frozenset[Correction]:
        """Kinds that some recipe accepts; groups of other kinds are not admitted."""
        return frozenset(kind for kind in Correction if self.of(kind))

    @property
    def needs(self) -> frozenset[Requirement]:
        """Requirements of all recipes in `used`."""
        return frozenset[Requirement]().union(*(recipe.needs for recipe in self.used.values()))

    def with_main(self, recipe: Recipe) -> "RecipeSet":
        """Returns a set with this main recipe; the old main recipe is the fallback of kinds that this one refuses."""
        kept = {kind: self.main for kind in KEYS if self.main.accepts(kind) and not recipe.accepts(kind)}
        return RecipeSet(main=recipe, fallbacks={**self.fallbacks, **kept})

    def slices(self, batch: Batch) -> list[RecipeSlice]:
        """Splits the batch by recipe, main recipe first, newcomers last; a single slice contains the batch itself.

        Raises:
            ConfigError: no recipe accepts the kind of some group.
        """
        newcomers = set(batch.group_index[batch.newcomers].tolist())
        groups: dict[tuple[bool, str], list[int]] = {}
        for group, kind in sorted(_kinds(batch).items()):
            found = self.of(kind)
            if found is None:
                raise ConfigError(
                    f"learner.recipe {self.main.name} needs behaviour log-probs, but a group of "
                    f'{batch.sources[group][:8]} is {kind}: set learner.{KEYS[kind]} = "sapo_swarm", '
                    "or do not draw such groups"
                )
            groups.setdefault((group in newcomers, found[0]), []).append(group)
        recipes = self.used
        if len(groups) == 1:
            ((is_newcomers, name),) = groups
            places = torch.arange(batch.num_rollouts, device=batch.mask.device)
            return [RecipeSlice(name=name, recipe=recipes[name], places=places, batch=batch, is_newcomers=is_newcomers)]
        totals = {
            "step_tokens": _tokens_without_newcomers(batch),
            "step_rollouts": batch.step_rollouts,
            "step_groups": batch.step_groups,
        }
        slices: list[RecipeSlice] = []
        for is_newcomers, name in sorted(groups):
            places, part = batch.of_groups(groups[is_newcomers, name])
            part, recipe = replace(part, **totals), recipes[name]
            slices.append(RecipeSlice(name=name, recipe=recipe, places=places, batch=part, is_newcomers=is_newcomers))
        return slices


def merged(batch: Batch, slices: Sequence[RecipeSlice]) -> Batch:
    """Returns the batch with the per-rollout tensors that all slices have, joined from them; `group_index` stays."""
    if len(slices) == 1:
        return slices[0].batch
    found = [each.batch.per_rollout for each in slices]
    names = set.intersection(*(set(values) for values in found)) - {"group_index"}  # groups are renumbered in a slice
    return replace(batch, **{name: _joined([values[name] for values in found], slices) for name in names})


def _joined(values: Sequence[Tensor], slices: Sequence[RecipeSlice]) -> Tensor:
    whole = torch.cat(list(values))
    joined = torch.empty_like(whole)
    joined[torch.cat([each.places for each in slices])] = whole
    return joined


def _tokens_without_newcomers(batch: Batch) -> int:
    """Tokens of the step, with rollouts of newcomers counted at the mean length of the others."""
    is_new = batch.newcomers
    num_others = batch.num_rollouts - int(is_new.sum())
    if num_others in (0, batch.num_rollouts):
        return batch.step_tokens
    others = int(batch.length[~is_new].sum())
    return max(1, round(others * batch.step_rollouts / num_others))


def _kinds(batch: Batch) -> dict[int, Correction]:
    """Kind of each group; a group of several kinds has the one with the least information."""
    order = tuple(Correction)
    kinds: dict[int, Correction] = {}
    for group, kind in zip(batch.group_index.tolist(), batch.corrections, strict=True):
        kinds[group] = max(kinds.get(group, kind), kind, key=order.index)
    return kinds
