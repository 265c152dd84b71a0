"""RED-Weight: REINFORCE whose rollouts count by an exponential of their advantage, so that the best lead.

No ratio and no clip: the weight shapes the data, for off-policy rollouts where failures should count less.
Its sibling RED-Drop, which leaves out surplus failures at random, is not here.
"""

from swarm.objectives.parts.advantage.group import GroupCentred
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import NoRatio
from swarm.objectives.parts.weight.gate import ExponentialWeight
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="exponential_weight",
    title="Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm: Demystifying Some Myths "
    "About GRPO and Its Friends",
    acronym="RED-Weight",
    arxiv="2509.24203",
    row="S159",
    verification="code",
    advantage=GroupCentred(),
    ratio=NoRatio(),
    weight=ExponentialWeight(),
    aggregate=TokenMean(),
)
