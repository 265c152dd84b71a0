"""Pre clip (StableReinforce): ratios are clamped to wide bounds before the clip, and outlying advantages become 0.

    rollout mean of PPO (.8, 1.2) on clip(r, 1e-3, 1e3); rewards whitened over tokens, 0 beyond 3 std

A stability preset for noisy rewards. Its reward for consistency between reasoning and answer needs a judge
and is left out, as is the KL penalty in the reward. Ours: the reward itself is whitened, without a baseline.
"""

import math
from typing import Annotated

import torch
from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, Bound, Positive, Requirement, Scored, TokenLosses, WeightPart
from swarm.objectives.parts import RolloutMean, TokenRatio, clip_surrogate
from swarm.objectives.recipe import Recipe


class OutlierFiltered(AdvantagePart):
    """The reward in standard deviations from the mean over the step's tokens; 0 beyond `limit` deviations.

    Source: StableReinforce, arXiv:2505.02835; yfzhang114/r1_reward `replay_buffer.py`, which adds the mean
    before whitening to its limits (a slip: the whitened values have mean 0).
    """

    equation = "z = (R_i - mean_tokens) / std_tokens (population); A = z if |z| <= limit else 0"
    always_needs = frozenset({Requirement.ZERO_VARIANCE_GROUPS})
    limit: Positive = 3.0

    def __call__(self, batch: Batch) -> Tensor:
        rewards, length = batch.rewards.to(torch.float64), batch.length.to(torch.float64)
        if float(rewards.max()) == float(rewards.min()):
            return torch.zeros_like(batch.rewards)
        total = length.sum().clamp(min=1)
        centred = rewards - (length * rewards).sum() / total
        variance = (length * centred**2).sum() / total
        scores = centred / variance.clamp(min=1e-8).sqrt()
        return torch.where(scores.abs() <= self.limit, scores, torch.zeros_like(scores)).to(batch.rewards.dtype)


class PreClip(WeightPart):
    """PPO's clip on a ratio clamped to wide bounds, so that no extreme ratio enters the loss.

    Source: StableReinforce, arXiv:2505.02835; yfzhang114/r1_reward `openrlhf/models/loss.py`.
    """

    equation = "L_t = -min(q A, clip(q, 1-low, 1+high) A), q = clip(r, least, most)"
    least: Annotated[float, Bound(above=0, below=1)] = 1e-3
    most: Annotated[float, Bound(above=1)] = 1e3
    low: float = 0.2  # half-width
    high: float = 0.2  # half-width

    def __call__(self, scored: Scored) -> TokenLosses:
        held = scored.log_ratio.clamp(math.log(self.least), math.log(self.most))
        found = clip_surrogate(held, scored.advantages, 1 - self.low, 1 + self.high)
        return TokenLosses(losses=found.losses, bounded=found.bounded | (held != scored.log_ratio))


RECIPE = Recipe(
    name="stable_reinforce",
    title="R1-Reward: Training Multimodal Reward Model Through Stable Reinforcement Learning",
    acronym="StableReinforce",
    arxiv="2505.02835",
    verification="code",
    advantage=OutlierFiltered(),
    ratio=TokenRatio(),
    weight=PreClip(),
    aggregate=RolloutMean(),
)
