"""NGRPO: groups are scored together with one imagined member of full reward, so that failing groups go down.

Negatives are held tighter by the clip: the lower half-width is the smaller one. Groups of full reward
throughout have no signal, as in the paper, which drops them. Ours: the token mean.
"""

from swarm.objectives.parts.advantage.shifted import VirtualMaximum
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="virtual_maximum",
    title="NGRPO: Negative-enhanced Group Relative Policy Optimization",
    acronym="NGRPO",
    arxiv="2509.18851",
    row="S195",
    verification="code",
    advantage=VirtualMaximum(maximum=1.0),
    ratio=TokenRatio(),
    weight=Clip(low=0.16, high=0.24),
    aggregate=TokenMean(),
)
