"""A mixture of policies as the denominator, for rollouts of generators whose probabilities nobody knows.

Invariant: a foreign token's ratio is at most 2 / (1 - share), however small any single probability is; no
log-probs of the generator are read.
Shape letters: N rollouts, L longest response in tokens.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import RatioPart, Requirement, Scored
from swarm.objectives.parts.ratio.token import LOG_RATIO_BOUND, log_ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class MixtureRatio(RatioPart):
    """Multiple importance sampling: foreign tokens count as drawn from pi_old and a guess of the generator alike.

    The guess is a mixture of pi_old and certainty: the token was in fact produced. Own tokens have the ratio to
    pi_old.

    Source: RL-PLUS, arXiv:2508.00222; YihongDong/RL-PLUS `rlplus_core_alg.py`.
    """

    equation: ClassVar[str] = "foreign: r_t = 2 pi / (pi_old + share pi_old + (1 - share)); own: r_t = pi / pi_old"
    share: float = 0.5  # of pi_old in the guess

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise ConfigError(f"share: {self.share} must lie in [0, 1), or nothing bounds the ratio")

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.PROXIMAL_LOGPROBS})

    def __call__(self, scored: Scored) -> Tensor:
        own = log_ratio(scored.logprobs, scored.proximal, scored.mask)
        old = scored.proximal.clamp(max=0).exp()
        mixture = math.log(2) + scored.logprobs - torch.log(old + self.share * old + (1 - self.share))
        mixture = torch.where(scored.mask, mixture, torch.zeros_like(mixture)).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        return torch.where(scored.batch.is_external[:, None], mixture, own)
