"""RL-PLUS: rollouts of other generators by a mixture of policies in the denominator, own ones unclipped.

Foreign tokens need no log-probs of their generator and no foreign ratio exceeds 4; tokens the policy already
finds likely are damped. There a group holds own and foreign members and its baseline counts the own ones only;
here (ours) a group has one producer and is its own baseline. The released code divides by the width of the
padded batch. Ours: by the length allowed to each rollout.
"""

from swarm.objectives.parts.advantage.group import GroupCentred
from swarm.objectives.parts.aggregate.mean import ConstantLength
from swarm.objectives.parts.ratio.mixture import MixtureRatio
from swarm.objectives.parts.shape.external import ExternalNovelty
from swarm.objectives.parts.term.entropy import EntropyBonus
from swarm.objectives.parts.weight.surrogate import Surrogate
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="mixture_denominator",
    title="RL-PLUS: Countering Capability Boundary Collapse of LLMs in Reinforcement Learning with "
    "Hybrid-policy Optimization",
    acronym="RL-PLUS",
    arxiv="2508.00222",
    row="S017",
    verification="code",
    advantage=GroupCentred(),
    shapers=(ExternalNovelty(),),
    ratio=MixtureRatio(),
    weight=Surrogate(),
    aggregate=ConstantLength(),
    terms=(EntropyBonus(strength=0.001),),
)
