"""Void turns (SimpleTIR): an episode with a turn that neither calls a tool nor answers is not learned from.

    z-score of the whole group; A dropped for episodes with a void turn; clip .2 / .28, token mean

Void turns have tokens of very low probability, which make the gradient explode after tool feedback. Dropped episodes
stay in the group's statistics. A void turn has no well-formed call and is not the last turn, or ends the episode
without an answer (malformed, or by the limit of turns). Ours: the clip.
"""

import torch
from torch import Tensor

from swarm.episode import TurnStatus
from swarm.objectives.part import AdvantagePart, Batch, Requirement
from swarm.objectives.parts import Clip, TokenMean, TokenRatio, group_scores, status_mask, turns_of
from swarm.objectives.recipe import Recipe


class WithoutVoidTurns(AdvantagePart):
    """Z-score of the reward in its group; an episode with a void turn is dropped.

    Source: SimpleTIR, arXiv:2509.02479; ltzheng/SimpleTIR `agent_utils.py`.
    """

    equation = "A_i = z_i if every turn of i calls a tool or answers, else dropped"
    always_needs = frozenset({Requirement.TURNS, Requirement.TOOL_CALLS})
    floor: float = 1e-6

    def __call__(self, batch: Batch) -> Tensor:
        turns = turns_of(batch)
        is_answer = turns.is_last & ~status_mask(batch, TurnStatus.MALFORMED, TurnStatus.LIMIT)
        is_void = (turns.exists & (turns.calls == 0) & ~is_answer).any(dim=1)
        scores = group_scores(batch.rewards, batch.group_index, self.floor)
        return torch.where(is_void, torch.full_like(scores, torch.nan), scores)


RECIPE = Recipe(
    name="simpletir",
    title="SimpleTIR: End-to-End Reinforcement Learning for Multi-Turn Tool-Integrated Reasoning",
    acronym="SimpleTIR",
    arxiv="2509.02479",
    verification="code",
    advantage=WithoutVoidTurns(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.28),
    aggregate=TokenMean(),
)
