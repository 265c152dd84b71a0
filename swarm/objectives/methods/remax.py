"""Greedy baseline (ReMax): REINFORCE whose baseline is the reward of the greedy response to the same prompt.

    A = R - R(greedy response); (1/N) sum_i sum_t -A log pi

No critic and no group: one sampled and one greedy response are enough. The KL penalty in the reward is left
out, as in `grpo`.
"""

from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, Requirement
from swarm.objectives.parts import Likelihood, NoRatio, RolloutSum
from swarm.objectives.recipe import Recipe


class GreedyBaseline(AdvantagePart):
    """Reward minus the reward of the greedy response to the same prompt."""

    equation = "A_i = R_i - R(greedy response)"
    always_needs = frozenset({Requirement.BASELINE_ROLLOUT, Requirement.ZERO_VARIANCE_GROUPS})

    def __call__(self, batch: Batch) -> Tensor:
        assert batch.baseline_rewards is not None, "the run does not supply baseline_rewards"
        return batch.rewards - batch.baseline_rewards.to(batch.rewards.dtype)[batch.group_index]


RECIPE = Recipe(
    name="remax",
    title="ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language Models",
    acronym="ReMax",
    arxiv="2310.10505",
    verification="code",  # verl `compute_remax_outcome_advantage`
    advantage=GreedyBaseline(),
    ratio=NoRatio(),
    weight=Likelihood(),
    aggregate=RolloutSum(),
)
