"""Decay and repetition (UFO): the reward halves with every further try, and repeated answers are penalised.

    R <- R .5^(T-1) - .5 (1 - distinct / T), T readable tries; z-score, clip .2 / .28, token mean

Its environment is a retry that only says that an answer was wrong (kind `retry`, whose own discount is then 1). Tries
are compared without white space and case. Ours: a group z-score in place of the critic, as in `grpo`.
"""

import torch
from torch import Tensor

from swarm.episode import TurnStatus
from swarm.objectives.part import Batch, NotNegative, PositiveShare, Requirement, RewardPart
from swarm.objectives.parts import Clip, GroupZScore, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe


class TryDecay(RewardPart):
    """Reward that decays with the number of tries, minus a penalty for repeated tries.

    Source: UFO, arXiv:2507.14295; lichengliu03/unary-feedback `ragen/env/metamathqa/env.py`.
    """

    equation = "R <- R decay^(T-1) - strength (1 - E/T), T tries that are not malformed, E distinct ones"
    always_needs = frozenset({Requirement.TURNS})
    decay: PositiveShare = 0.5
    strength: NotNegative = 0.5

    def __call__(self, batch: Batch) -> Tensor:
        rewards = batch.rewards.to(torch.float64).tolist()
        if batch.actions is None or batch.turn_statuses is None:
            return batch.rewards
        for row, (actions, statuses) in enumerate(zip(batch.actions, batch.turn_statuses, strict=True)):
            pairs = zip(actions, statuses, strict=True)
            tries = ["".join(text.lower().split()) for text, status in pairs if status is not TurnStatus.MALFORMED]
            if tries:
                repeated = 1 - len(set(tries)) / len(tries)
                rewards[row] = rewards[row] * self.decay ** (len(tries) - 1) - self.strength * repeated
        return torch.tensor(rewards, dtype=batch.rewards.dtype, device=batch.rewards.device)


RECIPE = Recipe(
    name="ufo",
    title='A Simple "Try Again" Can Elicit Multi-Turn LLM Reasoning',
    acronym="UFO",
    arxiv="2507.14295",
    verification="code",
    rewards=(TryDecay(),),
    advantage=GroupZScore(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.28),
    aggregate=TokenMean(),
)
