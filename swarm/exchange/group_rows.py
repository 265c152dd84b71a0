"""The tables of a group store, and its rows as values.

Invariant: a row that the disk changed never becomes a group: the signature over its bytes is checked again.
"""

import logging
from typing import Any, Final

import numpy as np

from swarm.exchange.admission_checks import clamp_logprobs
from swarm.types import Correction, Refused, ScoredGroup, SealedGroup, short
from swarm.wire.envelopes import open_group

logger = logging.getLogger(__name__)

SCHEMA_VERSION: Final = 1
_MAX_OPENED_BYTES: Final = 64 * 2**20  # the largest max_group_bytes that a configuration allows

SCHEMA: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    sequence INTEGER PRIMARY KEY AUTOINCREMENT,
    digest BLOB NOT NULL UNIQUE,
    producer TEXT NOT NULL,
    public_key BLOB NOT NULL,
    signature BLOB NOT NULL,
    is_compressed INTEGER NOT NULL,
    is_made_here INTEGER NOT NULL,
    rewards BLOB NOT NULL,
    correction TEXT NOT NULL,
    first_seen_s REAL NOT NULL,
    size_bytes INTEGER NOT NULL
);
CREATE INDEX groups_own ON groups(is_made_here, sequence);
CREATE TABLE bodies (sequence INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE tombstones (digest BLOB PRIMARY KEY, deleted_s REAL NOT NULL) WITHOUT ROWID;
CREATE INDEX tombstones_old ON tombstones(deleted_s);
CREATE TABLE draws (step INTEGER PRIMARY KEY, num_zero_variance INTEGER NOT NULL, source_weights TEXT NOT NULL);
CREATE TABLE drawn (
    step INTEGER NOT NULL,
    position INTEGER NOT NULL,
    digest BLOB NOT NULL,
    age_steps INTEGER NOT NULL,
    use INTEGER NOT NULL,
    is_zero_variance INTEGER NOT NULL,
    PRIMARY KEY (step, position)
) WITHOUT ROWID;
CREATE INDEX drawn_digest ON drawn(digest);
"""

SEALED_COLUMNS: Final = "g.sequence, g.digest, g.producer, g.public_key, g.signature, g.is_compressed, b.body"
SCORED_COLUMNS: Final = f"{SEALED_COLUMNS}, g.is_made_here, g.rewards, g.correction, g.first_seen_s, g.size_bytes"
FROM_GROUPS: Final = "FROM groups g JOIN bodies b USING (sequence)"


def sealed_of(row: tuple[Any, ...]) -> SealedGroup:
    """The group of a row of SEALED_COLUMNS, or of SCORED_COLUMNS, which begin with them."""
    _, digest, producer, public_key, signature, is_compressed, body = row[:7]
    return SealedGroup(
        digest=digest,
        producer=producer,
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
    is_made_here, rewards, correction, first_seen_s, size_bytes = row[7:]
    return ScoredGroup(
        digest=sealed.digest,
        group=clamp_logprobs(group),
        rewards=np.frombuffer(rewards, "<f4").astype(np.float32),
        correction=Correction(correction),
        is_made_here=bool(is_made_here),
        first_seen_s=first_seen_s,
        size_bytes=size_bytes,
    )
