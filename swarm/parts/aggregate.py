"""From token losses to one number that adds up over micro-batches.

Invariant: denominators are totals of the whole optimizer step, handed in, never counted here.
Shape letters: N rollouts, L longest response in tokens.
"""

from torch import Tensor


def token_mean(losses: Tensor, step_tokens: int) -> Tensor:
    """Sum of token losses over the number of trained tokens of the step.

    Args:
        losses: [N, L], 0 off the mask.
        step_tokens: of all micro-batches.

    Source: arXiv:2503.14476 section 3.3.
    """
    return losses.sum() / max(1, step_tokens)


def rollout_mean(losses: Tensor, mask: Tensor, step_rollouts: int) -> Tensor:
    """Mean over rollouts of the mean over their trained tokens ("seq-mean-token-mean").

    Args:
        losses: [N, L], 0 off the mask.
        mask: bool [N, L].
        step_rollouts: of all micro-batches.

    Source: arXiv:2402.03300 eq. 3.
    """
    per_rollout = losses.sum(dim=1) / mask.sum(dim=1).clamp(min=1)
    return per_rollout.sum() / max(1, step_rollouts)
