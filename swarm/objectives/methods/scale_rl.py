"""ScaleRL's loss: truncated constant ratios, rewards in deviations of the whole step, equal weight of every prompt.

    (1/M) sum_g sum_t -sg[min(r, 5)] A log pi / tokens of g, A = (R - mean_G) / std of the step

The parts of the recipe that are not an objective (an asynchronous pipeline, float32 logits, dropping groups
without signal, retiring solved prompts) belong to the run. Cap 5 of the ratio itself, as in TRL.

Mechanism: scaled prompt mean.
"""

from torch import Tensor

from swarm.objectives.part import AggregatePart, Scope, Scored
from swarm.objectives.parts import BatchDeviation, DetachedClip, TokenRatio, group_sum
from swarm.objectives.recipe import Recipe


class GroupMean(AggregatePart):
    """Mean over groups of the mean over all tokens of a group."""

    equation = "L = (1/M) sum_g sum_{i in g} sum_t L_t / sum_{i in g} |o_i|"
    scope = Scope.GROUP

    def __call__(self, losses: Tensor, scored: Scored) -> Tensor:
        batch = scored.batch
        tokens = group_sum(batch.length, batch.group_index).clamp(min=1).to(losses.dtype)
        return (losses.sum(dim=1) / tokens).sum() / max(1, batch.step_groups)


RECIPE = Recipe(
    name="scale_rl",
    title="The Art of Scaling Reinforcement Learning Compute for LLMs",
    acronym="ScaleRL",
    arxiv="2510.13786",
    verification="code",  # prompt-level averaging; the group's own mean is that of arXiv:2506.13585
    advantage=BatchDeviation(),
    ratio=TokenRatio(),
    weight=DetachedClip(low=1.0, high=4.0),
    aggregate=GroupMean(),
)
