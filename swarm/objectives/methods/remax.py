"""ReMax: REINFORCE whose baseline is the reward of the greedy response to the same prompt.

No critic and no group: one sampled and one greedy response are enough. The KL penalty in the reward is left
out, as in `grpo`.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from swarm.objectives.batch import Batch
from swarm.objectives.part import AdvantagePart, Requirement
from swarm.objectives.parts.aggregate import RolloutSum
from swarm.objectives.parts.likelihood import Likelihood
from swarm.objectives.parts.ratio import NoRatio
from swarm.objectives.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class GreedyBaseline(AdvantagePart):
    """Reward minus the reward of the greedy response to the same prompt.

    Source: ReMax, arXiv:2310.10505; verl `compute_remax_outcome_advantage`.
    """

    equation: ClassVar[str] = "A_i = R_i - R(greedy response)"

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.BASELINE_ROLLOUT, Requirement.ZERO_VARIANCE_GROUPS})

    def __call__(self, batch: Batch) -> Tensor:
        assert batch.baseline_rewards is not None, "the run does not supply baseline_rewards"
        return batch.rewards - batch.baseline_rewards.to(batch.rewards.dtype)[batch.group_index]


RECIPE = Recipe(
    name="remax",
    title="ReMax: A Simple, Effective, and Efficient Reinforcement Learning Method for Aligning Large Language Models",
    acronym="ReMax",
    arxiv="2310.10505",
    row="S107",
    verification="code",
    advantage=GreedyBaseline(),
    ratio=NoRatio(),
    weight=Likelihood(),
    aggregate=RolloutSum(),
)
