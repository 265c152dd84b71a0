"""RED-Weight: REINFORCE whose rollouts count by an exponential of their advantage, so that the best lead.

    token mean of -exp(A) A log pi; A the reward minus the group's mean

No ratio and no clip: the weight shapes the data, for off-policy rollouts where failures should count less.
Its sibling RED-Drop, which leaves out surplus failures at random, is not here.

Mechanism: exponential weight.
"""

import torch

from swarm.errors import ConfigError
from swarm.objectives.part import Scored, TokenLosses, WeightPart
from swarm.objectives.parts import GroupCentred, NoRatio, TokenMean
from swarm.objectives.recipe import Recipe


class ExponentialWeight(WeightPart):
    """REINFORCE with an exponential of the advantage as a further weight: the best rollouts count most.

    Source: RED-Weight, arXiv:2509.24203; Trinity-RFT `rec` with weight "advantage".
    """

    equation = "L_t = -exp(A / temperature) A log pi_t"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(f"temperature {self.temperature} must be positive")

    def __call__(self, scored: Scored) -> TokenLosses:
        exponent = (scored.advantages / self.temperature).clamp(max=20.0)
        losses = -torch.exp(exponent) * scored.advantages * scored.logprobs
        return TokenLosses(losses=losses, bounded=torch.zeros_like(scored.mask))


RECIPE = Recipe(
    name="red_weight",
    title="Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm: Demystifying Some Myths "
    "About GRPO and Its Friends",
    acronym="RED-Weight",
    arxiv="2509.24203",
    row="S159",
    verification="code",
    advantage=GroupCentred(),
    ratio=NoRatio(),
    weight=ExponentialWeight(),
    aggregate=TokenMean(),
)
