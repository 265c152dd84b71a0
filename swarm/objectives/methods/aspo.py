"""Flipped ratio (ASPO (asymmetric importance sampling)): positive tokens are weighted by the inverse of their ratio.

    d' = -d for A > 0; bounds .2, or .4 at high entropy; weights <= 3

PPO gives a rising token more weight the more it has risen; here tokens that lag behind catch up. Bounds are
wider where the entropy is in the upper fifth of a response, as in the released code. Not the ASPO that shapes
advantages by tool calls.
"""

import math
from typing import Annotated

import torch

from swarm.objectives.part import Bound, Scope, Scored, Share, TokenLosses, WeightPart
from swarm.objectives.parts import GroupZScore, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe


class FlippedClip(WeightPart):
    """A clip that weighs positive tokens by the inverse of their ratio, so that tokens that lag behind catch up.

    Tokens whose entropy is in the upper part of their response have wider bounds. Positive tokens lose their gradient
    above the upper bound, negative ones below the lower bound; a weight above `cap` becomes `cap`, held constant.
    """

    equation = (
        "L_t = -A max(r, 1-low) if A < 0 else -A (m/sg[m]) / sg[m], m = min(r, 1+high); "
        "where the weight exceeds cap: -A cap log pi_t"
    )
    scope = Scope.ROLLOUT
    low: float = 0.2  # half-widths
    high: float = 0.2
    wide_low: float = 0.4  # of tokens of high entropy
    wide_high: float = 0.4
    quantile: Share = 0.8  # of a response's entropies, above which they are high
    cap: Annotated[float, Bound(above=1)] = 3.0

    def __call__(self, scored: Scored) -> TokenLosses:
        ratio, advantages = torch.exp(scored.log_ratio), scored.advantages
        entropy = torch.where(scored.mask, scored.entropy.detach(), math.nan)
        is_wide = entropy > torch.nanquantile(entropy, self.quantile, dim=1, keepdim=True)
        lowest = 1 - torch.where(is_wide, self.wide_low, torch.full_like(ratio, self.low))
        highest = 1 + torch.where(is_wide, self.wide_high, torch.full_like(ratio, self.high))
        risen, fallen = torch.minimum(ratio, highest), torch.maximum(ratio, lowest)
        flipped = risen / risen.detach() / risen.detach()
        weight = torch.where(advantages < 0, fallen, flipped)
        is_capped = weight > self.cap
        losses = -advantages * torch.where(is_capped, self.cap * scored.logprobs, weight)
        is_stopped = torch.where(advantages < 0, ratio < lowest, ratio > highest)
        return TokenLosses(losses=losses, bounded=is_stopped | is_capped)


RECIPE = Recipe(
    name="aspo",
    title="ASPO: Asymmetric Importance Sampling Policy Optimization",
    acronym="ASPO",
    arxiv="2510.06062",
    verification="code",  # zyh1999/ASPO `compute_policy_loss_archer`
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=FlippedClip(),
    aggregate=TokenMean(),
)
