"""HAPO (heterogeneous adaptive): clip bounds and advantages of a token by how uncertain the policy is there.

Certain tokens may fall further, uncertain ones rise further; advantages are averaged over a group's tokens.
The released code turns the sign of certain tokens by mistake; we have it as its comments intend. Its fourth
part, a sampling temperature for every token, belongs to the generator and is left out. Not the HAPO that
remembers how long answers were.
"""

from swarm.objectives.parts.advantage.robust import TokenGroupScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.token_bounds import EntropyClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="entropy_clip",
    title="From Uniform to Heterogeneous: Tailoring Policy Optimization to Every Token's Nature",
    acronym="HAPO",
    arxiv="2509.16591",
    row="S092",
    verification="code",
    advantage=TokenGroupScore(),
    ratio=TokenRatio(),
    weight=EntropyClip(),
    aggregate=TokenMean(),
)
