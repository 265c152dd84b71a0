"""RED-Weight: REINFORCE with an exponential of the advantage as a weight, so that the best rollouts dominate.

    token mean of -exp(A) A log pi; A the reward minus the group's mean

No ratio and no clip: the weight shapes the data, for off-policy rollouts whose failures should count less.
The related RED-Drop, which leaves out surplus failures at random, is not included.
"""

import torch

from swarm.objectives.part import Positive, Scored, TokenLosses, WeightPart, unbounded
from swarm.objectives.parts import GroupCentred, NoRatio, TokenMean
from swarm.objectives.recipe import Recipe


class ExponentialWeight(WeightPart):
    """REINFORCE with an additional weight exp(A / temperature): the best rollouts count most."""

    equation = "L_t = -exp(A / temperature) A log pi_t"
    temperature: Positive = 1.0

    def __call__(self, scored: Scored) -> TokenLosses:
        exponent = (scored.advantages / self.temperature).clamp(max=20.0)
        return unbounded(-torch.exp(exponent) * scored.advantages * scored.logprobs)


RECIPE = Recipe(
    name="red_weight",
    title="Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm: Demystifying Some Myths "
    "About GRPO and Its Friends",
    acronym="RED-Weight",
    arxiv="2509.24203",
    verification="code",  # Trinity-RFT `rec` with weight "advantage"
    advantage=GroupCentred(),
    ratio=NoRatio(),
    weight=ExponentialWeight(),
    aggregate=TokenMean(),
)
