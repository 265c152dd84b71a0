"""OPMD: plain REINFORCE with the group's mean as baseline, damped according to a pull to the old policy.

    token mean of -A log pi / (1 + tau), tau 1; A the reward minus the group's mean

No ratio and no clip: the pull is folded into the step size, 1 / (1 + tau). The variant with a log-mean-exp
baseline is left out.
"""

from typing import Annotated

from swarm.objectives.part import Bound, Scored, TokenLosses, WeightPart, unbounded
from swarm.objectives.parts import GroupCentred, NoRatio, TokenMean
from swarm.objectives.recipe import Recipe


class TemperedLikelihood(WeightPart):
    """The log-likelihood times the advantage, divided by 1 + tau, the strength of a pull to the previous policy."""

    equation = "L_t = -A log pi_t / (1 + tau)"
    tau: Annotated[float, Bound(above=-1)] = 1.0  # > -1

    def __call__(self, scored: Scored) -> TokenLosses:
        return unbounded(-scored.advantages * scored.logprobs / (1 + self.tau))


RECIPE = Recipe(
    name="opmd",
    title="Group-Relative REINFORCE Is Secretly an Off-Policy Algorithm: Demystifying Some Myths "
    "About GRPO and Its Friends",
    acronym="OPMD",
    arxiv="2509.24203",
    verification="code",  # Trinity-RFT `opmd`
    advantage=GroupCentred(),
    ratio=NoRatio(),
    weight=TemperedLikelihood(tau=1.0),
    aggregate=TokenMean(),
)
