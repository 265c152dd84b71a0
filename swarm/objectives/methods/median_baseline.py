"""MC-GRPO: the group's median is the baseline, its median absolute deviation the scale.

With few rollouts a mean is thrown by one outlier and flips signs. The paper samples one rollout more and
leaves the median one out of the backward pass: here it has advantage 0. Ours: an even number of rollouts
uses the lower median, and the one left out still counts in G and in the mean over rollouts, which only
scales the step; against counting it in neither the two cancel. With binary rewards most groups have a
deviation of 0; the released floor of 1e-3 then gives advantages near 1000, which only a gradient clip
holds: raise `advantage.floor` to calm them.
"""

from swarm.objectives.parts.advantage.robust import MedianDeviation
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="median_baseline",
    title="MC-GRPO: Median-Centered Group Relative Policy Optimization for Small-Rollout Reinforcement Learning",
    acronym="MC-GRPO",
    arxiv="2601.22582",
    row="S160",
    verification="code",
    advantage=MedianDeviation(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=RolloutMean(),
)
