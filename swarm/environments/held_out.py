"""Which problems no node ever asks in training.

Invariant: the answer depends on the question text alone, so every node, whatever its environment's seed or
task number, holds out the same questions, and two task ids with one question fall on the same side.
"""

import hashlib

HELD_OUT_SHARE = 0.25
_LIMIT = 0x40  # a quarter of the 256 values of the first byte of the digest


def is_held_out(question: str) -> bool:
    """True when SHA-256 of the question (UTF-8) lies in the lowest quarter of its range."""
    return hashlib.sha256(question.encode("utf-8", "surrogatepass")).digest()[0] < _LIMIT
