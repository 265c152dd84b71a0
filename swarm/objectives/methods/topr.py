"""TOPR as in its paper: negative rollouts are weighted by their trajectory's ratio, clamped to [0, 1].

    (1/N) sum_i of -w_i A_i sum_t log pi; w 1 for A > 0, else the product of ratios, in [0, 1]

Positives are pure likelihood, so only negatives need log-probs of the generator. There is no KL term.
In the paper, the baseline sets the share of positives. Ours: the group's mean as baseline.
"""

from dataclasses import replace

import torch

from swarm.errors import ConfigError
from swarm.objectives.part import NotNegative, Scope, Scored, TokenLosses, WeightPart
from swarm.objectives.parts import GroupCentred, RolloutSum, TokenMean, TokenRatio
from swarm.objectives.parts.likelihood import weighted_likelihood, whole_trajectory
from swarm.objectives.recipe import Recipe


class _Tapered(WeightPart):
    low: NotNegative = 0.0  # of the ratio itself; positives have the canonical a+ = b+ = 1
    high: float = 1.0

    def check(self) -> None:
        if self.low > self.high:
            raise ConfigError(f"low: {self.low} is above high: {self.high}")


class TaperedTrajectory(_Tapered):
    """Plain likelihood at positive advantages; other tokens are weighted by the clamped ratio of their trajectory."""

    equation = "L_t = -A log pi_t if A > 0 else -sg[clip(prod_s r_s, low, high)] A log pi_t"
    scope = Scope.ROLLOUT

    def __call__(self, scored: Scored) -> TokenLosses:
        weight = torch.exp(whole_trajectory(scored))
        is_positive = scored.advantages > 0
        losses = -torch.where(is_positive, 1.0, weight.clamp(self.low, self.high)) * scored.advantages * scored.logprobs
        return TokenLosses(losses=losses, bounded=~is_positive & ((weight < self.low) | (weight > self.high)))


class TaperedToken(_Tapered):
    """Plain likelihood for tokens of successes; other tokens are weighted by their own clamped ratio."""

    equation = "L_t = -A log pi_t if R > threshold else -sg[clip(r_t, low, high)] A log pi_t"
    threshold: float = 0.5  # a success has a higher reward

    def __call__(self, scored: Scored) -> TokenLosses:
        has_scored = (scored.batch.rewards > self.threshold)[:, None]
        log_weight = torch.where(has_scored, torch.zeros_like(scored.log_ratio), scored.log_ratio)
        low, high = (torch.where(has_scored, 1.0, bound).to(log_weight.dtype) for bound in (self.low, self.high))
        return weighted_likelihood(scored, log_weight, low, high)


RECIPE = Recipe(
    name="topr",
    title="Tapered Off-Policy REINFORCE: Stable and efficient reinforcement learning for LLMs",
    acronym="TOPR",
    arxiv="2503.14286",
    verification="paper",  # eq. 8
    advantage=GroupCentred(),
    ratio=TokenRatio(),
    weight=TaperedTrajectory(),
    aggregate=RolloutSum(),
)

TOPR_TOKEN = replace(
    RECIPE,
    name="topr_token",
    verification="code",  # ROLL `agentic_actor_pg_worker.py` (topr), Trinity-RFT `topr`
    about="Tapered token (TOPR, as its code bases have it): tokens of unrewarded rollouts weigh their own ratio, "
    "tapered into [0, 1]. ROLL and Trinity split by score, not by advantage, and taper each token by itself; "
    "the paper's product over the trajectory is the recipe `topr`. ROLL leaves the advantage open and Trinity "
    "takes the reward. Ours: the reward minus the group's mean, which with Trinity's rewards of +-1 has the "
    "same signs; and a threshold of 0.5 instead of 0, because tasks that give 0.01 for the form of an answer "
    "would never be tapered. Formula: token mean of -alpha_t A log pi; alpha 1 for R > .5 (ours; 0), else "
    "min(r_t, 1).",
    weight=TaperedToken(),
    aggregate=TokenMean(),
)
