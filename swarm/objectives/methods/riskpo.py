"""RiskPO: the objective is a mixture of tail and middle of the scores of bundles of prompts, not their mean.

    papers of a bundle of five questions, mixed value at risk, sum-mean credit; clip .2, token mean

Bundles keep hard prompts, whose own rewards are all equal, in the update, and scores below the lower quantile
weigh more. The released runs differ in credit, upper level and baseline; this is the DAPO-Math run
(`run_qwen2.5_1.5b_MVaR_dapomath.sh`), which has natural_baseline_adv off: a good paper is pushed up. Ours: token mean.
"""

from collections.abc import Iterator
from typing import Annotated

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import AdvantagePart, Batch, Bound, Count, Memory, Requirement, Scored
from swarm.objectives.parts import Clip, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe

_TINY = 1e-6
_FLAT = 1e-3  # a deviation up to this one is replaced by 1


class BundleRisk(AdvantagePart):
    """A mixture of the mean between two quantiles and the mean below the lower one, of bundle scores.

    Successive groups of the step make a bundle; the k-th members of its groups make the k-th paper, whose score is
    the sum of their rewards. Members beyond the size of the smallest group belong to no paper and get 0. A paper's
    advantage is divided by the bundle's deviation and split among the paper's members in proportion to their lead
    over the mean of their own group, evenly if the leads cancel. The quantiles are tracked over the steps.

    Ours: groups that are left over at the end of a step make a smaller bundle; at the first step the quantiles are
    those of the step's own scores; a bundle with a deviation of at most 1e-3 is divided by 1 instead of the released
    1e-6, as the released code does for a single question.
    """

    equation = (
        "A = (w CVaR + RVaR) / (w+1) / std_bundle, RVaR = ((S-ql)+ - (S-qh)+) / (high - low), CVaR = -(ql - S)+ / low"
    )
    always_needs = frozenset({Requirement.ZERO_VARIANCE_GROUPS})
    bundle: Count = 5
    low: Annotated[float, Bound(above=0)] = 0.2  # levels
    high: Annotated[float, Bound(below=1)] = 0.8
    tail_weight: float = 1.5
    rate: float = 0.1  # of the tracked quantiles

    def check(self) -> None:
        if self.low >= self.high:
            raise ConfigError(f"low: {self.low} is not below high: {self.high}")

    def initial(self) -> Memory:
        return {"quantiles": []}

    def __call__(self, batch: Batch) -> Tensor:
        advantages = torch.zeros(batch.num_rollouts, dtype=torch.float64, device=batch.mask.device)
        bounds = self._quantiles(batch)
        for papers, rewards, leads in self._bundles(batch):
            scores = rewards.sum(dim=1)  # [papers]
            value = self._risk(scores, *bounds)
            deviation = float(scores.std()) if scores.numel() > 1 else 0.0
            value = value / ((deviation if deviation > _FLAT else 1.0) + _TINY)
            total = leads.sum(dim=1, keepdim=True)
            is_sound = total.abs() > _TINY
            share = torch.where(is_sound, leads / torch.where(is_sound, total, 1.0), 1.0 / leads.shape[1])
            advantages[papers] = value[:, None] * share
        return advantages.to(batch.rewards.dtype)

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        scores = self._scores(scored.batch)
        if not memory["quantiles"]:
            return {"quantiles": self._quantiles(scored.batch)}
        return {
            "quantiles": [
                quantile + self.rate * (level - float((scores < quantile).double().mean()))
                for quantile, level in zip(memory["quantiles"], (self.low, self.high), strict=True)
            ]
        }

    def _risk(self, scores: Tensor, at_low: float, at_high: float) -> Tensor:
        between = (scores - at_low).clamp(min=0) - (scores - at_high).clamp(min=0)
        below = -(at_low - scores).clamp(min=0)
        mixed = self.tail_weight * below / (self.low + _TINY) + between / (self.high - self.low + _TINY)
        return mixed / (self.tail_weight + 1)

    def _quantiles(self, batch: Batch) -> list[float]:
        known: list[float] = self.remembered(batch)["quantiles"]
        scores = self._scores(batch)
        return known or [float(scores.quantile(level)) for level in (self.low, self.high)]

    def _scores(self, batch: Batch) -> Tensor:
        return torch.cat([rewards.sum(dim=1) for _, rewards, _ in self._bundles(batch)])

    def _bundles(self, batch: Batch) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yields (rollout indices, rewards, leads over the group's mean) of every bundle, each [papers, groups]."""
        rewards = batch.rewards.to(torch.float64)
        groups = [(batch.group_index == group).nonzero()[:, 0] for group in batch.group_index.unique().tolist()]
        for start in range(0, len(groups), self.bundle):
            chosen = groups[start : start + self.bundle]
            papers = min(members.numel() for members in chosen)
            places = torch.stack([members[:papers] for members in chosen], dim=1)
            means = torch.stack([rewards[members].mean() for members in chosen])
            yield places, rewards[places], rewards[places] - means


RECIPE = Recipe(
    name="riskpo",
    title="RiskPO: Risk-based Policy Optimization via Verifiable Reward for LLM Post-Training",
    acronym="RiskPO",
    arxiv="2510.00911",
    verification="code",  # RTkenny/RiskPO `compute_grpo_bundle_rvar_outcome_advantage_quantile_tracking`
    advantage=BundleRisk(bundle=5, low=0.2, high=0.8, tail_weight=1.5, rate=0.1),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
