"""SPEAR's objective: imitates old rollouts that beat the current policy's rewards, with a weight that grows.

    sum of two losses, fresh and replayed: (1/N) sum_i (1/limit) sum_t of PPO (.8, 1.28) each

Fresh and replayed rollouts are two losses that are added up: each has its own mean, its own covariances and its own
share of tokens left out for their covariance. The released scripts set share and bounds of the replayed ones only
(`clip_cov_ratio_replay` .02 of 1 to 40), so fresh ones have verl's defaults (.0002 of 1 to 5). Ours: the buffer is
whatever older rollouts a step draws, with one step for both kinds instead of two; rollouts older than `max_age`
still count in the mean. Tokens of high covariance are left out by rank instead of at random. Its bonus for
tool calls, its filters and its selection of groups by spread belong to rewards and sampling and are left out.
"""

import math
import statistics

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import (
    AdvantagePart,
    AggregatePart,
    Batch,
    CorrectionPart,
    Count,
    Memory,
    PositiveShare,
    Requirement,
    Scope,
    Scored,
    TokenLosses,
    WeightPart,
)
from swarm.objectives.parts import TokenRatio
from swarm.objectives.parts.aggregate import allowed_length
from swarm.objectives.parts.clip import clip_surrogate, covariances, largest
from swarm.objectives.parts.group_statistics import group_centred, group_statistics
from swarm.objectives.recipe import Recipe


class RecalibratedReplay(AdvantagePart):
    """Reward of fresh rollouts minus the group's mean; for old rollouts, the excess over the median of recent means.

    Rollouts older than `max_age` optimizer steps get 0. While no mean is known yet, old ones get 0 too
    (ours). Only fresh groups of our policy count in the median.

    Source: SPEAR, arXiv:2509.22601; TencentYoutuResearch/SPEAR `ray_trainer_hybrid.py`.
    """

    equation = "A_i = R_i - mean_G at age 0; max(R_i - median(recent group means), 0) at age 1..max_age; 0 beyond"
    always_needs = frozenset({Requirement.ZERO_VARIANCE_GROUPS})
    max_age: Count = 5  # optimizer steps
    history: Count = 10_240  # group means that are remembered

    def initial(self) -> Memory:
        return {"means": []}

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        batch = scored.batch
        group = group_statistics(batch.rewards, batch.group_index)
        is_own_fresh = (batch.age_steps == 0) & ~batch.is_external
        fresh = {
            int(index): float(mean)
            for index, mean, is_fresh in zip(batch.group_index, group.mean, is_own_fresh, strict=True)
            if is_fresh
        }
        return {"means": [*memory["means"], *fresh.values()][-self.history :]}

    def __call__(self, batch: Batch) -> Tensor:
        rewards = batch.rewards.double()
        means = self.remembered(batch)["means"]
        today = statistics.median(means) if means else float("inf")
        own = group_centred(rewards, batch.group_index)
        replayed = torch.where(batch.age_steps <= self.max_age, (rewards - today).clamp(min=0), 0.0)
        return torch.where(batch.age_steps == 0, own, replayed).to(batch.rewards.dtype)


class ReplayWarmup(CorrectionPart):
    """Weight of rollouts of earlier policies that rises along half a cosine, from about 0 at the first step to 1.

    Source: SPEAR, arXiv:2509.22601; TencentYoutuResearch/SPEAR `dp_actor.py` (`max_replay_loss_steps`).
    """

    equation = "w = 1 at age 0, else (1 - cos(pi min(k / steps, 1))) / 2 at the k-th optimizer step"
    steps: Count = 300  # optimizer steps

    def initial(self) -> Memory:
        return {"step": 1}

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        return {"step": int(memory["step"]) + 1}

    def __call__(self, scored: Scored) -> Tensor:
        step = int(self.remembered(scored.batch)["step"])
        weight = (1 - math.cos(math.pi * min(step / self.steps, 1.0))) / 2
        is_fresh = (scored.batch.age_steps == 0)[:, None].expand(scored.mask.shape)
        return torch.where(is_fresh, 1.0, torch.full_like(scored.log_ratio.detach(), weight))


class CovarianceClipApart(WeightPart):
    """Clip-Cov, applied separately to fresh and to replayed tokens.

    Source: SPEAR, arXiv:2509.22601; TencentYoutuResearch/SPEAR `core_algos.py`, its scripts. Ours: by rank.
    """

    equation = (
        "L_t = 0 on the largest `share` of cov_t in (least, most), separately for age 0 and older (replay_*), "
        "else -min(r A, clip(r, 1-low, 1+high) A)"
    )
    scope = Scope.STEP
    low: float = 0.2  # half-width
    high: float = 0.28  # half-width
    share: PositiveShare = 2e-4  # of the step's fresh tokens, at least one
    least: float = 1.0
    most: float = 5.0
    replay_share: PositiveShare = 0.02  # of the step's replayed tokens, at least one
    replay_least: float = 1.0
    replay_most: float = 40.0

    def check(self) -> None:
        if self.least >= self.most or self.replay_least >= self.replay_most:
            raise ConfigError("least must be below most")

    def __call__(self, scored: Scored) -> TokenLosses:
        found = clip_surrogate(scored.log_ratio, scored.advantages, 1 - self.low, 1 + self.high)
        is_fresh = (scored.batch.age_steps == 0)[:, None]
        dropped = torch.zeros_like(scored.mask)
        for kind, share, least, most in (
            (is_fresh, self.share, self.least, self.most),
            (~is_fresh, self.replay_share, self.replay_least, self.replay_most),
        ):
            tokens = scored.mask & kind
            covariance = covariances(scored, tokens)
            eligible = (covariance > least) & (covariance < most) & tokens & ~found.bounded
            dropped = dropped | largest(covariance, eligible, share, tokens)
        losses = torch.where(dropped, torch.zeros_like(found.losses), found.losses)
        return TokenLosses(losses=losses, bounded=found.bounded | dropped)


class ConstantLengthApart(AggregatePart):
    """Sum of Dr.GRPO's means over fresh and over replayed rollouts, so that neither kind dilutes the other.

    Source: SPEAR, arXiv:2509.22601; TencentYoutuResearch/SPEAR `dp_actor.py`.
    """

    equation = "L = sum over kinds k of (1/N_k) sum_{i in k} (1/limit_i) sum_t L_t, k age 0 or older"
    scope = Scope.STEP

    def __call__(self, losses: Tensor, scored: Scored) -> Tensor:
        batch = scored.batch
        is_fresh = batch.age_steps == 0
        count = torch.where(is_fresh, is_fresh.sum(), (~is_fresh).sum())  # [N], of its kind
        share = batch.num_rollouts / max(1, batch.step_rollouts)  # of the step, where it has several recipes
        return share * (losses.sum(dim=1) / allowed_length(batch) / count).sum()


RECIPE = Recipe(
    name="spear",
    title="Learn the Ropes, Then Trust the Wins: Self-imitation with Progressive Exploration for "
    "Agentic Reinforcement Learning",
    acronym="SPEAR",
    arxiv="2509.22601",
    verification="code",
    advantage=RecalibratedReplay(),
    ratio=TokenRatio(),
    weight=CovarianceClipApart(),
    corrections=(ReplayWarmup(),),
    aggregate=ConstantLengthApart(),
)
