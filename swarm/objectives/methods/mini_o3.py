"""Over-turn masking (Mini-o3): an episode that ran out of turns or tokens is neither punished nor counted.

    A = z over the whole group; (1/M) sum_G 1/n_G sum over its n_G finished episodes of the mean of -min(r A, clip A)

Whether it was right is unknown; as a failure it would teach short episodes. Its reward 0 stays in the statistics.
Ours: the clip around it.
"""

import torch
from torch import Tensor

from swarm.episode import TurnStatus
from swarm.objectives.part import AdvantagePart, AggregatePart, Batch, Requirement, Scope, Scored
from swarm.objectives.parts import Clip, TokenRatio, group_scores, group_sum, status_mask
from swarm.objectives.recipe import Recipe


def is_finished(batch: Batch) -> Tensor:
    """bool [N]: episodes that neither the limit of turns nor that of tokens ended."""
    return ~status_mask(batch, TurnStatus.LIMIT).any(dim=1) & ~batch.is_truncated


class FinishedEpisodes(AdvantagePart):
    """Z-score; dropped for an episode that a limit ended.

    Source: Mini-o3, arXiv:2509.07969 section 3.4, as a note on it quotes.
    """

    equation = "A_i = z_i if i ended by itself, else dropped"
    always_needs = frozenset({Requirement.TURNS})
    floor: float = 1e-6

    def __call__(self, batch: Batch) -> Tensor:
        scores = group_scores(batch.rewards, batch.group_index, self.floor)
        return torch.where(is_finished(batch), scores, torch.full_like(scores, torch.nan))


class FinishedMean(AggregatePart):
    """Every group counts the same, and in it every finished episode; their tokens are averaged."""

    equation = "L = (1/M) sum_G (1/n_G) sum_{i finished} (1/|o_i|) sum_t L_t"
    scope = Scope.GROUP

    def __call__(self, losses: Tensor, scored: Scored) -> Tensor:
        batch = scored.batch
        per_rollout = losses.sum(dim=1) / scored.mask.sum(dim=1).clamp(min=1)
        num_finished = group_sum(is_finished(batch), batch.group_index).clamp(min=1)
        return (per_rollout / num_finished.to(losses.dtype)).sum() / max(1, batch.step_groups)


RECIPE = Recipe(
    name="mini_o3",
    title="Mini-o3: Scaling Up Reasoning Patterns and Interaction Turns for Visual Search",
    acronym="Mini-o3",
    arxiv="2509.07969",
    row="S191",
    verification="secondary",
    advantage=FinishedEpisodes(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=FinishedMean(),
)
