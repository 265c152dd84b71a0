"""Policy mirror descent of Kimi k1.5 as published: the scaled log-ratio of a rollout is regressed onto its advantage.

    (1/N) sum_i (tau sum_t d_t - A_i)^2, tau .1; A the reward minus the group's mean

The optimum of the KL-regularised problem has exactly that log-ratio, so data of any age can be used. The
normaliser of the optimum is approximated by the group's mean reward, as in the paper. Ours: scale 0.1.
"""

from dataclasses import replace

from swarm.objectives.part import NotNegative, Scored, TokenLosses, WeightPart, unbounded
from swarm.objectives.parts import GroupCentred, RolloutMean, TokenMean, TokenRatio, TrajectoryRegression
from swarm.objectives.recipe import Recipe


class AnchoredLikelihood(WeightPart):
    """REINFORCE, and a squared log-ratio that pulls back to the ratio's denominator."""

    equation = "L_t = -A log pi_t + (tau/2) (log r)^2"
    tau: NotNegative = 0.1

    def __call__(self, scored: Scored) -> TokenLosses:
        return unbounded(-scored.advantages * scored.logprobs + self.tau / 2 * scored.log_ratio**2)


RECIPE = Recipe(
    name="pmd",
    title="Kimi k1.5: Scaling Reinforcement Learning with LLMs",
    acronym="PMD",
    arxiv="2501.12599",
    verification="code",  # section 2.3.2; ROLL `kimi15`, which also has the token loss
    advantage=GroupCentred(),
    ratio=TokenRatio(),
    weight=TrajectoryRegression(scale=0.1),
    aggregate=RolloutMean(),
)

PMD_TOKEN = replace(
    RECIPE,
    name="pmd_token",
    about="Anchored likelihood: policy mirror descent of Kimi k1.5 as a token loss: REINFORCE and a squared log- "
    "ratio to the old policy. No weight and no clip; the square holds the policy near the one that sampled. "
    "The old policy is here the generator's, so that stale rollouts are held back the more. Ours: the group's "
    "mean as baseline, token mean. Formula: token mean of -A log pi + (tau/2) (log pi - log pi_old)^2, tau "
    ".1; A group-centred.",
    weight=AnchoredLikelihood(tau=0.1),
    aggregate=TokenMean(),
)
