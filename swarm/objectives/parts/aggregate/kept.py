"""A mean over the tokens that are left where an advantage dropped rollouts.

Invariant: its value does not shrink with what was dropped; where other recipes learn from the rest of the step, it
counts as much as its tokens' share of the step.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from swarm.objectives.part import AggregatePart, Scope, Scored


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptTokenMean(AggregatePart):
    """Every token that is trained on counts the same; dropped rollouts do not make the step smaller.

    Source: token mean of arXiv:2503.14476, after the down-sampling of arXiv:2510.04996.
    """

    equation: ClassVar[str] = (
        "L = share sum over kept i of sum_t L_t / sum over kept i of |o_i|, "
        "share of the step's tokens (1 but for mixed kinds)"
    )
    scope: ClassVar[Scope] = Scope.STEP

    def __call__(self, losses: Tensor, scored: Scored) -> Tensor:
        return scored.batch.step_share * losses.sum() / scored.mask.sum().clamp(min=1)
