"""REC, one-sided: REINFORCE of tokens whose ratio has not yet moved the way the advantage pushes it.

No importance weight: the ratio only decides which tokens count. The paper holds that this, not the weight, is
what keeps learning from stale rollouts stable.
"""

from swarm.objectives.parts.advantage.group import GroupCentred
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.gate import OneSidedGate
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="one_sided_gate",
    title="Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm: Demystifying Some Myths "
    "About GRPO and Its Friends",
    acronym="REC",
    arxiv="2509.24203",
    row="S159",
    verification="code",
    advantage=GroupCentred(),
    ratio=TokenRatio(),
    weight=OneSidedGate(),
    aggregate=TokenMean(),
)
