"""Length weighted baseline (OPO): the baseline is the group's mean reward weighted by response length.

    A = R - sum_j |o_j| R_j / sum_j |o_j|; clip .2, token mean

This is near the baseline of least gradient variance if a gradient grows with the number of tokens. The paper trains
exactly on-policy, where every ratio is 1. Ours: ratio and clip, for off-policy rollouts.
"""

from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch
from swarm.objectives.parts import Clip, TokenMean, TokenRatio, group_statistics, group_sum, where_signal
from swarm.objectives.recipe import Recipe


class LengthWeightedBaseline(AdvantagePart):
    """Reward minus the group's mean weighted by response length, near the baseline of least variance."""

    equation = "A_i = R_i - sum_j |o_j| R_j / sum_j |o_j|"

    def __call__(self, batch: Batch) -> Tensor:
        group = group_statistics(batch.rewards, batch.group_index)
        rewards = batch.rewards.to(group.mean.dtype)
        length = batch.length.to(rewards.dtype)
        baseline = group_sum(length * rewards, batch.group_index) / group_sum(length, batch.group_index).clamp(min=1)
        return where_signal(rewards - baseline, group, batch.rewards)


RECIPE = Recipe(
    name="opo",
    title="On-Policy RL with Optimal Reward Baseline",
    acronym="OPO",
    arxiv="2505.23585",
    verification="code",  # verl `compute_opo_outcome_advantage`
    advantage=LengthWeightedBaseline(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
