"""How off-policy a step was: figures over trained tokens, overall and by source.

Invariant: figures about ratios use only rollouts whose behaviour log-probs exist, and a source that
has none gets no edge report rather than an invented one. Masked tokens and dropped members never count.
Shape letters: N rollouts, L longest response in tokens, n trained tokens.
"""

import torch
from torch import Tensor

from swarm.learn.batch import Batch
from swarm.types import EdgeReport

_BOUND = 20.0  # of a log-ratio, so that one impossible token gives a large figure and not infinity


def step_diagnostics(batch: Batch, logprobs: Tensor, entropy: Tensor, bounded: Tensor) -> dict[str, float]:
    """Figures of one optimizer step, before its update.

    Args:
        batch: the whole step, with advantages.
        logprobs: [N, L] nats under the policy being optimised, at each rollout's temperature.
        entropy: [N, L] nats.
        bounded: bool [N, L], tokens that the weight rule clipped or capped.

    Returns:
        Name -> figure; names of what could not be measured are missing. Ratios are policy over generator,
        by token: `mismatch_kl_k1` (mean of -log r), `mismatch_kl_k3` (mean of r - 1 - log r, nats per token),
        `ratio_mean`, `ratio_max`, `ess_share` (also `_local`, `_foreign`).
    """
    mask = batch.mask
    figures = {
        "reward_mean": float(batch.rewards.mean()),
        "silent_share": _silent_share(batch),
        "dropped_share": 1 - float(mask.any(dim=1).float().mean()),
        "age_mean_steps": float(batch.age_steps.float().mean()),
        "age_max_steps": float(batch.age_steps.max()),
    }
    if bool(mask.any()):
        figures["entropy_nats"] = float(entropy[mask].mean())
        figures["clip_share"] = float(bounded[mask].float().mean())
    log_ratio = _log_ratio(batch, logprobs)
    is_known = mask & batch.has_logprobs[:, None]
    if bool(is_known.any()):
        known = log_ratio[is_known]
        ratio = known.exp()
        figures["mismatch_kl_k1"] = float(-known.mean())
        figures["mismatch_kl_k3"] = _k3(known)
        figures["ratio_mean"] = float(ratio.mean())
        figures["ratio_max"] = float(ratio.max())
    foreign = batch.is_foreign[:, None]
    for name, part in (("", is_known), ("_local", is_known & ~foreign), ("_foreign", is_known & foreign)):
        if bool(part.any()):
            figures[f"ess_share{name}"] = ess_share(log_ratio[part])
    return figures


def edge_reports(batch: Batch, logprobs: Tensor) -> tuple[EdgeReport, ...]:
    """One report for each foreign source with behaviour log-probs, sorted by source."""
    log_ratio = _log_ratio(batch, logprobs)
    is_known = batch.mask & batch.has_logprobs[:, None]
    reports: list[EdgeReport] = []
    for source in sorted(set(batch.sources)):
        groups = [index for index, name in enumerate(batch.sources) if name == source]
        is_member = torch.isin(batch.group_index, torch.tensor(groups, device=batch.mask.device)) & batch.is_foreign
        known = log_ratio[is_known & is_member[:, None]]
        if known.numel() == 0:
            continue
        reports.append(
            EdgeReport(
                source=source,
                num_groups=len(batch.group_index[is_member].unique()),
                age_mean_steps=float(batch.age_steps[is_member].float().mean()),
                ess_share=ess_share(known),
                mismatch_kl=_k3(known),
                reward_mean=float(batch.rewards[is_member].mean()),
            )
        )
    return tuple(reports)


def ess_share(log_ratio: Tensor) -> float:
    """Effective sample size over sample size, (sum w)^2 / (n sum w^2), of tokens with weights w = exp(log_ratio).

    By token, so that the figure does not shrink with the length of responses.

    Args:
        log_ratio: [n], n > 0.

    Returns:
        In (0, 1]; 1 where all ratios are equal.

    Source: Kish 1965; Owen, Monte Carlo theory, section 9.3.
    """
    weights = (log_ratio.double() - log_ratio.double().max()).exp()
    return float(weights.sum() ** 2 / (weights.numel() * (weights**2).sum()))


def _k3(log_ratio: Tensor) -> float:
    """Nats per token, >= 0, unbiased for KL(generator || policy). Source: Schulman, "Approximating KL divergence"."""
    return float((log_ratio.double().expm1() - log_ratio.double()).mean())


def _log_ratio(batch: Batch, logprobs: Tensor) -> Tensor:
    is_known = batch.mask & batch.has_logprobs[:, None]
    difference = logprobs.detach() - batch.behavior_logprobs
    return torch.where(is_known, difference, torch.zeros_like(difference)).clamp(-_BOUND, _BOUND)


def _silent_share(batch: Batch) -> float:
    """Share of groups whose rewards are all equal."""
    silent = 0
    for group in range(len(batch.sources)):
        rewards = batch.rewards[batch.group_index == group]
        silent += int(rewards.numel() == 0 or bool(rewards.max() == rewards.min()))
    return silent / max(1, len(batch.sources))
