"""XRPO, its advantage: successes that the policy finds unlikely for their group get more of it.

The paper's rollout allocation and in-context seeding are not part of the objective. Ours: the strength and
the bound of the bonus, which our sources do not give, and the token mean.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.shape.confidence import NoveltySharpening
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="novelty_sharpened",
    title="XRPO: Pushing the limits of GRPO with Targeted Exploration and Exploitation",
    acronym="XRPO",
    arxiv="2510.06672",
    row="S069",
    verification="secondary",
    advantage=GroupZScore(),
    shapers=(NoveltySharpening(strength=1.0, bound=0.5),),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
