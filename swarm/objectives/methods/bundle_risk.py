"""RiskPO: the objective is a mixture of tail and middle of the scores of bundles of prompts, not their mean.

Bundles keep hard prompts, whose own rewards are all equal, in the update, and what lies below the lower
quantile weighs more. The released runs differ in credit and upper level; this is the DAPO-Math one.
Ours: token mean.
"""

from swarm.objectives.parts.advantage.risk import BundleRisk
from swarm.objectives.parts.aggregate.mean import TokenMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.clip import Clip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="bundle_risk",
    title="RiskPO: Risk-based Policy Optimization via Verifiable Reward for LLM Post-Training",
    acronym="RiskPO",
    arxiv="2510.00911",
    row="S141",
    verification="code",
    advantage=BundleRisk(bundle=5, low=0.2, high=0.8, tail_weight=1.5, rate=0.1),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
