"""A band around ratio 1, for whatever log-probs of the generator there are.

Invariant: a token whose generator log-prob is unknown is kept.
Shape letters: N rollouts, L longest response in tokens.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.learn.part import CorrectionPart, Scored
from swarm.learn.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownRatioBand(CorrectionPart):
    """Leaves out tokens whose ratio to the generator lies outside [1/cap, cap], where that ratio is known.

    Source: ours (the guard's first level); the band of masked importance sampling, without its weight.
    """

    equation: ClassVar[str] = "L_t <- 1[1/cap <= pi/mu <= cap] L_t, 1 where mu is unknown"
    cap: float = 4.0

    def __post_init__(self) -> None:
        if self.cap <= 1:
            raise ConfigError(f"cap: {self.cap} must be above 1")

    def __call__(self, scored: Scored) -> Tensor:
        is_known = scored.mask & scored.batch.has_logprobs[:, None]
        difference = scored.logprobs.detach() - torch.where(is_known, scored.behavior, 0.0)
        is_inside = difference.abs() <= math.log(self.cap)
        return (is_inside | ~is_known).to(scored.logprobs.dtype)


def capped(recipe: Recipe, cap: float) -> Recipe:
    """The recipe with that band on top."""
    return replace(recipe, corrections=(*recipe.corrections, KnownRatioBand(cap=cap)))
