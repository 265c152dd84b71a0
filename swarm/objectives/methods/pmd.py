"""Policy mirror descent of Kimi k1.5 as published: the scaled log-ratio of a rollout is regressed onto its advantage.

    (1/N) sum_i (tau sum_t d_t - A_i)^2, tau .1; A the reward minus the group's mean

The optimum of the KL-regularised problem has exactly that log-ratio, so data of any age can be used. The
normaliser of the optimum is approximated by the group's mean reward, as in the paper. Ours: scale 0.1.

Mechanism: trajectory regression.
"""

import torch

from swarm.errors import ConfigError
from swarm.objectives.part import Scored, TokenLosses, WeightPart
from swarm.objectives.parts import GroupCentred, RolloutMean, TokenMean, TokenRatio, TrajectoryRegression
from swarm.objectives.recipe import Recipe


class AnchoredLikelihood(WeightPart):
    """REINFORCE, and a squared log-ratio that pulls back to the ratio's denominator.

    Source: Kimi k1.5, arXiv:2501.12599 section 2.3.2, as a token loss in ROLL `kimi15`; arXiv:2509.24203.
    """

    equation = "L_t = -A log pi_t + (tau/2) (log r)^2"
    tau: float = 0.1

    def __post_init__(self) -> None:
        if self.tau < 0:
            raise ConfigError(f"tau {self.tau} must not be negative")

    def __call__(self, scored: Scored) -> TokenLosses:
        losses = -scored.advantages * scored.logprobs + self.tau / 2 * scored.log_ratio**2
        return TokenLosses(losses=losses, bounded=torch.zeros_like(scored.mask))


RECIPE = Recipe(
    name="pmd",
    title="Kimi k1.5: Scaling Reinforcement Learning with LLMs",
    acronym="PMD",
    arxiv="2501.12599",
    verification="code",
    advantage=GroupCentred(),
    ratio=TokenRatio(),
    weight=TrajectoryRegression(scale=0.1),
    aggregate=RolloutMean(),
)


PMD_TOKEN = Recipe(
    name="pmd_token",
    title="Kimi k1.5: Scaling Reinforcement Learning with LLMs",
    acronym="PMD",
    arxiv="2501.12599",
    verification="code",
    about="Anchored likelihood: policy mirror descent of Kimi k1.5 as a token loss: REINFORCE and a squared log- "
    "ratio to the old policy. No weight and no clip; the square holds the policy near the one that sampled. "
    "The old policy is here the generator's, so that stale rollouts are held back the more. Ours: the group's "
    "mean as baseline, token mean. Formula: token mean of -A log pi + (tau/2) (log pi - log pi_old)^2, tau "
    ".1; A group-centred.",
    advantage=GroupCentred(),
    ratio=TokenRatio(),
    weight=AnchoredLikelihood(tau=0.1),
    aggregate=TokenMean(),
)
