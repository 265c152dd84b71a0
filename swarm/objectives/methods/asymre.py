"""AsymRE: plain REINFORCE with a baseline below the group's mean, so that successes weigh more than failures.

    token mean of -(R - (mean_G - .1)) log pi

No ratio and no clip. Groups of equal rewards keep a small positive advantage, as the formula has it.

Mechanism: shifted baseline.
"""

from torch import Tensor

from swarm.objectives.part import AdvantagePart, Batch, Requirement
from swarm.objectives.parts import Likelihood, NoRatio, TokenMean, group_centred
from swarm.objectives.recipe import Recipe


class ShiftedMean(AdvantagePart):
    """Reward minus a shifted group mean; with a negative shift, successes weigh more than failures."""

    equation = "A_i = R_i - (mean_G + shift)"
    always_needs = frozenset({Requirement.ZERO_VARIANCE_GROUPS})
    shift: float = -0.1

    def __call__(self, batch: Batch) -> Tensor:
        return (group_centred(batch.rewards.double(), batch.group_index) - self.shift).to(batch.rewards.dtype)


RECIPE = Recipe(
    name="asymre",
    title="Asymmetric REINFORCE for off-Policy Reinforcement Learning: Balancing positive and negative rewards",
    acronym="AsymRE",
    arxiv="2506.20520",
    verification="code",  # Trinity-RFT `asymre`
    advantage=ShiftedMean(shift=-0.1),
    ratio=NoRatio(),
    weight=Likelihood(),
    aggregate=TokenMean(),
)
