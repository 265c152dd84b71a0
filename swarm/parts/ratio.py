"""Log importance ratios of trained tokens.

Invariant: off the mask a log-ratio is exactly 0, on it bounded by +-20 so that exp stays finite.
Shape letters: N rollouts, L longest response in tokens.
"""

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0


def token_log_ratio(logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi(token) - log mu(token).

    Args:
        logprobs: [N, L] nats, the policy being optimised; gradient flows.
        behavior_logprobs: [N, L] nats, the policy that sampled (or the proximal one).
        mask: bool [N, L].

    Returns:
        [N, L] in [-20, 20], 0 off the mask.

    Source: arXiv:1707.06347 section 3 (mu = pi_old); the bound as in verl `core_algos.py`.
    """
    difference = torch.where(mask, logprobs - behavior_logprobs.to(logprobs.dtype), torch.zeros_like(logprobs))
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def own_log_ratio(logprobs: Tensor, mask: Tensor) -> Tensor:
    """log pi(token) - stop_gradient(log pi(token)): 0 in value, with the gradient of log pi.

    For rollouts re-encoded by the consumer, whose "old" log-probs are its own.

    Source: arXiv:2509.08721 (shared rollouts are encoded as if generated locally).
    """
    return token_log_ratio(logprobs, logprobs.detach(), mask)


def prefix_minimum(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Smallest log-ratio of the trained tokens strictly before each token; 0 where there are none.

    Args:
        log_ratio: [N, L].
        mask: bool [N, L].

    Returns:
        [N, L], detached. May be positive: the empty prefix counts for the first trained token only.

    Source: arXiv:2601.22718; the value at the first token is the natural convention, not quoted.
    """
    infinite = torch.full_like(log_ratio, torch.inf)
    known = torch.where(mask, log_ratio.detach(), infinite)
    shifted = torch.cat([infinite[:, :1], known[:, :-1]], dim=1)
    smallest = torch.cummin(shifted, dim=1).values
    return torch.where(torch.isinf(smallest), torch.zeros_like(smallest), smallest)
