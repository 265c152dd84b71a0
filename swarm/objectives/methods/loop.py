"""LOOP: leave-one-out advantages in a clip that is symmetric in the log-ratio, no value network, no KL term.

    (1/N) sum_i (1/|o_i|) sum_t -min(r A, clip(r, 1/1.1, 1.1) A), A leave-one-out

LOOP also drops rollouts with |A| < 0.01, which saves time and hardly changes the result; here they stay. The paper is
about an agent with many turns; its authors found the token ratio best.
"""

from swarm.objectives.part import Positive, Scored, TokenLosses, WeightPart
from swarm.objectives.parts import LeaveOneOut, RolloutMean, TokenRatio, clip_surrogate
from swarm.objectives.recipe import Recipe


class SymmetricClip(WeightPart):
    """PPO's clip with bounds 1 / (1 + width) and 1 + width, symmetric in the log-ratio."""

    equation = "L_t = -min(r A, clip(r, 1/(1+width), 1+width) A)"
    width: Positive = 0.1  # half-width of the upper side

    def __call__(self, scored: Scored) -> TokenLosses:
        return clip_surrogate(scored.log_ratio, scored.advantages, 1 / (1 + self.width), 1 + self.width)


RECIPE = Recipe(
    name="loop",
    title="Reinforcement Learning for Long-Horizon Interactive LLM Agents",
    acronym="LOOP",
    arxiv="2502.01600",
    verification="code",  # apple/ml-loop
    advantage=LeaveOneOut(),
    ratio=TokenRatio(),
    weight=SymmetricClip(width=0.1),
    aggregate=RolloutMean(),
)
