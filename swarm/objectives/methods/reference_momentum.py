"""AAPO: the group z-score plus a bounded lead over the reference policy's answer, in plain likelihood.

The lead keeps a gradient alive where all rollouts of a group are equal. No ratio and no clip.
"""

from swarm.objectives.parts.advantage.shifted import ReferenceMomentum
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import NoRatio
from swarm.objectives.parts.weight.detached import Likelihood
from swarm.objectives.recipe import Recipe

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
