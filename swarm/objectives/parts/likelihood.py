"""Log-likelihood under constant weights: REINFORCE, truncated importance weights, trajectory ratios, regression.

Invariant: the gradient is that of log pi alone; `bounded` marks the tokens whose weight was capped.
Shape letters: N rollouts, L longest response in tokens.
"""

import torch
from torch import Tensor

from swarm.objectives.part import Positive, Scope, Scored, TokenLosses, WeightPart, unbounded
from swarm.objectives.parts.ratio import rollout_sum

TRAJECTORY_BOUND = 80.0  # exp of it is finite in float32


def weighted_likelihood(scored: Scored, log_weight: Tensor, low: float | Tensor, high: float | Tensor) -> TokenLosses:
    """-sg[clip(w, low, high)] A log pi, with w = exp(log_weight).

    Args:
        scored: supplies log-probs and advantages.
        log_weight: [N, L], a sum of bounded log-ratios (exp must be finite).
        low: least weight, a number or [N, L].
        high: greatest weight.
    """
    weight = torch.exp(log_weight.detach())
    least, most = (torch.as_tensor(bound, dtype=weight.dtype, device=weight.device) for bound in (low, high))
    losses = -torch.clamp(weight, least, most) * scored.advantages * scored.logprobs
    return TokenLosses(losses=losses, bounded=(weight < least) | (weight > most))


def whole_trajectory(scored: Scored) -> Tensor:
    """Log of the product of a rollout's token ratios, [N, 1], detached, bounded so that exp is finite."""
    whole = scored.log_ratio.detach().double().sum(dim=1, keepdim=True)
    return whole.clamp(-TRAJECTORY_BOUND, TRAJECTORY_BOUND).to(scored.log_ratio.dtype)


class Likelihood(WeightPart):
    """REINFORCE: the log-likelihood times the advantage, whatever the ratio.

    Source: Williams 1992, doi:10.1007/BF00992696.
    """

    equation = "L_t = -A log pi_t"

    def __call__(self, scored: Scored) -> TokenLosses:
        return unbounded(-scored.advantages * scored.logprobs)


class DetachedClip(WeightPart):
    """The clipped ratio as a constant weight of the log-likelihood.

    Source: CISPO, arXiv:2506.13585 section 3.1; MinPRO, arXiv:2601.22718.
    """

    equation = "L_t = -sg[clip(r, 1-low, 1+high)] A log pi_t"
    low: float = 1.0  # half-width; 1 = no lower bound
    high: float = 1.0  # half-width

    def __call__(self, scored: Scored) -> TokenLosses:
        return weighted_likelihood(scored, scored.log_ratio, 1 - self.low, 1 + self.high)


class TrajectoryRegression(WeightPart):
    """Squared distance of a rollout's scaled log-ratio from its advantage.

    The recipe's ratio must be a token ratio, whose logs are summed here. Every token carries the rollout's value,
    so the aggregate must be the mean over rollouts.

    Source: Kimi k1.5, arXiv:2501.12599 section 2.3.2 (ROLL `kimi15`); A*-PO, arXiv:2505.20686.
    """

    equation = "L_i = (scale sum_t log r_t - A)^2"
    scope = Scope.ROLLOUT
    scale: Positive = 0.1

    def __call__(self, scored: Scored) -> TokenLosses:
        return unbounded((self.scale * rollout_sum(scored.log_ratio, scored.mask) - scored.advantages) ** 2)
