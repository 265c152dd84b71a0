"""Sealed groups: as a store holds them, and any bytes at all under a right signature."""

import hashlib
from collections.abc import Sequence

from swarm.identity import DOMAIN_GROUP, Identity
from swarm.testing.builders import make_group, make_identity, make_scored, make_sealed
from swarm.types import ScoredGroup, SealedGroup
from swarm.wire.v1 import rollout_pb2

Entry = tuple[ScoredGroup, SealedGroup]


def make_entry(
    task_id: int, *, is_made_here: bool = True, first_seen_s: float = 0.0, texts: Sequence[str] | None = None
) -> Entry:
    """A group of this node, or of another one, scored and sealed."""
    identity = make_identity(0 if is_made_here else 1)
    group = make_group(identity.node_id, task_id=task_id, texts=texts)
    sealed = make_sealed(group, identity)
    scored = make_scored(
        group,
        digest=sealed.digest,
        is_made_here=is_made_here,
        first_seen_s=first_seen_s,
        size_bytes=sealed.size_bytes,
    )
    return scored, sealed


def seal_bytes(body: bytes, identity: Identity, *, is_compressed: bool = False) -> SealedGroup:
    """Any bytes, correctly signed as the body of a group."""
    digest = hashlib.sha256(body).digest()
    codec = rollout_pb2.BODY_CODEC_ZSTD if is_compressed else rollout_pb2.BODY_CODEC_IDENTITY
    return SealedGroup(
        digest=digest,
        producer=identity.node_id,
        public_key=identity.public_key,
        signature=identity.sign(DOMAIN_GROUP, bytes([codec]) + digest),
        is_compressed=is_compressed,
        body=body,
    )
