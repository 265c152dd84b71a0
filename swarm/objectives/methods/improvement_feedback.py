"""PIPO: a draw is trained on a second time, as strongly as rewards rose after it, and against it where they fell.

The ratio is to the policy that generated, which for the second use is the one before. The released
configuration never goes against a draw and bounds the gain at 0.5; this is the paper's. Ours: a bound on the
gain, and the token mean.
"""

from swarm.objectives.parts.advantage.improvement import ImprovementFeedback
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="improvement_feedback",
    title="Policy Improvement Reinforcement Learning",
    acronym="PIPO (policy improvement)",
    arxiv="2604.00860",
    row="S138",
    verification="secondary",
    advantage=ImprovementFeedback(history=8, negative=0.1, most=3.0),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
