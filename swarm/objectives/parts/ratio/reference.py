"""Ratios to the frozen reference policy, for methods that learn from any stored data.

Invariant: off the mask a log-ratio is exactly 0, on it bounded by +-20 so that exp stays finite.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from swarm.objectives.part import RatioPart, Requirement, Scored
from swarm.objectives.parts.ratio.token import log_ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceRatio(RatioPart):
    """The ratio of one token to the frozen reference policy, whoever generated it.

    Source: A-LoL, arXiv:2305.14718; A*-PO, arXiv:2505.20686.
    """

    equation: ClassVar[str] = "r_t = exp(clamp(log pi_t - log pi_ref_t, -20, 20))"

    @property
    def needs(self) -> frozenset[Requirement]:
        return frozenset({Requirement.REFERENCE_LOGPROBS})

    def __call__(self, scored: Scored) -> Tensor:
        return log_ratio(scored.logprobs, scored.reference, scored.mask)
