"""Self-correction (SCoRe): two answers to one question, with a bonus for the second answer's improvement.

    G_1 = r_1 + r_2, G_2 = r_2 + 10 (r_2 - r_1), A_k = G_k - mean_G G_k; + .01 k2 to the initial policy on all tokens

Stage one, `score_stage_one`, is a separate, earlier run: G_1 = G_2 = r_2, and .1 k2 holds the first answers near the
initial policy, so that the two answers do not become the same. The second run begins with the weights of the first
(`model.source`). The environment asks twice, whatever the first answer was (kind `retry`, `ask = "always"`). Known from
public descriptions of the paper, which name the parts but not their sizes. Ours: the bonus applies to the second answer
alone (on the first answer it would penalise being right), all three strengths, the group's mean as baseline, the clip,
and means over tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, NotNegative, Requirement, Scope, Scored, Share, TermPart
from swarm.objectives.parts import (
    Clip,
    KlPenalty,
    TokenMean,
    TokenRatio,
    by_cell,
    group_centred,
    on_turn_tokens,
    turn_cells,
    turns_of,
)
from swarm.objectives.parts.kl import difference, estimate, step_mean
from swarm.objectives.recipe import Recipe

FIRST = "first_try"
"""Name of the reward of the first answer."""


class AttemptReturn(AdvantagePart):
    """Return of an answer minus the group's mean; from the second answer on, with a bonus for the rise over the first.

    Source: SCoRe, arXiv:2409.12917.
    """

    equation = "A_k = G_k - mean_{G,k} G_k, G_1 = first r_1 + r_2, G_k = r_2 + bonus (r_2 - r_1)"
    always_needs = frozenset({Requirement.TURNS, Requirement.REWARD_PARTS, Requirement.ZERO_VARIANCE_GROUPS})
    first: Share = 1.0  # of the first answer's reward
    bonus: NotNegative = 10.0

    def __call__(self, batch: Batch) -> Tensor:
        turns, last = turns_of(batch), batch.rewards.to(torch.float64)
        begun = batch.reward_parts[FIRST].to(torch.float64) if FIRST in batch.reward_parts else last
        returns = (last + self.bonus * (last - begun))[:, None].repeat(1, turns.exists.shape[1])
        returns[:, 0] = last + self.first * begun
        centred = by_cell(returns, turn_cells(batch, turns), turns, group_centred)
        return on_turn_tokens(centred, batch).to(batch.rewards.dtype)


class FirstAttemptKl(TermPart):
    """KL penalty that holds the first answers near the initial policy. Source: SCoRe, arXiv:2409.12917, stage I."""

    equation = "L += strength mean_t 1[t in turn 1] k2(log pi_t - log pi_ref_t)"
    always_needs = frozenset({Requirement.TURNS, Requirement.REFERENCE_LOGPROBS})
    scope = Scope.ROLLOUT
    strength: NotNegative = 0.1

    def __call__(self, scored: Scored) -> Tensor:
        penalty = estimate(difference(scored, "reference"), "k2")
        return self.strength * step_mean(torch.where(scored.batch.turn_ids == 0, penalty, 0.0), scored, "token")


RECIPE = Recipe(
    name="score",
    title="Training Language Models to Self-Correct via Reinforcement Learning",
    acronym="SCoRe",
    arxiv="2409.12917",
    verification="secondary",
    advantage=AttemptReturn(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=TokenMean(),
    terms=(KlPenalty(strength=0.01, estimator="k2", to="reference", mean="token"),),
)

SCORE_STAGE_ONE = replace(
    RECIPE,
    name="score_stage_one",
    acronym="SCoRe (stage I)",
    about="Second answers first (SCoRe, stage I): only the second answer is paid, and the first one is held near the "
    "initial policy, so that the two do not become one. Formula: G_1 = G_2 = r_2, A_k = G_k - mean_G G_k; + .1 k2 to "
    "the initial policy on the tokens of the first answer.",
    advantage=AttemptReturn(first=0.0, bonus=0.0),
    terms=(FirstAttemptKl(strength=0.1),),
)
