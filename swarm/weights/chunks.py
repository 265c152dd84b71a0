"""Chunks of a payload: 1 MiB each, addressed by their digest, so that any holder may serve any of them.

Invariant: a chunk is handed on only after its length and digest were compared with the manifest.
"""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Final

from swarm.types import Digest, short
from swarm.weights.unusable import MalformedPayload, UnusableReason

CHUNK_BYTES: Final = 1 << 20


def chunk_digest(chunk: bytes | memoryview) -> Digest:
    """The address of a chunk: SHA-256."""
    return hashlib.sha256(chunk).digest()


def split_chunks(parts: Iterable[bytes | memoryview]) -> Iterator[bytes]:
    """Splits a payload into chunks of CHUNK_BYTES; the last one may be shorter."""
    held = bytearray()
    for part in parts:
        view = memoryview(part)
        while len(view):
            taken = view[: CHUNK_BYTES - len(held)]
            held += taken
            view = view[len(taken) :]
            if len(held) == CHUNK_BYTES:
                yield bytes(held)
                held.clear()
    if held:
        yield bytes(held)


def num_chunks(payload_bytes: int) -> int:
    """How many chunks a payload has."""
    return -(-payload_bytes // CHUNK_BYTES)


def check_chunk(number: int, chunk: bytes | memoryview, digests: tuple[Digest, ...], payload_bytes: int) -> None:
    """Raises MalformedPayload unless this is the chunk of that number."""
    expected = min(CHUNK_BYTES, payload_bytes - number * CHUNK_BYTES)
    if len(chunk) != expected:
        raise MalformedPayload(
            UnusableReason.WRONG_CHUNK, f"chunk {number} has {len(chunk)} bytes, expected {expected}"
        )
    if chunk_digest(chunk) != digests[number]:
        raise MalformedPayload(UnusableReason.WRONG_CHUNK, f"chunk {number} is not {short(digests[number])}")


def check_chunks(
    chunks: Iterable[bytes | memoryview], digests: tuple[Digest, ...], payload_bytes: int
) -> Iterator[bytes | memoryview]:
    """The chunks of a payload, each after its check. Raises MalformedPayload at the first that is wrong or missing."""
    number = 0
    for chunk in chunks:
        if number == len(digests):
            raise MalformedPayload(UnusableReason.WRONG_CHUNK, f"more than {number} chunks")
        check_chunk(number, chunk, digests, payload_bytes)
        number += 1
        yield chunk
    if number < len(digests):
        raise MalformedPayload(UnusableReason.WRONG_CHUNK, f"{number} of {len(digests)} chunks")
