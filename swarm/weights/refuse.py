"""Why a version from a peer is not used.

Invariant: inside this package hostile bytes raise `Malformed`; nothing else of them does, and callers of the public
functions get an `Unusable` value.
"""

from dataclasses import dataclass
from enum import StrEnum


class UnusableReason(StrEnum):
    """What was wrong. Each one is counted."""

    TOO_LARGE = "too_large"  # a size over its bound, before anything was allocated for it
    MALFORMED = "malformed"  # structure of a manifest or of a payload
    WRONG_SIGNATURE = "wrong_signature"
    WRONG_OWNER = "wrong_owner"  # signed by somebody else than the owner of the lineage
    WRONG_CHUNK = "wrong_chunk"  # a chunk is not what its digest says
    WRONG_BASE = "wrong_base"  # what we hold is not what the patch starts from
    WRONG_LAYOUT = "wrong_layout"  # names, dtypes or shapes differ from the base
    WRONG_TENSOR = "wrong_tensor"  # a decoded tensor is not what its hash says
    WRONG_TARGET = "wrong_target"  # all decoded, but not the version that was announced


@dataclass(frozen=True, kw_only=True, slots=True)
class Unusable:
    """Part of a version that will not be used: counted data, not an exception."""

    reason: UnusableReason
    detail: str  # values and bounds, for the log


class Malformed(Exception):
    """Raised within this package only; becomes an `Unusable`."""

    def __init__(self, reason: UnusableReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail

    def unusable(self) -> Unusable:
        """The value that callers see."""
        return Unusable(reason=self.reason, detail=self.detail)


def malformed(detail: str) -> Malformed:
    """The usual reason."""
    return Malformed(UnusableReason.MALFORMED, detail)
