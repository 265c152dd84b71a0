"""OPMD: plain REINFORCE with the group's mean as baseline, damped by the strength of a pull to the old policy.

    token mean of -A log pi / (1 + tau), tau 1; A the reward minus the group's mean

No ratio and no clip: the pull is folded into the step size, 1 / (1 + tau). The variant with a log-mean-exp
baseline is left out.
"""

import torch

from swarm.errors import ConfigError
from swarm.objectives.part import Scored, TokenLosses, WeightPart
from swarm.objectives.parts import GroupCentred, NoRatio, TokenMean
from swarm.objectives.recipe import Recipe


class TemperedLikelihood(WeightPart):
    """The log-likelihood times the advantage, damped by the strength of a pull to the previous policy.

    Source: OPMD, Trinity-RFT `opmd`; arXiv:2509.24203.
    """

    equation = "L_t = -A log pi_t / (1 + tau)"
    tau: float = 1.0  # > -1

    def __post_init__(self) -> None:
        if self.tau <= -1:
            raise ConfigError(f"tau {self.tau} must exceed -1")

    def __call__(self, scored: Scored) -> TokenLosses:
        losses = -scored.advantages * scored.logprobs / (1 + self.tau)
        return TokenLosses(losses=losses, bounded=torch.zeros_like(scored.mask))


RECIPE = Recipe(
    name="opmd",
    title="Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm: Demystifying Some Myths "
    "About GRPO and Its Friends",
    acronym="OPMD",
    arxiv="2509.24203",
    row="S159",
    verification="code",
    advantage=GroupCentred(),
    ratio=NoRatio(),
    weight=TemperedLikelihood(tau=1.0),
    aggregate=TokenMean(),
)
