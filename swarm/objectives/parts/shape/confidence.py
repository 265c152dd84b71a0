"""Advantages changed by how sure the policy was.

Invariant: what comes from the policy is constant here; no gradient flows through an advantage.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import Scope, Scored, ShapePart
from swarm.objectives.parts.groups import group_sum


@dataclass(frozen=True, kw_only=True, slots=True)
class NoveltySharpening(ShapePart):
    """Successes that are less likely under the policy than their group get more advantage, up to a share of it.

    Likelihood is the mean log-prob of a response. A success is a response with a positive advantage.

    Source: XRPO, arXiv:2510.06672.
    """

    equation: ClassVar[str] = "A <- A + min(max(strength (1 - exp(s_i - mean_G s)), 0), bound A) where A > 0"
    scope: ClassVar[Scope] = Scope.GROUP
    strength: float = 1.0
    bound: float = 0.5  # share of the advantage

    def __post_init__(self) -> None:
        if min(self.strength, self.bound) < 0:
            raise ConfigError("strength and bound must not be negative")

    def __call__(self, scored: Scored) -> Tensor:
        count = scored.mask.sum(dim=1)
        mean_logprob = scored.logprobs.detach().double().sum(dim=1) / count.clamp(min=1)
        is_there = (count > 0).double()
        members = group_sum(is_there, scored.batch.group_index).clamp(min=1)
        usual = group_sum(mean_logprob * is_there, scored.batch.group_index) / members
        novelty = 1 - torch.exp((mean_logprob - usual).clamp(max=20.0))
        bonus = (self.strength * novelty).clamp(min=0).to(scored.advantages.dtype)[:, None]
        sharpened = scored.advantages + torch.minimum(bonus, self.bound * scored.advantages)
        return torch.where(scored.advantages > 0, sharpened, scored.advantages)


@dataclass(frozen=True, kw_only=True, slots=True)
class EntropyScaled(ShapePart):
    """Advantages grow at tokens where the policy is less sure than usual in the step, and shrink elsewhere.

    Source: AEPO (agentic entropy-balanced); its `core_algos.py`.
    """

    equation: ClassVar[str] = "A_t <- A_t (1 + strength (H_t - mean H) / std H), over the step's tokens; std 0 -> 1"
    scope: ClassVar[Scope] = Scope.STEP
    strength: float = 0.2

    def __call__(self, scored: Scored) -> Tensor:
        entropy = scored.entropy.detach().double()
        kept = entropy[scored.mask]
        if kept.numel() < 2 or float(kept.max()) == float(kept.min()):
            return scored.advantages
        scores = (entropy - kept.mean()) / kept.std()
        return scored.advantages * (1 + self.strength * scores).to(scored.advantages.dtype)
