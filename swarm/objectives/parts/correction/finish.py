"""What becomes of responses that did not end by themselves.

Invariant: a factor is 0 or 1, the same on all tokens of a rollout. Dropped responses stay in the denominators.
Shape letters: N rollouts, L longest response in tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from swarm.objectives.part import CorrectionPart, Scored


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedOnly(CorrectionPart):
    """Drops responses cut off by the token limit: their reward says little about what they were going to be.

    They still count in their group's statistics. TRL takes their tokens out of the denominator as well; here the
    step does not grow by it.

    Source: overlong filtering, arXiv:2503.14476 section 3.4; TRL `mask_truncated_completions`.
    """

    equation: ClassVar[str] = "L_t <- 1[response ended before its limit] L_t"

    def __call__(self, scored: Scored) -> Tensor:
        is_kept = ~scored.batch.is_truncated[:, None]
        return is_kept.to(scored.advantages.dtype).expand(scored.mask.shape)
