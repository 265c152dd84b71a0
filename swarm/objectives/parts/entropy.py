"""Mean entropy of the step, and the constant bonus on it.

Invariant: gradient flows through `scored.entropy` only.
"""

from torch import Tensor

from swarm.objectives.part import Scored, TermPart
from swarm.objectives.parts.kl import step_mean


def mean_entropy(scored: Scored) -> Tensor:
    """Sum of the entropy of trained tokens over the tokens of the step: adds up over micro-batches."""
    return step_mean(scored.entropy, scored, "token")


class EntropyBonus(TermPart):
    """A constant bonus on the mean entropy of trained tokens.

    Source: arXiv:1707.06347 eq. 9; verl `entropy_coeff`.
    """

    equation = "L -= strength * mean_t H_t"
    strength: float = 0.001

    def __call__(self, scored: Scored) -> Tensor:
        return -self.strength * mean_entropy(scored)
