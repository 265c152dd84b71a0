"""GMPO: the geometric mean of a rollout's token ratios in place of the arithmetic one.

    -(1/N) sum_i A_i exp(mean_t dt), dt = sgn(A) min(sgn(A) d, sgn(A) clip(d, -.4, .4))

Each log-ratio is clipped on the side that the advantage pushes to before it enters the mean.
"""

import torch

from swarm.objectives.part import NotNegative, Scope, Scored, TokenLosses, WeightPart
from swarm.objectives.parts import GroupZScore, RolloutMean, TokenRatio, rollout_mean
from swarm.objectives.recipe import Recipe


class GeometricMean(WeightPart):
    """Token log-ratios, each clipped on the side its advantage pushes to, averaged before exp.

    The recipe must have a token ratio, one advantage for each rollout, and the mean over rollouts.
    """

    equation = "L_i = -A exp(mean_t sgn(A) min(sgn(A) d_t, sgn(A) clip(d_t, -low, high)))"
    scope = Scope.ROLLOUT
    low: NotNegative = 0.4  # of the log-ratio
    high: NotNegative = 0.4

    def __call__(self, scored: Scored) -> TokenLosses:
        plain, advantages, mask = scored.log_ratio, scored.advantages, scored.mask
        held = torch.where(advantages >= 0, plain.clamp(max=self.high), plain.clamp(min=-self.low))
        return TokenLosses(losses=-advantages * torch.exp(rollout_mean(held, mask)), bounded=held != plain)


RECIPE = Recipe(
    name="gmpo",
    title="Geometric-Mean Policy Optimization",
    acronym="GMPO",
    arxiv="2507.20673",
    verification="code",  # callsys/GMPO; verl `geo_mean`
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=GeometricMean(),
    aggregate=RolloutMean(),
)
