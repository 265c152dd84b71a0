"""Sealed and scored groups: as a store holds them, any bytes under a right signature, and what makes two equal."""

import hashlib
from collections.abc import Sequence

import numpy as np

from swarm.identity import DOMAIN_GROUP, Identity
from swarm.testing.builders import make_group, make_identity, make_scored, make_sealed
from swarm.types import RolloutGroup, ScoredGroup, SealedGroup
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


def assert_same_group(left: RolloutGroup, right: RolloutGroup) -> None:
    """Every field and array of two groups, NaN included."""
    for name in ("run_id", "producer", "policy_id", "env", "task_id", "tokenizer_digest", "verifier", "created_at_s"):
        assert getattr(left, name) == getattr(right, name), name
    np.testing.assert_array_equal(left.prompt_ids, right.prompt_ids)
    for a, b in zip(left.rollouts, right.rollouts, strict=True):
        assert (a.text, a.sampling, a.finish) == (b.text, b.sampling, b.finish)
        np.testing.assert_equal(a.claimed_reward, b.claimed_reward)
        assert a.trace is not None and b.trace is not None and a.trace.spans == b.trace.spans
        for name in ("token_ids", "action_mask", "logprobs", "turn_ids"):
            np.testing.assert_array_equal(getattr(a.trace, name), getattr(b.trace, name))


def assert_same_scored(left: ScoredGroup, right: ScoredGroup) -> None:
    """Every field and array of two scored groups."""
    for name in ("digest", "correction", "is_made_here", "first_seen_s", "size_bytes"):
        assert getattr(left, name) == getattr(right, name), name
    np.testing.assert_array_equal(left.rewards, right.rewards)
    assert_same_group(left.group, right.group)
