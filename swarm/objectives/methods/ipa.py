"""Interaction chunks (IPA): outcomes discounted by turns, likelihood for successes, a tapered turn ratio for failures.

    G_k = .95^(K-k) R; -G_k log pi for G > 0, else -min(u_k, 1) G_k log pi; turns with u_k > 5 dropped; token mean

A chunk is a turn. Known from a report that quotes the paper's eq. 7 to 9. A failure is worth 0 by default, so that only
successes teach; with `failure` below 0, failures are pushed down. Ours: a reward above .5 is a success; the mean over
tokens.
"""

import torch
from torch import Tensor

from swarm.objectives.part import (
    AdvantagePart,
    Batch,
    CorrectionPart,
    PositiveShare,
    Requirement,
    Scope,
    Scored,
    TokenLosses,
    WeightPart,
)
from swarm.objectives.parts import TokenMean, TurnRatio, discounted_returns, on_turn_tokens, turns_of
from swarm.objectives.parts.likelihood import weighted_likelihood
from swarm.objectives.parts.mismatch_correction import RatioAtMost
from swarm.objectives.recipe import Recipe


class ChunkReturn(AdvantagePart):
    """The outcome, discounted by the number of later turns; no baseline.

    Source: ROME, arXiv:2512.24873 eq. 7.
    """

    equation = "A_k = gamma^(K-k) (R if R > correct else failure)"
    always_needs = frozenset({Requirement.TURNS})
    gamma: PositiveShare = 0.95
    correct: float = 0.5  # a success has a higher reward
    failure: float = 0.0  # worth of any other rollout

    def __call__(self, batch: Batch) -> Tensor:
        rewards = batch.rewards.to(torch.float64)
        outcome = torch.where(rewards > self.correct, rewards, self.failure)
        turns = turns_of(batch)
        returns = discounted_returns(torch.where(turns.is_last, outcome[:, None], 0.0), self.gamma)
        return on_turn_tokens(returns, batch).to(batch.rewards.dtype)


class TaperedChunk(WeightPart):
    """Log-likelihood for tokens with A > 0; other tokens are weighted by the recipe's ratio, at most `high`.

    Source: ROME, arXiv:2512.24873 eq. 9.
    """

    equation = "L_t = -A log pi_t if A > 0 else -sg[min(r, high)] A log pi_t"
    scope = Scope.ROLLOUT
    high: float = 1.0

    def __call__(self, scored: Scored) -> TokenLosses:
        is_positive = scored.advantages > 0
        log_weight = torch.where(is_positive, torch.zeros_like(scored.log_ratio), scored.log_ratio)
        return weighted_likelihood(scored, log_weight, 0.0, torch.where(is_positive, 1.0, self.high))


class ChunkMask(CorrectionPart):
    """Drops tokens whose ratio exceeds a bound: with a turn ratio, whole turns far likelier than at the generator.

    Source: ROME, arXiv:2512.24873 eq. 8.
    """

    equation = "L_t <- 1[r <= high] L_t"
    scope = Scope.ROLLOUT
    high: RatioAtMost = 5.0

    def __call__(self, scored: Scored) -> Tensor:
        return (torch.exp(scored.log_ratio) <= self.high).to(scored.advantages.dtype)


RECIPE = Recipe(
    name="ipa",
    title="Let It Flow: Agentic Crafting on Rock and Roll, Building the ROME Model within an Open Agentic Learning "
    "Ecosystem",
    acronym="IPA",
    arxiv="2512.24873",
    verification="secondary",
    advantage=ChunkReturn(),
    ratio=TurnRatio(),
    weight=TaperedChunk(),
    corrections=(ChunkMask(),),
    aggregate=TokenMean(),
)
