"""DCPO (dynamic clipping): the rarer a token was, the wider its clip bounds; advantages remember past visits.

    sum_i (1/|o_i|) sum_t of dual-clipped PPO, bounds by mu(token), smoothed advantage

The token means of the rollouts are added up and not divided by the number of rollouts, as in the released code:
gradient norms grow with the rollouts of a step (11 to 22 times PPO's with 30 rollouts), so `learner.max_grad_norm` sets
the length of every step, and the learning rate must be chosen for that. The half-widths are the paper's. Not the DCPO
that steers entropy.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated

import torch
from torch import Tensor

from swarm.objectives.part import (
    AdvantagePart,
    AggregatePart,
    Batch,
    Bound,
    Memory,
    NotNegative,
    Requirement,
    Scope,
    Scored,
    TokenLosses,
    WeightPart,
)
from swarm.objectives.parts import TokenRatio, clip_surrogate, own_rewards, renewed
from swarm.objectives.recipe import Recipe

Record = list[float]
"""[visits, rewards, their mean, sum of squared deviations]."""


def _merged(record: Record, rewards: Tensor) -> Record:
    """Returns the record after one more visit with these rewards."""
    visits, count, mean, squares = record
    new_count, new_mean = rewards.numel(), float(rewards.mean())
    new_squares = float(((rewards - new_mean) ** 2).sum())
    total = count + new_count
    shift = new_mean - mean
    squares = squares + new_squares + shift**2 * count * new_count / total
    return [visits + 1, total, mean + shift * new_count / total, squares]


def _scores(rewards: Tensor, mean: float, count: float, squares: float) -> Tensor:
    deviation = (squares / (count - 1)) ** 0.5 if count > 1 else 0.0
    return (rewards - mean) / deviation if deviation > 0 else torch.zeros_like(rewards)


class CumulativeScore(AdvantagePart):
    """Two mixtures of this visit's z-score and the z-score among all rewards of the prompt: the one smaller in size.

    At visit i one mixture weighs the two scores by (i-1)/i and 1/i, the other by 1/i and (i-1)/i. A prompt whose
    rewards are all equal at this visit still gets advantages from its earlier rewards. Mean and deviation are those of
    all rewards of the prompt so far, this visit included.

    Source: DCPO, arXiv:2509.02333; lime-RL/DCPO `compute_dcpo_outcome_advantage`.
    """

    equation = "A = the smaller of (i-1)/i z_now + (1/i) z_all and (1/i) z_now + (i-1)/i z_all, i visits"
    always_needs = frozenset({Requirement.REPEATED_PROMPTS, Requirement.ZERO_VARIANCE_GROUPS})

    def initial(self) -> Memory:
        return {"prompts": {}}

    def __call__(self, batch: Batch) -> Tensor:
        advantages = torch.zeros(batch.num_rollouts, dtype=torch.float64, device=batch.mask.device)
        for members, rewards, before in _visits(batch, self.remembered(batch)["prompts"]):
            visits, count, mean, squares = _merged(before, rewards)
            _, own_count, own_mean, own_squares = _merged([0.0, 0.0, 0.0, 0.0], rewards)
            is_flat = float(rewards.max()) == float(rewards.min())
            now = torch.zeros_like(rewards) if is_flat else _scores(rewards, own_mean, own_count, own_squares)
            everything = now if visits == 1 else _scores(rewards, mean, count, squares)
            mostly_now = (visits - 1) / visits * now + everything / visits
            mostly_all = now / visits + (visits - 1) / visits * everything
            advantages[members] = torch.where(mostly_now.abs() < mostly_all.abs(), mostly_now, mostly_all)
        return advantages.to(batch.rewards.dtype)

    def observe(self, memory: Memory, scored: Scored) -> Memory:
        records: dict[str, Record] = {}
        known: Mapping[str, Record] = memory["prompts"]
        for index, key in enumerate(scored.batch.task_keys):
            rewards = own_rewards(scored.batch, index).to(torch.float64)
            if rewards.numel():
                records[key] = _merged(records.get(key, known.get(key, [0.0, 0.0, 0.0, 0.0])), rewards)
        return {"prompts": renewed(known, records)}


def _visits(batch: Batch, known: Mapping[str, Record]) -> Iterator[tuple[Tensor, Tensor, Record]]:
    """Yields (rollout indices, rewards in float64, record of the prompt before this visit) of every group."""
    for index, key in enumerate(batch.task_keys):
        members = (batch.group_index == index).nonzero()[:, 0]
        if members.numel():
            yield members, batch.rewards[members].to(torch.float64), known.get(key, [0.0, 0.0, 0.0, 0.0])


class RolloutMeanSum(AggregatePart):
    """Token means of the rollouts, added up and not divided by their number.

    Source: DCPO's only-token-mean loss, arXiv:2509.02333; lime-RL/DCPO.
    """

    equation = "L = sum_i (1/|o_i|) sum_t L_t"
    scope = Scope.ROLLOUT

    def __call__(self, losses: Tensor, scored: Scored) -> Tensor:
        return (losses.sum(dim=1) / scored.mask.sum(dim=1).clamp(min=1)).sum()


class ProbabilityClip(WeightPart):
    """A clip with wider bounds for tokens that were rarer when sampled. The recipe's ratio must be to the generator.

    Source: DCPO (dynamic clipping), arXiv:2509.02333; lime-RL/DCPO `get_clip_low_high`.
    """

    equation = (
        "L_t = min(-min(r A, clip(r, lo, hi) A), -ceiling A if A < 0), mu = mu(token): "
        "lo = (1 + sqrt(max(1 - 4 low/mu, 0)))/2, hi = min((1 + sqrt(1 + 4 high/mu))/2, ceiling)"
    )
    always_needs = frozenset({Requirement.BEHAVIOR_LOGPROBS})
    low: NotNegative = 0.16
    high: NotNegative = 0.2
    ceiling: Annotated[float, Bound(above=1)] = 10.0  # of the ratio; also the dual clip

    def __call__(self, scored: Scored) -> TokenLosses:
        rarity = torch.exp(-scored.behavior)
        lowest = (1 + (1 - 4 * self.low * rarity).clamp(min=0).sqrt()) / 2
        highest = ((1 + (1 + 4 * self.high * rarity).sqrt()) / 2).clamp(max=self.ceiling)
        return clip_surrogate(scored.log_ratio, scored.advantages, lowest, highest, self.ceiling)


RECIPE = Recipe(
    name="dcpo",
    title="DCPO: Dynamic Clipping Policy Optimization",
    acronym="DCPO (dynamic clipping)",
    arxiv="2509.02333",
    verification="code",
    advantage=CumulativeScore(),
    ratio=TokenRatio(),
    weight=ProbabilityClip(),
    aggregate=RolloutMeanSum(),
)
