"""REC, two-sided: REINFORCE of tokens whose ratio lies within bounds, whatever the sign of the advantage.

No importance weight: the ratio only decides which tokens count.
"""

from swarm.objectives.parts.advantage.group import GroupCentred
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.gate import TwoSidedGate
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="two_sided_gate",
    title="Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm: Demystifying Some Myths "
    "About GRPO and Its Friends",
    acronym="REC",
    arxiv="2509.24203",
    row="S159",
    verification="code",
    advantage=GroupCentred(),
    ratio=TokenRatio(),
    weight=TwoSidedGate(),
    aggregate=TokenMean(),
)
