"""ReMax: REINFORCE whose baseline is the reward of the greedy response to the same prompt.

No critic and no group: one sampled and one greedy response are enough. The KL penalty in the reward is left
out, as in `grpo`.
"""

from swarm.objectives.parts.advantage.shifted import GreedyBaseline
from swarm.objectives.parts.aggregate.mean import RolloutSum
from swarm.objectives.parts.ratio.token import NoRatio
from swarm.objectives.parts.weight.detached import Likelihood
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="greedy_baseline",
    title="ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language Models",
    acronym="ReMax",
    arxiv="2310.10505",
    row="S107",
    verification="code",
    advantage=GreedyBaseline(),
    ratio=NoRatio(),
    weight=Likelihood(),
    aggregate=RolloutSum(),
)
