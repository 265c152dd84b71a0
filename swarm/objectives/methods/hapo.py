"""HAPO (heterogeneous adaptive): clip bounds and advantages of a token depend on the policy's entropy at the token.

    dual-clipped PPO with bounds and advantages by the place of the log-entropy, token mean

Certain tokens may fall further, uncertain ones rise further; mean and deviation are over a group's tokens.
The released code flips the sign of certain tokens by mistake; ours follows the intention of its comments. The method's
fourth part, a sampling temperature for every token, belongs to the generator and is left out. Not the HAPO that
remembers the lengths of answers.
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

    Long responses pull the baseline towards their own reward. If any score of a group reaches `limit` in size, the
    whole group gets the ordinary z-score.

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
    """PPO's clip that lets uncertain tokens rise further and certain ones fall further, and scales their advantages.

    The log of the entropy is mapped to [-1, 1]: 0 at the pivot quantile, 1 at the most and -1 at the least
    uncertain token of the step. The released code divides the negative side by its (negative) minimum, which flips
    the sign; ours divides by the size of the minimum, as that code's tests of the sign assume.

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
        """Maps each token's entropy to its position in the step: [N, L] in [-1, 1], 0 off the mask.

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
