"""Information gain (IGPO): a turn earns the rise of the right answer's probability, the last turn earns the outcome.

    r_k = P_{k+1} - P_k, r_K = R; A_k = sum_{j>=k} (r_j - mean_G) / (std_G + floor), over all turns of a group

P_k is exp of the mean log-prob of the reference answer before turn k, under the policy. Groups of equal outcomes also
teach. As released: gains and outcomes share mean and (biased) deviation, and then returns are formed. Ours: the answer
is appended as an action, without a sentence before it; a turn that gained exactly 0 counts; no KL penalty, as in
`grpo`.
"""

import torch
from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, PositiveShare, Requirement
from swarm.objectives.parts import (
    Clip,
    TokenMean,
    TokenRatio,
    discounted_returns,
    group_statistics,
    information_gains,
    on_turn_tokens,
    turns_of,
)
from swarm.objectives.recipe import Recipe


class InformationGain(AdvantagePart):
    """Return of a turn: the discounted sum of z-scores, over the group, of gains and outcome from the turn on.

    Source: IGPO, arXiv:2510.14967; GuoqingWang1/IGPO `compute_grpo_outcome_advantage` (joint).
    """

    equation = "A_k = sum_{j>=k} gamma^(j-k) (r_j - mean_G r) / (std_G r + floor), r_j = P_{j+1} - P_j, r_K = R"
    always_needs = frozenset({Requirement.TURNS, Requirement.ANSWER_PROBS, Requirement.ZERO_VARIANCE_GROUPS})
    gamma: PositiveShare = 1.0
    floor: float = 1e-6

    def __call__(self, batch: Batch) -> Tensor:
        turns = turns_of(batch)
        outcome = torch.where(turns.is_last, batch.rewards.to(torch.float64)[:, None], 0.0)
        rewards = information_gains(batch) + outcome
        cells = batch.group_index[:, None].expand(rewards.shape)[turns.exists]
        group = group_statistics(rewards[turns.exists], cells)
        biased = torch.sqrt(group.std**2 * (group.count - 1) / group.count + 1e-8)
        std = torch.where(group.count > 1, biased, 1.0)
        scores = torch.zeros_like(rewards)
        scores[turns.exists] = (rewards[turns.exists] - group.mean) / (std + self.floor)
        return on_turn_tokens(discounted_returns(scores, self.gamma), batch).to(batch.rewards.dtype)


RECIPE = Recipe(
    name="igpo",
    title="Information Gain-based Policy Optimization: A Simple and Effective Approach for Multi-Turn LLM Agents",
    acronym="IGPO",
    arxiv="2510.14967",
    verification="code",
    advantage=InformationGain(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
)
