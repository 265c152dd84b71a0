"""AAPO: the group z-score plus a bounded lead over the reference policy's answer, in plain likelihood.

The lead keeps a gradient alive where all rollouts of a group are equal. No ratio and no clip.
"""

from swarm.learn.recipe import Recipe
from swarm.parts.advantage.shifted import ReferenceMomentum
from swarm.parts.aggregate.mean import TokenMean
from swarm.parts.ratio.token import NoRatio
from swarm.parts.weight.detached import Likelihood

RECIPE = Recipe(
    name="reference_momentum",
    title="AAPO: Enhance the Reasoning Capabilities of LLMs with Advantage Momentum",
    acronym="AAPO",
    arxiv="2505.14264",
    row="S044",
    verification="code",
    advantage=ReferenceMomentum(),
    ratio=NoRatio(),
    weight=Likelihood(),
    aggregate=TokenMean(),
)
