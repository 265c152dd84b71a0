"""BNPO: binary rewards normalised by a Beta distribution fitted to the success rates of the step's prompts.

The weight follows the spread of the rates; fixed parameters of the Beta would give REINFORCE with baseline
or GRPO. Several rewards are meant to be decomposed first (`per_reward_normalised`). Ours: token mean.
"""

from swarm.objectives.parts.advantage.robust import BetaNormalised
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="beta_normalised",
    title="BNPO: Beta Normalization Policy Optimization",
    acronym="BNPO",
    arxiv="2506.02864",
    row="S161",
    verification="code",
    advantage=BetaNormalised(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
