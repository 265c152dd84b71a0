"""Over-turn masking (Mini-o3): an episode that ran out of turns or tokens is neither punished nor counted.

    A = z over the whole group; (1/M) sum_G 1/n_G sum over its n_G finished episodes of the mean of -min(r A, clip A)

The result of such an episode is unknown; counted as a failure it would teach short episodes. Its reward stays in the
group's statistics. Ours: the clip.
"""

from torch import Tensor

from swarm.objectives.part import AggregatePart, Scope, Scored
from swarm.objectives.parts import Clip, FinishedEpisodes, TokenRatio, group_sum, is_finished
from swarm.objectives.recipe import Recipe


class FinishedMean(AggregatePart):
    """Mean over groups of the mean over finished episodes of the mean over their tokens."""

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
    verification="secondary",
    advantage=FinishedEpisodes(),
    ratio=TokenRatio(),
    weight=Clip(low=0.2, high=0.2),
    aggregate=FinishedMean(),
)
