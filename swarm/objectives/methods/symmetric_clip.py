"""LOOP: leave-one-out advantages in a clip that is symmetric in the log-ratio, no value network, no KL term.

LOOP also drops rollouts with |A| < 0.01, which saves time and changes next to nothing; they stay here. Its
setting is an agent with many turns; the ratio by token is the one its authors found best.
"""

from swarm.objectives.parts.advantage.group import LeaveOneOut
from swarm.objectives.parts.aggregate.mean import RolloutMean
from swarm.objectives.parts.ratio.token import TokenRatio
from swarm.objectives.parts.weight.surrogate import SymmetricClip
from swarm.objectives.recipe import Recipe

RECIPE = Recipe(
    name="symmetric_clip",
    title="Reinforcement Learning for Long-Horizon Interactive LLM Agents",
    acronym="LOOP",
    arxiv="2502.01600",
    row="S099",
    verification="code",
    advantage=LeaveOneOut(),
    ratio=TokenRatio(),
    weight=SymmetricClip(width=0.1),
    aggregate=RolloutMean(),
)
