"""Off-policy diagnostics and the report of a step: figures over trained tokens, overall, by age and by source.

Invariant: figures about ratios use only rollouts whose behaviour log-probs exist; a source without any gets no edge
report. Masked tokens and dropped members count in figures of rollouts (reward, age, length), never in those of tokens.
Shape letters: N rollouts, L longest response in tokens, n trained tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from swarm.learn.gradient import Measured
from swarm.objectives.batch import Batch
from swarm.types import Draw, EdgeReport, PolicyVersion, StepReport

AGE_BUCKETS: Final = (0, 1, 2, 4, 8, 16, 32, 64)
"""First age, in steps, of each bucket; the last one is open."""
_BOUND = 20.0  # of a log-ratio, so that one impossible token gives a large figure and not infinity


def step_diagnostics(batch: Batch, measured: Measured) -> dict[str, float]:
    """Figures of one step, computed from the scores before each update.

    Args:
        batch: the whole step, with advantages.
        measured: scores of each token, under the policy just before the update that learns from the token.

    Returns:
        Name -> figure; a figure that could not be measured is missing. Ratios are policy over generator,
        by token: `mismatch_kl_k1` (mean of -log r), `mismatch_kl_k3` (mean of r - 1 - log r, nats per token),
        `log_ratio_mean`, `_std`, `_m2` (second moment), `_p01`, `_p99`, `ratio_mean`, `ratio_max`, `ess_share`.
        `num_tokens`, `ess_share`, `mismatch_kl_k3` and `log_ratio_m2` also by age bucket (`_age_4`: 4 to 7 steps).
    """
    mask = batch.mask
    figures = {
        "reward_mean": float(batch.rewards.mean()),
        "zero_variance_share": _zero_variance_share(batch),
        "dropped_share": 1 - float(mask.any(dim=1).float().mean()),
        "age_mean_steps": float(batch.age_steps.float().mean()),
        "age_max_steps": float(batch.age_steps.max()),
        "response_tokens_mean": float(batch.length.float().mean()),
        "cut_off_share": float(batch.is_truncated.float().mean()),
    }
    if bool(mask.any()):
        advantages = batch.advantages[mask]
        figures["entropy_nats"] = float(measured.entropy[mask].mean())
        figures["advantage_mean"] = float(advantages.mean())
        figures["advantage_std"] = float(advantages.std(correction=0))
        figures["advantage_max"] = float(advantages.abs().max())
        figures |= _shares(batch, measured.bounded, measured.factor)
    log_ratio = _log_ratio(batch, measured.logprobs)
    is_known = mask & batch.has_logprobs[:, None]
    external = batch.is_external[:, None]
    if bool(is_known.any()):
        figures |= _spread(log_ratio[is_known]) | _off_policy_figures(log_ratio[is_known])
    for name, part in (("_local", is_known & ~external), ("_external", is_known & external)):
        if bool(part.any()):
            figures[f"ess_share{name}"] = ess_share(log_ratio[part])
    for first_age, is_of_age in _buckets(batch):
        if bool((part := is_known & is_of_age[:, None]).any()):
            of_age = _off_policy_figures(log_ratio[part])
            figures |= {f"{name}_age_{first_age}": value for name, value in of_age.items()}
    return figures


def _shares(batch: Batch, bounded: Tensor, factor: Tensor) -> dict[str, float]:
    """Shares of trained tokens that were clipped, left out or scaled down; `clip_share` also by sign of advantage."""
    mask = batch.mask
    found = {
        "clip_share": float(bounded[mask].float().mean()),
        "masked_share": float((factor[mask] == 0).float().mean()),
        "truncated_share": float(((factor[mask] > 0) & (factor[mask] < 1)).float().mean()),
    }
    for name, part in (("positive", batch.advantages > 0), ("negative", batch.advantages < 0)):
        if bool((part := part & mask).any()):
            found[f"clip_share_{name}"] = float(bounded[part].float().mean())
    return found


def _spread(log_ratio: Tensor) -> dict[str, float]:
    """Moments and tails of the log-ratio [n]."""
    values = log_ratio.double()
    tails = torch.quantile(values, torch.tensor([0.01, 0.99], dtype=values.dtype, device=values.device))
    ratio = values.exp()
    return {
        "mismatch_kl_k1": float(-values.mean()),
        "log_ratio_mean": float(values.mean()),
        "log_ratio_std": float(values.std(correction=0)),
        "log_ratio_p01": float(tails[0]),
        "log_ratio_p99": float(tails[1]),
        "ratio_mean": float(ratio.mean()),
        "ratio_max": float(ratio.max()),
    }


def _off_policy_figures(log_ratio: Tensor) -> dict[str, float]:
    """The guard's figures of log-ratios [n]."""
    return {
        "num_tokens": float(log_ratio.numel()),
        "ess_share": ess_share(log_ratio),
        "mismatch_kl_k3": _k3(log_ratio),
        "log_ratio_m2": float((log_ratio.double() ** 2).mean()),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class OffPolicyStats:
    """Off-policy figures of one source's tokens: all of them, or those of one age bucket."""

    source: str
    is_made_here: bool  # made by this node, so that its log-probs cannot be invented
    first_age: int | None  # of the bucket; None for all ages
    num_tokens: int
    ess_share: float
    mismatch_kl: float  # k3, nats per token
    log_ratio_m2: float
    is_follower: bool = False  # made by another node with this learner's policy
    is_newcomer: bool = False  # by a node that is not established


@dataclass(frozen=True, kw_only=True, slots=True)
class LikelihoodStats:
    """Likelihood of one source's trained tokens under the learner's policy, whatever the source claims."""

    source: str
    is_made_here: bool
    is_newcomer: bool
    num_tokens: int
    nll: float  # mean of -log pi, nats per token


def likelihood_by_source(batch: Batch, logprobs: Tensor) -> tuple[LikelihoodStats, ...]:
    """Statistics of every source with trained tokens; the generator's log-probs are not used."""
    found: list[LikelihoodStats] = []
    for source, is_made_here, members in _sources(batch):
        own = -logprobs.detach()[batch.mask & members[:, None]].double()
        if own.numel():
            found.append(
                LikelihoodStats(
                    source=source,
                    is_made_here=is_made_here,
                    is_newcomer=bool((batch.newcomers & members).any()),
                    num_tokens=own.numel(),
                    nll=float(own.mean()),
                )
            )
    return tuple(found)


def off_policy_by_source(batch: Batch, logprobs: Tensor) -> tuple[OffPolicyStats, ...]:
    """Statistics of every source with behaviour log-probs: as a whole, then by age bucket."""
    log_ratio = _log_ratio(batch, logprobs)
    is_known = batch.mask & batch.has_logprobs[:, None]
    found: list[OffPolicyStats] = []
    for source, is_made_here, members in _sources(batch):
        for first_age, is_of_age in ((None, torch.ones_like(members)), *_buckets(batch)):
            known = log_ratio[is_known & (members & is_of_age)[:, None]]
            if known.numel():
                figures = _off_policy_figures(known)
                found.append(
                    OffPolicyStats(
                        source=source,
                        is_made_here=is_made_here,
                        first_age=first_age,
                        num_tokens=known.numel(),
                        ess_share=figures["ess_share"],
                        mismatch_kl=figures["mismatch_kl_k3"],
                        log_ratio_m2=figures["log_ratio_m2"],
                        is_follower=not is_made_here and not bool((batch.is_external & members).any()),
                        is_newcomer=bool((batch.newcomers & members).any()),
                    )
                )
    return tuple(found)


def _sources(batch: Batch) -> Iterator[tuple[str, bool, Tensor]]:
    """Yields (source, made here, bool [N] rollouts), separately for rollouts made here and by others."""
    for source in sorted(set(batch.sources)):
        groups = [index for index, name in enumerate(batch.sources) if name == source]
        is_its = torch.isin(batch.group_index, torch.tensor(groups, device=batch.mask.device))
        for is_made_here, members in ((True, is_its & ~batch.from_peers), (False, is_its & batch.from_peers)):
            if bool(members.any()):
                yield source, is_made_here, members


def _buckets(batch: Batch) -> Iterator[tuple[int, Tensor]]:
    """Yields (first age, bool [N] rollouts) of each age bucket."""
    for first_age, next_age in zip(AGE_BUCKETS, (*AGE_BUCKETS[1:], None), strict=True):
        is_young = batch.age_steps < next_age if next_age is not None else torch.ones_like(batch.is_external)
        yield first_age, (batch.age_steps >= first_age) & is_young


def edge_reports(batch: Batch, logprobs: Tensor) -> tuple[EdgeReport, ...]:
    """One report for each other node with behaviour log-probs, followers included, sorted by source."""
    log_ratio = _log_ratio(batch, logprobs)
    is_known = batch.mask & batch.has_logprobs[:, None]
    reports: list[EdgeReport] = []
    for source, is_made_here, members in _sources(batch):
        known = log_ratio[is_known & members[:, None]]
        if is_made_here or known.numel() == 0:
            continue
        reports.append(
            EdgeReport(
                source=source,
                num_groups=len(batch.group_index[members].unique()),
                age_mean_steps=float(batch.age_steps[members].float().mean()),
                ess_share=ess_share(known),
                mismatch_kl=_k3(known),
                reward_mean=float(batch.rewards[members].mean()),
            )
        )
    return tuple(reports)


def ess_share(log_ratio: Tensor) -> float:
    """Effective sample size over sample size, (sum w)^2 / (n sum w^2), of tokens with weights w = exp(log_ratio).

    Each token has its own weight, so that the figure does not shrink with the length of responses.

    Args:
        log_ratio: [n], n > 0.

    Returns:
        In (0, 1]; 1 where all ratios are equal.

    Source: Kish 1965; Owen, Monte Carlo theory, section 9.3.
    """
    weights = (log_ratio.double() - log_ratio.double().max()).exp()
    return float(weights.sum() ** 2 / (weights.numel() * (weights**2).sum()))


def _k3(log_ratio: Tensor) -> float:
    """k3 estimate of KL(generator || policy), nats per token, >= 0. Source: Schulman, "Approximating KL divergence"."""
    return float((log_ratio.double().expm1() - log_ratio.double()).mean())


def _log_ratio(batch: Batch, logprobs: Tensor) -> Tensor:
    is_known = batch.mask & batch.has_logprobs[:, None]
    difference = logprobs.detach() - batch.behavior_logprobs
    return torch.where(is_known, difference, torch.zeros_like(difference)).clamp(-_BOUND, _BOUND)


def _zero_variance_share(batch: Batch) -> float:
    """Share of groups whose rewards are all equal."""
    zero_variance = 0
    for group in range(len(batch.sources)):
        rewards = batch.rewards[batch.group_index == group]
        zero_variance += int(rewards.numel() == 0 or bool(rewards.max() == rewards.min()))
    return zero_variance / max(1, len(batch.sources))


# --- the report of a step ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """Outcome of one optimizer update; the defaults describe a skipped update."""

    loss: float = 0.0
    norm: float = 0.0  # of the gradient before clipping
    was_skipped: bool = True
    num_clipped: int = 0  # groups of other nodes whose coefficients the mass clip scaled down
    others_share: float = 0.0  # of the mass of the coefficients, after the clip


def step_report(
    version: PolicyVersion, draw: Draw, batch: Batch, measured: Measured, updates: Sequence[Update]
) -> StepReport:
    """The report of a step; loss and norm are means over the updates that were made, or over all if none was.

    Args:
        version: the newest one, after the step.
        draw: the groups that were learned from.
        batch: the same groups, with advantages.
        measured: scores and costs of the step's updates.
        updates: at least one.
    """
    made = [update for update in updates if not update.was_skipped]
    counted = made or updates
    local = [drawn.scored for drawn in draw.groups if drawn.scored.is_own_policy(version.policy_id)]
    figures = step_diagnostics(batch, measured) | {
        "padding_share": measured.num_padding / max(1, measured.num_inputs),
        "num_micro_batches": float(measured.num_micro_batches),
        "num_updates": float(len(made)),
        "learning_rate": batch.learning_rate,
        "mass_clipped_groups": float(sum(update.num_clipped for update in made)),
        "mass_others_share": sum(update.others_share for update in counted) / len(counted),
        "age_in_flight_mean_steps": sum(drawn.in_flight_steps for drawn in draw.groups) / len(draw.groups),
    }
    return StepReport(
        version=version,
        loss=sum(update.loss for update in counted) / len(counted),
        grad_norm=sum(update.norm for update in counted) / len(counted),
        num_tokens=batch.num_tokens,
        was_skipped=not made,
        diagnostics=figures,
        seconds=measured.seconds,
        edges=edge_reports(batch, measured.logprobs),
        ages_steps=tuple(drawn.age_steps for drawn in draw.groups),
        num_local=len(local),
        num_external=len(draw.groups) - len(local),
        num_from_followers=sum(not scored.is_made_here for scored in local),
        draw_step=draw.step,
    )
