"""DCPO (distribution-centric): entropy held at a target by a pull towards the policy at another temperature.

Another method called DCPO clips by token probability. Groups whose rewards are all equal are pulled as well.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.shape.tempered import TemperedPull
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="distribution_centric",
    title="Distribution-Centric Policy Optimization Dominates Exploration-Exploitation Trade-off",
    acronym="DCPO (distribution-centric)",
    arxiv="",
    url="https://github.com/597358816/DCPO",
    row="S148",
    verification="code",
    advantage=GroupZScore(),
    shapers=(TemperedPull(),),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2, dual=3.0),
    aggregate=TokenMean(),
)
