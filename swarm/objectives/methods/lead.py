"""LEAD: z-scores of correctness and of closeness to a target length, in a proportion that adapts.

    z-scores of R and of closeness to L*, proportion by EMA, whitened; clip .2/.28, token mean

Target lengths come from the group's own successes, and the proportion moves to the reward that still varies.
Both sides of the target cost the same, as in the paper; the released default favours shorter responses.
The small KL penalty is left out, as in `grpo`. Ours: limits of the target as shares of the allowed length.
"""

import torch
from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, Decay, Memory, PositiveShare, Requirement, Scored, Share
from swarm.objectives.parts import Clip, TokenMean, TokenRatio
from swarm.objectives.parts.advantage import whitened
from swarm.objectives.parts.group_statistics import group_scores, group_statistics, group_sum
from swarm.objectives.recipe import Recipe

_TINY = 1e-8


class LengthBalance(AdvantagePart):
    """Weighted sum of z-scores of correctness and of closeness to a target length, whitened; the weight adapts.

    The target is the mean length of the group's successes, at least a share of the token limit, and the whole limit
    without a success; the same distance from the target costs the same on both sides. The weight moves towards the
    reward that varies more and is further from its maximum.
    """

    equation = (
        "A = whiten(w z(R) + (1-w) z(E)), E = max(-1, 1 - ||o| - L*|/L*), w = max(least_weight, EMA of Dc/(Dc+De)), "
        "D = CV/(CVc+CVe) * room, room = 1 - mean R, 1 - (mean E + 1)/2 (successes)"
    )
    always_needs = frozenset({Requirement.ZERO_VARIANCE_GROUPS})
    correct: float = 0.5  # a success has a higher reward
    least: PositiveShare = 0.125  # share of the allowed length; 1000 of 8000 tokens as released
    least_weight: Share = 0.3
    decay: Decay = 0.95
    floor: float = 1e-6

    def initial(self) -> Memory:
        return {"weight": 0.5}

    def __call__(self, batch: Batch) -> Tensor:
        weight = max(self._next_weight(batch), self.least_weight)
        rewards, brevity = batch.rewards.to(torch.float64), self._brevity(batch)
        correctness, closeness = (group_scores(each, batch.group_index, self.floor) for each in (rewards, brevity))
        total = weight * correctness + (1 - weight) * closeness
        return whitened(total[:, None].expand(batch.mask.shape), batch.mask, _TINY).to(batch.rewards.dtype)

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        return {"weight": self._next_weight(scored.batch)}

    def _brevity(self, batch: Batch) -> Tensor:
        length = batch.length.to(torch.float64)
        is_success = batch.rewards > self.correct
        limit = group_statistics(batch.max_new_tokens, batch.group_index).largest.clamp(min=1)
        count = group_sum(is_success, batch.group_index)
        usual = group_sum(torch.where(is_success, length, 0.0), batch.group_index) / count.clamp(min=1)
        target = torch.where(count > 0, torch.minimum(torch.maximum(usual, self.least * limit), limit), limit)
        return (1 - (length - target).abs() / target).clamp(min=-1)

    def _next_weight(self, batch: Batch) -> float:
        """Returns the weight of correctness after an update with this step."""
        rewards, is_success = batch.rewards.to(torch.float64), batch.rewards > self.correct
        mean, deviation = _moments(rewards, batch.group_index)
        wanted_by_correctness = deviation / (abs(mean) + _TINY) * (1 - min(max(mean, 0.0), 1.0))
        wanted_by_brevity = 0.0
        if bool(is_success.any()):
            mean, deviation = _moments(self._brevity(batch)[is_success], batch.group_index[is_success])
            wanted_by_brevity = deviation / (abs(mean) + _TINY) * (1 - (mean + 1) / 2)
        total = wanted_by_correctness + wanted_by_brevity
        share = wanted_by_correctness / total if total > 0 else 0.0
        return self.decay * float(self.remembered(batch)["weight"]) + (1 - self.decay) * share


def _moments(values: Tensor, group_index: Tensor) -> tuple[float, float]:
    """Returns (mean of the group means, root of the population variance within plus between groups)."""
    groups = [values[group_index == group] for group in group_index.unique().tolist()]
    means = torch.stack([group.mean() for group in groups])
    within = torch.stack([group.var(correction=0) for group in groups]).mean()
    return float(means.mean()), float((within + means.var(correction=0) + _TINY).sqrt())


RECIPE = Recipe(
    name="lead",
    title="LEAD: Length-Efficient Adaptive and Dynamic Reasoning for Large Language Models",
    acronym="LEAD",
    arxiv="2605.09806",
    verification="code",  # CrazyMint/LEAD `compute_advantage` (max_sym, which is the paper's)
    advantage=LengthBalance(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.28),
    aggregate=TokenMean(),
)
