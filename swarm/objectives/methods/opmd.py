"""OPMD: plain REINFORCE with the group's mean as baseline, damped by the strength of a pull to the old policy.

No ratio and no clip: the pull is folded into the step size, 1 / (1 + tau). The variant with a log-mean-exp
baseline is left out.
"""

from swarm.objectives.parts.advantage.group import GroupCentred
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import NoRatio
from swarm.objectives.parts.weight.detached import TemperedLikelihood
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="opmd",
    title="Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm: Demystifying Some Myths "
    "About GRPO and Its Friends",
    acronym="OPMD",
    arxiv="2509.24203",
    row="S159",
    verification="code",
    advantage=GroupCentred(),
    ratio=NoRatio(),
    weight=TemperedLikelihood(tau=1.0),
    aggregate=TokenMean(),
)
