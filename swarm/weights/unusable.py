"""Reasons why a version from a peer is not used, as a value and as an exception.

Invariant: inside this package hostile bytes raise `MalformedPayload` and nothing else; callers of the public functions
get an `Unusable` value.
"""

from dataclasses import dataclass
from enum import StrEnum


class UnusableReason(StrEnum):
    """What was wrong; counted by reason."""

    TOO_LARGE = "too_large"  # a size over its bound, before anything was allocated for it
    MALFORMED = "malformed"  # structure of a manifest or of a payload
    WRONG_SIGNATURE = "wrong_signature"
    WRONG_OWNER = "wrong_owner"  # not signed by the owner of the lineage
    WRONG_CHUNK = "wrong_chunk"  # a chunk is not what its digest says
    WRONG_BASE = "wrong_base"  # what we hold is not what the patch starts from
    WRONG_LAYOUT = "wrong_layout"  # names, dtypes or shapes differ from the base
    WRONG_TENSOR = "wrong_tensor"  # a decoded tensor is not what its hash says
    WRONG_TARGET = "wrong_target"  # all decoded, but not the version that was announced


@dataclass(frozen=True, kw_only=True, slots=True)
class Unusable:
    """Refusal of a manifest, chunk or version: counted data, not an exception."""

    reason: UnusableReason
    detail: str  # values and bounds, for the log


class MalformedPayload(Exception):
    """Raised within this package only; becomes an `Unusable`."""

    def __init__(self, reason: UnusableReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail

    def unusable(self) -> Unusable:
        """The same as a value, for callers outside this package."""
        return Unusable(reason=self.reason, detail=self.detail)


def malformed(detail: str) -> MalformedPayload:
    """`MalformedPayload` for the commonest reason, MALFORMED."""
    return MalformedPayload(UnusableReason.MALFORMED, detail)
