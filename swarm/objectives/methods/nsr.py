"""Negative only (NSR): only incorrect rollouts are learned from, each with advantage -1.

    mean of -min(r A, clip(r, .8, 1.2) A), A = -1, over the tokens of responses with R <= .5

Correct rollouts leave the batch, as in the released code: the token mean is over the tokens that are learned from.
Ours: a reward above 0.5 is correct.
"""

from dataclasses import replace

import torch
from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, NotNegative, Requirement
from swarm.objectives.parts import Clip, KeptTokenMean, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe


class SignWeights(AdvantagePart):
    """Fixed advantages: `positive` for correct rollouts, -`negative` for the others; a rollout with 0 is dropped."""

    equation = "A_i = positive if R_i > threshold else -negative; A_i = 0 drops out"
    always_needs = frozenset({Requirement.ZERO_VARIANCE_GROUPS})
    positive: NotNegative = 1.0
    negative: NotNegative = 1.0
    threshold: float = 0.5

    def __call__(self, batch: Batch) -> Tensor:
        right = torch.full_like(batch.rewards, self.positive or torch.nan)
        wrong = torch.full_like(batch.rewards, -self.negative or torch.nan)
        return torch.where(batch.rewards > self.threshold, right, wrong)


RECIPE = Recipe(
    name="nsr",
    title="The Surprising Effectiveness of Negative Reinforcement in LLM Reasoning",
    acronym="NSR",
    arxiv="2506.01347",
    verification="code",  # TianHongZXY/RLVR-Decomposed. The threshold is ours
    advantage=SignWeights(positive=0.0, negative=1.0),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=KeptTokenMean(),
)

PSR = replace(
    RECIPE,
    name="psr",
    acronym="PSR",
    about="Positive only (PSR): only correct rollouts are learned from, each with advantage 1; the rest leaves the "
    "batch. Ours: a reward above 0.5 is correct. Formula: mean of -min(r A, clip(r, .8, 1.2) A), A = 1, over "
    "the tokens of responses with R > .5.",
    advantage=SignWeights(positive=1.0, negative=0.0),
)

W_REINFORCE = replace(
    RECIPE,
    name="w_reinforce",
    acronym="W-REINFORCE",
    about="Weighted reinforce (W-REINFORCE): correct rollouts with advantage 0.1, incorrect ones with -1. Ours: a "
    "reward above 0.5 is correct. Formula: token mean of -min(r A, clip(r, .8, 1.2) A); A = 0.1 if R > .5 "
    "else -1.0.",
    advantage=SignWeights(positive=0.1, negative=1.0),
    aggregate=TokenMean(),
)
