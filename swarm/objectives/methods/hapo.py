"""HAPO (heterogeneous adaptive): clip bounds and advantages of a token by how uncertain the policy is there.

    dual-clipped PPO with bounds and advantages by the place of the log-entropy, token mean

Certain tokens may fall further, uncertain ones rise further; advantages are averaged over a group's tokens.
The released code turns the sign of certain tokens by mistake; we have it as its comments intend. Its fourth
part, a sampling temperature for every token, belongs to the generator and is left out. Not the HAPO that
remembers how long answers were.
"""

import torch
from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, Scope, Scored, Share, TokenLosses, WeightPart
from swarm.objectives.parts import TokenMean, TokenRatio
from swarm.objectives.parts.clip import Dual, clip_surrogate
from swarm.objectives.parts.group_statistics import group_scores, group_statistics, group_sum, where_signal
from swarm.objectives.recipe import Recipe


class TokenGroupScore(AdvantagePart):
    """Z-score with the mean and deviation over the group's tokens, each carrying its response's reward.

    Long responses pull the baseline to themselves. A group in which that gets any member to `limit` falls
    back to the ordinary z-score.

    Source: HAPO (token entropy); starriver030515/HAPO `compute_hapo_outcome_advantage`.
    """

    equation = "A_i = (R_i - mean_tokens) / (std_tokens + floor), population std; z-score if any |A| >= limit"
    limit: float = 5.0
    floor: float = 1e-6

    def __call__(self, batch: Batch) -> Tensor:
        group = group_statistics(batch.rewards, batch.group_index)
        rewards, length = batch.rewards.to(torch.float64), batch.length.to(torch.float64)
        tokens = group_sum(length, batch.group_index).clamp(min=1)
        centred = rewards - group_sum(length * rewards, batch.group_index) / tokens
        spread = (group_sum(length * centred**2, batch.group_index) / tokens).sqrt()
        scores = where_signal(centred / (spread + self.floor), group, rewards)
        is_far = group_sum((scores.abs() >= self.limit).to(rewards.dtype), batch.group_index) > 0
        plain = group_scores(rewards, batch.group_index, self.floor)
        return torch.where(is_far, plain, scores).to(batch.rewards.dtype)


class EntropyClip(WeightPart):
    """Uncertain tokens may rise further, certain ones fall further, and their advantages shift along.

    Entropy is placed in [-1, 1] by its log: 0 at the pivot quantile, 1 at the most and -1 at the least
    uncertain token of the step. The released code divides the negative side by its (negative) minimum, which
    turns its sign; here it is divided by the size of the minimum, as the sign tests around it assume.

    Source: HAPO (heterogeneous adaptive), starriver030515/HAPO `core_algos.py`.
    """

    equation = (
        "lo = low (1 - min(h, 0)), hi = high (1 + max(h, 0)); A <- A (1 + h) where h > 0 and r is outside "
        "(1-lo/2, 1+hi/2), or h <= 0 and r is inside; L_t = -min(r A, clip(r, 1-lo, 1+hi) A), dual clip where A < 0"
    )
    scope = Scope.STEP
    low: float = 0.2  # half-width
    high: float = 0.2  # half-width
    pivot: Share = 0.8  # quantile of the entropies that counts as 0
    dual: Dual = 10.0  # 0 = off

    def __call__(self, scored: Scored) -> TokenLosses:
        place = self.places(scored.entropy.detach(), scored.mask)
        low, high = self.low * (1 - place.clamp(max=0)), self.high * (1 + place.clamp(min=0))
        ratio = torch.exp(scored.log_ratio.detach())
        is_inside = (ratio > 1 - low / 2) & (ratio < 1 + high / 2)
        shifts = torch.where(place > 0, ~is_inside, is_inside)
        advantages = torch.where(shifts, scored.advantages * (1 + place), scored.advantages)
        return clip_surrogate(scored.log_ratio, advantages, 1 - low, 1 + high, self.dual)

    def places(self, entropy: Tensor, mask: Tensor) -> Tensor:
        """Place of each token's entropy in the step: [N, L] in [-1, 1], 0 off the mask.

        Args:
            entropy: [N, L] nats, constant.
            mask: bool [N, L]; at least one token.
        """
        logs = torch.where(mask, entropy, torch.ones_like(entropy)).clamp(min=1e-8).log()
        known = logs[mask].sort().values
        lead = torch.where(mask, logs - known[round(self.pivot * (known.numel() - 1))], torch.zeros_like(logs))
        return torch.where(lead > 0, lead / lead.max().clamp(min=1e-8), lead / lead.min().abs().clamp(min=1e-8))


RECIPE = Recipe(
    name="hapo",
    title="From Uniform to Heterogeneous: Tailoring Policy Optimization to Every Token's Nature",
    acronym="HAPO",
    arxiv="2509.16591",
    verification="code",
    advantage=TokenGroupScore(),
    ratio=TokenRatio(),
    weight=EntropyClip(),
    aggregate=TokenMean(),
)
