"""REC, one-sided: REINFORCE on tokens whose ratio is not yet beyond a bound in the direction of the advantage.

    token mean of -M A log pi, M = r <= 1.2 for A >= 0, r >= .8 for A <= 0; A group-centred

No importance weight: the ratio only selects the tokens that count. According to the paper, this selection, not a
weight, keeps learning from stale rollouts stable.
"""

from dataclasses import replace

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.objectives.part import Scored, TokenLosses, WeightPart
from swarm.objectives.parts import GroupCentred, TokenMean, TokenRatio
from swarm.objectives.recipe import Recipe


class OneSidedGate(WeightPart):
    """REINFORCE on tokens whose ratio is not beyond a bound in the direction of the advantage."""

    equation = "L_t = -M A log pi_t, M = 1[A >= 0, r <= 1+high] or 1[A <= 0, r >= 1-low]"
    low: float = 0.2  # half-width
    high: float = 0.2  # half-width

    def __call__(self, scored: Scored) -> TokenLosses:
        ratio, advantages = torch.exp(scored.log_ratio.detach()), scored.advantages
        rises = (advantages >= 0) & (ratio <= 1 + self.high)
        falls = (advantages <= 0) & (ratio >= 1 - self.low)
        return _gated(scored, rises | falls)


class TwoSidedGate(WeightPart):
    """REINFORCE on tokens whose ratio lies within two bounds."""

    equation = "L_t = -1[1-low <= r <= 1+high] A log pi_t"
    low: float = 0.2  # half-width
    high: float = 0.2  # half-width

    def __call__(self, scored: Scored) -> TokenLosses:
        ratio = torch.exp(scored.log_ratio.detach())
        return _gated(scored, (ratio >= 1 - self.low) & (ratio <= 1 + self.high))


class RingGate(WeightPart):
    """REINFORCE on tokens whose ratio is within two bounds, or far outside on the side opposite to the advantage."""

    equation = (
        "L_t = -M A log pi_t, M = 1[1-low <= r <= 1+high] or 1[A >= 0, r <= 1-far_low] or 1[A <= 0, r >= 1+far_high]"
    )
    low: float = 0.2  # half-widths
    high: float = 0.2
    far_low: float = 0.6
    far_high: float = 2.0

    def check(self) -> None:
        if self.far_low < self.low or self.far_high < self.high:
            raise ConfigError("far_low and far_high must not be inside low and high")

    def __call__(self, scored: Scored) -> TokenLosses:
        ratio, advantages = torch.exp(scored.log_ratio.detach()), scored.advantages
        is_near = (ratio >= 1 - self.low) & (ratio <= 1 + self.high)
        rises = (advantages >= 0) & (ratio <= 1 - self.far_low)
        falls = (advantages <= 0) & (ratio >= 1 + self.far_high)
        return _gated(scored, is_near | rises | falls)


def _gated(scored: Scored, is_open: Tensor) -> TokenLosses:
    likelihood = -scored.advantages * scored.logprobs
    return TokenLosses(losses=torch.where(is_open, likelihood, torch.zeros_like(likelihood)), bounded=~is_open)


RECIPE = Recipe(
    name="rec",
    title="Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm: Demystifying Some Myths "
    "About GRPO and Its Friends",
    acronym="REC",
    arxiv="2509.24203",
    verification="code",  # Trinity-RFT `rec`
    advantage=GroupCentred(),
    ratio=TokenRatio(),
    weight=OneSidedGate(),
    aggregate=TokenMean(),
)

REC_TWO_SIDED = replace(
    RECIPE,
    name="rec_two_sided",
    about="Two sided gate (REC, two-sided): REINFORCE of tokens whose ratio lies within bounds, whatever the sign "
    "of the advantage. No importance weight: the ratio only decides which tokens count. Formula: token mean "
    "of -M A log pi, M = .8 <= r <= 1.2; A the reward minus the group's mean.",
    weight=TwoSidedGate(),
)

REC_RING = replace(
    RECIPE,
    name="rec_ring",
    about="Ring gate (REC, ring): the two-sided gate; tokens far off on the side that the advantage pushes away "
    "from count as well. No importance weight: the ratio only decides which tokens count. A summary of the "
    'code that we worked from says "one-sided or far"; far tokens are inside the one-sided gate, so that '
    "reading has no ring. Two-sided or far is here. Formula: token mean of -M A log pi, M = .8 <= r <= 1.2, "
    "or r <= .4 and A >= 0, or r >= 3 and A <= 0; A centred.",
    weight=RingGate(),
)
