"""Token losses from log-ratio and advantage: trust regions and detached weights.

Invariant: every function returns (losses [N, L], bounded bool [N, L]), where `bounded` marks tokens
whose gradient the rule removed or capped. Bounds are on the ratio itself unless called half-widths.
Shape letters: N rollouts, L longest response in tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


def ppo_clip(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float = 0.0
) -> tuple[Tensor, Tensor]:
    """-min(r A, clip(r, low, high) A); with `dual` > 1 at most -dual * A where A < 0.

    Args:
        log_ratio: [N, L], gradient flows.
        advantages: [N, L], constant.
        low: lower bound of the ratio (1 - half-width).
        high: upper bound of the ratio (1 + half-width).
        dual: dual-clip constant; 0 is off.

    Source: arXiv:1707.06347 eq. 7; separate bounds arXiv:2503.14476; dual clip arXiv:1912.09729 and
    verl `compute_policy_loss_vanilla`.
    """
    ratio = torch.exp(log_ratio)
    plain, clipped = -ratio * advantages, -ratio.clamp(low, high) * advantages
    losses = torch.maximum(plain, clipped)
    bounded = clipped > plain
    if dual > 0:
        ceiling = -dual * advantages
        is_capped = (advantages < 0) & (losses > ceiling)
        losses = torch.where(is_capped, ceiling, losses)
        bounded = bounded | is_capped
    return losses, bounded


def detached_clip(
    logprobs: Tensor, log_weight: Tensor, advantages: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """-stop_gradient(clip(w, low, high)) A log pi: every token keeps a gradient, of bounded size.

    Args:
        logprobs: [N, L], gradient flows.
        log_weight: [N, L] log of w, a sum of bounded log-ratios (exp must be finite).
        advantages: [N, L].
        low: least weight.
        high: greatest weight.

    Source: CISPO, arXiv:2506.13585 section 3.1; MinPRO, arXiv:2601.22718.
    """
    weight = torch.exp(log_weight.detach())
    losses = -weight.clamp(low, high) * advantages * logprobs
    return losses, (weight < low) | (weight > high)


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundSearch:
    """Ranges in which BAPO moves its two ratio bounds, and how far positives must count."""

    form: Literal["code", "paper"]
    target: float  # code: sum of positives / sum of negatives; paper: share of positives, in [0, 1]
    low_start: float
    low_max: float
    low_step: float
    high_start: float
    high_max: float
    high_step: float


def balanced_bounds(
    ratio: Tensor, advantages: Tensor, behavior: Tensor, mask: Tensor, search: BoundSearch
) -> tuple[float, float]:
    """Ratio bounds (low, high) at which positive tokens contribute the target share, as far as they can.

    Args:
        ratio: [N, L] of the whole step.
        advantages: [N, L].
        behavior: [N, L] probabilities (not logs) at which tokens were sampled; used by the paper's form.
        mask: bool [N, L].
        search: ranges, steps, target and which of the two forms.

    Source: BAPO. "code": WooooDyy/BAPO `recipe/bapo/policy_loss.py` (lower bound first, unweighted sums);
    "paper": its Algorithm 1 (upper bound first, sums weighted by the sampling probability).
    """
    zeros = torch.zeros_like(ratio, dtype=torch.promote_types(ratio.dtype, torch.float32))
    size = torch.where(mask, advantages.abs() * (behavior if search.form == "paper" else 1.0), zeros)
    is_positive = advantages > 0

    def is_short(low: float, high: float) -> bool:
        positive = float(torch.where(is_positive, ratio.clamp(max=high) * size, zeros).sum())
        negative = float(torch.where(is_positive, zeros, ratio.clamp(min=low) * size).sum())
        if search.form == "code":
            return negative > 0 and positive / (negative + 1e-8) < search.target
        return positive + negative > 0 and positive / (positive + negative) < search.target

    return _search_code(search, is_short) if search.form == "code" else _search_paper(search, is_short)


def _search_code(search: BoundSearch, is_short: Callable[[float, float], bool]) -> tuple[float, float]:
    low, high = search.low_start, search.high_start
    while low < search.low_max and is_short(low, high):
        low = min(low + search.low_step, search.low_max)
    while high < search.high_max and is_short(low, high):
        high = min(high + search.high_step, search.high_max)
    return low, high


def _search_paper(search: BoundSearch, is_short: Callable[[float, float], bool]) -> tuple[float, float]:
    low, high = search.low_start, search.high_start
    rounding = 1e-9  # ten steps of 0.05 from 1.2 must still reach 1.7
    while low + search.low_step <= search.low_max + rounding and is_short(low, high):
        if high + search.high_step <= search.high_max + rounding:
            high += search.high_step
        else:
            low += search.low_step
    return low, high
