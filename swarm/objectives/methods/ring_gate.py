"""REC, ring: the two-sided gate; tokens far off on the side that the advantage pushes away from count as well.

No importance weight: the ratio only decides which tokens count. A summary of the code that we worked from says
"one-sided or far"; far tokens are inside the one-sided gate, so that reading has no ring. Two-sided or far is here.
"""

from swarm.objectives.parts.advantage.group import GroupCentred
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.gate import RingGate
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="ring_gate",
    title="Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm: Demystifying Some Myths "
    "About GRPO and Its Friends",
    acronym="REC",
    arxiv="2509.24203",
    row="S159",
    verification="code",
    advantage=GroupCentred(),
    ratio=TokenRatio(),
    weight=RingGate(),
    aggregate=TokenMean(),
)
