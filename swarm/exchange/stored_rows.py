"""Rows of a group store as groups, and back.

Invariant: a row that the disk changed never becomes a group, and no peer gets it: digest or signature over its bytes is
checked again.
"""

import hashlib
import logging
import zlib
from typing import Any, Final

import numpy as np

from swarm.episode import EpisodeOutcome, outcomes_from_json, outcomes_to_json
from swarm.exchange.reward_recheck import clamp_logprobs
from swarm.types import Correction, Refused, ScoredGroup, SealedGroup, short
from swarm.wire.envelopes import open_group

logger = logging.getLogger(__name__)

SEALED_COLUMNS: Final = "g.sequence, g.digest, g.producer, g.public_key, g.signature, g.is_compressed, b.body"
SCORED_COLUMNS: Final = (
    f"{SEALED_COLUMNS}, g.is_made_here, g.rewards, g.correction, g.first_seen_s, g.size_bytes, g.outcomes"
)
_MAX_OPENED_BYTES: Final = 64 * 2**20  # the largest max_group_bytes that a configuration allows


def scored_columns(scored: ScoredGroup, sealed: SealedGroup) -> dict[str, Any]:
    """The columns of a new row of `groups`."""
    return {
        "digest": sealed.digest,
        "producer": sealed.producer,
        "public_key": sealed.public_key,
        "signature": sealed.signature,
        "is_compressed": sealed.is_compressed,
        "is_made_here": scored.is_made_here,
        "rewards": _guarded(np.asarray(scored.rewards, "<f4").tobytes(), scored.correction),
        "correction": str(scored.correction),
        "first_seen_s": scored.first_seen_s,
        "size_bytes": sealed.size_bytes,
        "outcomes": _packed(scored.outcomes) if scored.outcomes else None,
    }


def is_whole(sealed: SealedGroup) -> bool:
    """Whether a stored group is as it was written. Whoever sends another one is charged with it (3.3 us for 4 KiB)."""
    if hashlib.sha256(sealed.body).digest() == sealed.digest:
        return True
    logger.warning("stored group is not as it was written, and is not sent", extra={"digest": short(sealed.digest)})
    return False


def sealed_of(row: tuple[Any, ...]) -> SealedGroup:
    """The group of a row of SEALED_COLUMNS, or of SCORED_COLUMNS, which begin with them."""
    _, _, producer, _, _, is_compressed, _ = row[:7]
    # Where a bit of a row's header flipped, a value has another type.
    digest, public_key, signature, body = (row[i] if isinstance(row[i], bytes) else b"" for i in (1, 3, 4, 6))
    return SealedGroup(
        digest=digest,
        producer=str(producer),
        public_key=public_key,
        signature=signature,
        is_compressed=bool(is_compressed),
        body=body,
    )


def scored_of(row: tuple[Any, ...]) -> ScoredGroup | None:
    """The group of a row of SCORED_COLUMNS with this node's rewards; None when the disk changed its bytes."""
    sealed = sealed_of(row)
    group = open_group(sealed, _MAX_OPENED_BYTES)
    if isinstance(group, Refused):
        logger.warning("stored group does not open", extra={"digest": short(sealed.digest), "reason": group.reason})
        return None
    is_made_here, blob, name, first_seen_s, size_bytes, packed = row[7:]
    try:
        correction = Correction(name)
        plain: bytes = blob[: 4 * len(group.rollouts)]
        if blob != plain and blob != _guarded(plain, correction):  # without a checksum: of release 0.1.0
            raise ValueError("its checksum is another one")
        rewards = np.frombuffer(plain, "<f4").astype(np.float32)
        first_seen_s = float(first_seen_s)
        outcomes = () if packed is None else _unpacked(packed, len(group.rollouts))
    except (TypeError, ValueError, zlib.error) as error:
        rewards, correction, outcomes = np.zeros(0, np.float32), Correction.EXACT, ()
        logger.warning("stored group has no rewards", extra={"digest": short(sealed.digest), "error": str(error)})
    if len(rewards) != len(group.rollouts) or not np.isfinite(rewards).all():
        return None
    return ScoredGroup(
        digest=sealed.digest,
        group=clamp_logprobs(group),
        rewards=rewards,
        correction=correction,
        is_made_here=bool(is_made_here),
        first_seen_s=first_seen_s,
        size_bytes=size_bytes,
        outcomes=outcomes,
    )


def _guarded(rewards: bytes, correction: Correction) -> bytes:
    """Rewards with a checksum of them: no signature covers what this node found a group worth."""
    return rewards + zlib.crc32(rewards + str(correction).encode()).to_bytes(4, "little")


def _packed(outcomes: tuple[EpisodeOutcome, ...]) -> bytes:
    """Outcomes as compressed JSON, which has a checksum of its own."""
    return zlib.compress(outcomes_to_json(outcomes))


def _unpacked(data: bytes, count: int) -> tuple[EpisodeOutcome, ...]:
    """The inverse of `_packed`. Raises TypeError, ValueError and zlib.error where the disk changed it."""
    outcomes = outcomes_from_json(zlib.decompress(data))
    if len(outcomes) != count:
        raise ValueError(f"{len(outcomes)} outcomes of {count} rollouts")
    return outcomes
