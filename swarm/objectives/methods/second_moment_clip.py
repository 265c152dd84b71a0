"""M2PO: clip only as much as brings the mean square log-ratio of the tokens that clipping can hurt to 0.04.

Made for data many updates old; the interval is never tighter than [0.7, 1.5]. There is no dual clip.
"""

from swarm.objectives.parts.advantage.group import GroupZScore
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.second_moment import SecondMomentClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="second_moment_clip",
    title="Prosperity before Collapse: How Far Can Off-Policy RL Reach with Stale Data on LLMs?",
    acronym="M2PO",
    arxiv="2510.01161",
    verification="code",
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=SecondMomentClip(budget=0.04, low=0.3, high=0.5),
    aggregate=TokenMean(),
)
