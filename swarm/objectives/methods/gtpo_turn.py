"""Returns of turns (GTPO, group turn): a failure earns by similarity to successes, slips cost, returns are discounted.

    r_k = R 1[k last] - .1 1[slip at k]; A_k = z over all turns of the group of sum_{j>=k} .9^(j-k) r_j; clip .2 / .28
    R of a failure: .5 mean over the group's successes s of sim(c_i, c_s), c the texts of all turns, joined

A slip is a turn whose call cannot be parsed, or a first turn that calls nothing. Known from public code that quotes
sections 3.3 and 3.4 of the paper. Ours: sim is the cosine of counts of character trigrams (in the paper, of an
embedding of the code); c is the text of the turns; a group without a success keeps its rewards; unbiased deviation.
Clip and token mean are those of that code.
"""

from collections import Counter, defaultdict
from math import sqrt

import torch
from torch import Tensor

from swarm.episode import Actions, TurnStatus
from swarm.objectives.part import AdvantagePart, Batch, NotNegative, PositiveShare, Requirement, RewardPart, Share
from swarm.objectives.parts import (
    Clip,
    TokenMean,
    TokenRatio,
    by_cell,
    discounted_returns,
    group_scores,
    on_turn_tokens,
    status_mask,
    turns_of,
)
from swarm.objectives.recipe import Recipe


def written(actions: Actions) -> dict[str, float]:
    """Counts of character trigrams in the texts of the turns, scaled to Euclidean length 1."""
    text = "\n".join(("", *actions, ""))
    counts = Counter(text[place : place + 3] for place in range(len(text) - 2))
    length = sqrt(sum(count * count for count in counts.values()))
    return {key: count / length for key, count in counts.items()}


class LikeSuccess(RewardPart):
    """Replaces the reward of a failure by the similarity of its text to the successes of its group.

    Source: GTPO, arXiv:2511.14846 section 3.4, as quoted in public code.
    """

    equation = "R <- most mean_{success s of G} sim(c_i, c_s) for failures"
    always_needs = frozenset({Requirement.TURNS})
    most: Share = 0.5  # of a failure
    correct: float = 0.5  # a success has a higher reward

    def __call__(self, batch: Batch) -> Tensor:
        if batch.actions is None:
            return batch.rewards
        rewards, vectors = batch.rewards.clone(), [written(actions) for actions in batch.actions]
        is_success = batch.rewards > self.correct
        for group in batch.group_index.unique().tolist():
            own = batch.group_index == group
            won, lost = ((own & which).nonzero().flatten().tolist() for which in (is_success, ~is_success))
            usual = defaultdict[str, float](float)  # mean of the successes: products with it are means of cosines
            for row in won:
                for key, value in vectors[row].items():
                    usual[key] += value / len(won)
            for row in lost if won else ():
                rewards[row] = self.most * sum(value * usual.get(key, 0.0) for key, value in vectors[row].items())
        return rewards


class TurnReturns(AdvantagePart):
    """Discounted reward from the turn on (outcome minus penalties for slips), as a z-score over the group's turns.

    Source: GTPO, arXiv:2511.14846 sections 3.2 and 3.3, as quoted in public code.
    """

    equation = "A_k = z_G(sum_{j>=k} gamma^(j-k) (R 1[j last] - slip 1[j malformed, or first without a call]))"
    always_needs = frozenset({Requirement.TURNS, Requirement.TOOL_CALLS, Requirement.ZERO_VARIANCE_GROUPS})
    gamma: PositiveShare = 0.9
    slip: NotNegative = 0.1
    floor: float = 1e-6

    def __call__(self, batch: Batch) -> Tensor:
        turns = turns_of(batch)
        is_slip = status_mask(batch, TurnStatus.MALFORMED)
        is_slip[:, 0] |= turns.calls[:, 0] == 0
        outcome = torch.where(turns.is_last, batch.rewards.to(torch.float64)[:, None], 0.0)
        returns = discounted_returns(outcome - self.slip * is_slip.to(outcome.dtype), self.gamma)
        groups = batch.group_index[:, None].expand(returns.shape)
        scores = by_cell(returns, groups, turns, lambda values, own: group_scores(values, own, self.floor))
        return on_turn_tokens(scores, batch).to(batch.rewards.dtype)


RECIPE = Recipe(
    name="gtpo_turn",
    title="Empowering Multi-Turn Tool-Integrated Reasoning with Group Turn Policy Optimization",
    acronym="GTPO (group turn)",
    arxiv="2511.14846",
    verification="secondary",
    rewards=(LikeSuccess(),),
    advantage=TurnReturns(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.28),
    aggregate=TokenMean(),
)
