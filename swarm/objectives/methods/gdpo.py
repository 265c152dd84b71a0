"""GDPO: several rewards, each scored in its own group, added up with weights and whitened over the step.

    each reward z-scored in its group, summed, masked-whitened over the step; clip .2, token mean

A z-score of the sum of rewards can make different mixtures equal; a z-score of each reward keeps them apart. Ours: the
clip; whitening is over tokens, as in the code (in the paper, over rollouts).

Mechanism: per reward normalised.
"""

import torch
from torch import Tensor

from swarm.episode import OUTCOME
from swarm.errors import ConfigError
from swarm.objectives.part import AdvantagePart, Batch, Requirement
from swarm.objectives.parts import Clip, TokenMean, TokenRatio, group_scores, whitened
from swarm.objectives.recipe import Recipe


class PerRewardScore(AdvantagePart):
    """Z-scores of every named reward, added up with weights, whitened over the tokens of the step."""

    equation = "A = whiten_tokens(sum_k w_k (R_k - mean_G) / (std_G + floor))"
    always_needs = frozenset({Requirement.REWARD_PARTS, Requirement.ZERO_VARIANCE_GROUPS})
    weights: str = ""  # "correct=1, format=0.5"; a reward that is not named counts 1
    floor: float = 1e-6
    whitening_floor: float = 1e-8

    def check(self) -> None:
        self.weight_of("")

    def weight_of(self, name: str) -> float:
        """Weight of a named reward, 1 if `weights` does not name it. Raises ConfigError if `weights` is malformed."""
        try:
            pairs = [entry.split("=") for entry in self.weights.split(",") if entry.strip()]
            return {key.strip(): float(value) for key, value in pairs}.get(name, 1.0)
        except ValueError as error:
            raise ConfigError(f"weights: {self.weights!r} is not like 'correct=1, format=0.5'") from error

    def __call__(self, batch: Batch) -> Tensor:
        parts = batch.reward_parts or {OUTCOME: batch.rewards}  # a draw may hold single answers alone
        total = torch.zeros(batch.num_rollouts, dtype=torch.float64, device=batch.mask.device)
        for name in sorted(parts):
            values = parts[name].to(torch.float64)
            total = total + self.weight_of(name) * group_scores(values, batch.group_index, self.floor)
        tokens = total[:, None].expand(batch.mask.shape)
        return whitened(tokens, batch.mask, self.whitening_floor).to(batch.rewards.dtype)


RECIPE = Recipe(
    name="gdpo",
    title="GDPO: Group reward-Decoupled Normalization Policy Optimization for Multi-reward RL Optimization",
    acronym="GDPO",
    arxiv="2601.05242",
    verification="code",  # CrazyMint/LEAD `compute_advantage` (gdpo)
    advantage=PerRewardScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
