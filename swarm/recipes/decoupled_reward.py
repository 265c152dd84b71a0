"""DRPO (decoupled reward): length weighs among successes only, which are set against the failures' soft maximum.

No ratio: a constraint on the divergence from the start of the update, nothing within its bound, takes the
place of a clip. The advantage only tells which groups have a signal. Ours: what counts as a success.
"""

from swarm.learn.recipe import Recipe
from swarm.parts.advantage.group import GroupCentred
from swarm.parts.aggregate.mean import PromptSum
from swarm.parts.ratio.token import NoRatio
from swarm.parts.term.steered import KlConstraint
from swarm.parts.weight.decoupled import DecoupledReward

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
