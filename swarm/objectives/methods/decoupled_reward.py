"""DRPO (decoupled reward): length weighs among successes only, which are set against the failures' soft maximum.

No ratio: a constraint on the divergence from the start of the update, nothing within its bound, takes the
place of a clip. The advantage only tells which groups have a signal. Ours: what counts as a success.
"""

from swarm.objectives.parts.advantage.group import GroupCentred
from swarm.objectives.parts.aggregate.mean import PromptSum
from swarm.objectives.parts.ratio.token import NoRatio
from swarm.objectives.parts.term.steered import KlConstraint
from swarm.objectives.parts.weight.decoupled import DecoupledReward
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="decoupled_reward",
    title="DRPO: Efficient Reasoning via Decoupled Reward Policy Optimization",
    acronym="DRPO (decoupled reward)",
    arxiv="2510.04474",
    row="S193",
    verification="code",
    advantage=GroupCentred(),
    ratio=NoRatio(),
    weight=DecoupledReward(tau=10.0, scale=0.1),
    aggregate=PromptSum(),
    terms=(KlConstraint(),),
)
