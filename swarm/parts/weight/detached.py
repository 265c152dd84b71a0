"""Detached weights: -sg[w] A log pi. Every token keeps its gradient; only its size is bounded.

Invariant: no gradient flows through a weight.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.learn.part import Scored, TokenLosses, WeightPart


def weighted_likelihood(scored: Scored, log_weight: Tensor, low: float, high: float) -> TokenLosses:
    """-sg[clip(w, low, high)] A log pi, with w = exp(log_weight).

    Args:
        scored: supplies log-probs and advantages.
        log_weight: [N, L], a sum of bounded log-ratios (exp must be finite).
        low: least weight.
        high: greatest weight.
    """
    weight = torch.exp(log_weight.detach())
    losses = -weight.clamp(low, high) * scored.advantages * scored.logprobs
    return TokenLosses(losses=losses, bounded=(weight < low) | (weight > high))


@dataclass(frozen=True, kw_only=True, slots=True)
class DetachedClip(WeightPart):
    """The clipped ratio as a constant weight of the log-likelihood.

    Source: CISPO, arXiv:2506.13585 section 3.1; MinPRO, arXiv:2601.22718.
    """

    equation: ClassVar[str] = "L_t = -sg[clip(r, 1-low, 1+high)] A log pi_t"
    low: float = 1.0  # half-width; 1 = no lower bound
    high: float = 1.0  # half-width

    def __call__(self, scored: Scored) -> TokenLosses:
        return weighted_likelihood(scored, scored.log_ratio, 1 - self.low, 1 + self.high)
