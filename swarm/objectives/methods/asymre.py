"""AsymRE: plain REINFORCE with a baseline below the group's mean, so that successes weigh more than failures.

No ratio and no clip. Groups of equal rewards keep a small positive advantage, as the formula has it.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from swarm.objectives.batch import Batch
from swarm.objectives.part import AdvantagePart, Requirement
from swarm.objectives.parts.aggregate import TokenMean
from swarm.objectives.parts.group_statistics import group_statistics, where_signal
from swarm.objectives.parts.likelihood import Likelihood
from swarm.objectives.parts.ratio import NoRatio
from swarm.objectives.recipe import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class ShiftedMean(AdvantagePart):
    """Reward minus a shifted group mean; below the mean, successes weigh more than failures.

    Source: AsymRE, arXiv:2506.20520; Trinity-RFT `asymre`.
    """

    equation: ClassVar[str] = "A_i = R_i - (mean_G + shift)"
    shift: float = -0.1

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.ZERO_VARIANCE_GROUPS})

    def __call__(self, batch: Batch) -> Tensor:
        group = group_statistics(batch.rewards, batch.group_index)
        centred = where_signal(batch.rewards.to(group.mean.dtype) - group.mean, group, group.mean)
        return (centred - self.shift).to(batch.rewards.dtype)


RECIPE = Recipe(
    name="asymre",
    title="Asymmetric REINFORCE for off-Policy Reinforcement Learning: Balancing positive and negative rewards",
    acronym="AsymRE",
    arxiv="2506.20520",
    row="S159",
    verification="code",
    advantage=ShiftedMean(shift=-0.1),
    ratio=NoRatio(),
    weight=Likelihood(),
    aggregate=TokenMean(),
)
