"""MaxRL: advantages divided by the group's mean reward, so that rare successes weigh as under maximum likelihood.

    A = (R - mean) / (mean + 1e-6), for rewards of at least 0; clip .2, token mean

Made for binary rewards. Ours: the clipped token surrogate.
"""

from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch
from swarm.objectives.parts import Clip, TokenMean, TokenRatio, group_statistics, where_signal
from swarm.objectives.recipe import Recipe


class MeanNormalised(AdvantagePart):
    """Distance from the group's mean in units of that mean: for a binary reward, a weight of 1 / success rate."""

    equation = "A_i = (R_i - mean_G) / (mean_G + floor)"
    floor: float = 1e-6

    def __call__(self, batch: Batch) -> Tensor:
        group = group_statistics(batch.rewards, batch.group_index)
        scores = (batch.rewards.to(group.mean.dtype) - group.mean) / (group.mean.clamp(min=0) + self.floor)
        return where_signal(scores, group, batch.rewards)


RECIPE = Recipe(
    name="maxrl",
    title="Maximum Likelihood Reinforcement Learning",
    acronym="MaxRL",
    arxiv="2602.02710",
    verification="code",  # as in prime-rl `max_rl`. Rewards are meant to be non-negative; the floor is ours
    advantage=MeanNormalised(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
