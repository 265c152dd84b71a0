"""Wire: round trips of any group, and no bytes at all that raise or allocate beyond the bound."""

import hashlib
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.episode import TurnStatus
from swarm.identity import DOMAIN_ADVERT, DOMAIN_GROUP, Identity
from swarm.types import (
    Advert,
    ClaimedTurn,
    Correction,
    Cursor,
    FinishReason,
    PolicyVersion,
    RefusalReason,
    Refused,
    Role,
    Rollout,
    RolloutGroup,
    Sampling,
    SealedGroup,
    TokenTrace,
    VersionSpan,
)
from swarm.wire.adverts import MAX_ADVERT_BYTES, open_advert, seal_advert
from swarm.wire.envelopes import open_group, seal_group, sealed_from_bytes, sealed_to_bytes
from swarm.wire.rollout_groups import group_to_body
from swarm.wire.v1 import advert_pb2, rollout_pb2

IDENTITY = Identity.from_seed(bytes(range(32)))
MAX_BYTES = 2**20
float32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
versions = st.builds(
    PolicyVersion, policy_id=names, step=st.integers(0, 2**50), digest=st.sampled_from([b"", b"d" * 32])
)


@st.composite
def traces(draw: Any) -> TokenTrace:
    count = draw(st.integers(1, 30))
    mask = np.array(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    logprobs = np.full(count, np.nan, dtype=np.float32)
    logprobs[mask] = draw(st.lists(float32, min_size=int(mask.sum()), max_size=int(mask.sum())))
    turns = np.cumsum([0, *draw(st.lists(st.integers(0, 1), min_size=count - 1, max_size=count - 1))])
    starts = sorted({0, *draw(st.lists(st.integers(0, count - 1), max_size=4))})
    return TokenTrace(
        token_ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=count, max_size=count)), dtype=np.int32),
        action_mask=mask,
        logprobs=logprobs if mask.any() and draw(st.booleans()) else None,
        turn_ids=turns.astype(np.int16),
        spans=tuple(VersionSpan(start=start, version=draw(versions)) for start in starts),
    )


rollouts = st.builds(
    Rollout,
    actions=st.lists(st.text(st.characters(codec="utf-8"), max_size=40), min_size=1, max_size=4).map(tuple),
    claimed_turns=st.lists(
        st.builds(ClaimedTurn, reward=st.sampled_from([-0.5, 0.0, 0.1]), status=st.sampled_from(TurnStatus)), max_size=4
    ).map(tuple),
    trace=st.none() | traces(),
    sampling=st.builds(
        Sampling,
        temperature=st.sampled_from([0.7, 1.0, 0.1]),
        top_p=st.sampled_from([0.95, 1.0]),
        top_k=st.integers(0, 100),
        max_new_tokens=st.integers(0, 2**31 - 1),
    ),
    finish=st.sampled_from(FinishReason),
    claimed_reward=st.sampled_from([0.0, 0.1, 1.0]),
)
groups = st.builds(
    RolloutGroup,
    run_id=names,
    producer=st.just(IDENTITY.node_id),
    policy_id=names,
    env=names,
    task_id=st.integers(0, 2**63 - 1),
    tokenizer_digest=st.just(b"t" * 32),
    prompt_ids=st.lists(st.integers(0, 2**31 - 1), max_size=20).map(lambda ids: np.array(ids, dtype=np.int32)),
    rollouts=st.lists(rollouts, min_size=1, max_size=4).map(tuple),
    verifier=names,
    created_at_s=st.floats(0, 4e9),
)


def signed(body: bytes, *, is_compressed: bool = False) -> SealedGroup:
    """Any bytes, sealed as only the owner of the key could."""
    digest = hashlib.sha256(body).digest()
    signature = IDENTITY.sign(DOMAIN_GROUP, bytes([2 if is_compressed else 1]) + digest)
    return SealedGroup(
        digest=digest,
        producer=IDENTITY.node_id,
        public_key=IDENTITY.public_key,
        signature=signature,
        is_compressed=is_compressed,
        body=body,
    )


def refusal(opened: RolloutGroup | Refused) -> RefusalReason:
    assert isinstance(opened, Refused), opened
    return opened.reason


@given(groups)
def test_any_group_round_trips(group: RolloutGroup):
    sealed = sealed_from_bytes(sealed_to_bytes(seal_group(group, IDENTITY)))
    assert isinstance(sealed, SealedGroup)
    opened = open_group(sealed, MAX_BYTES)
    assert isinstance(opened, RolloutGroup), opened
    assert replace(opened, rollouts=(), prompt_ids=None) == replace(group, rollouts=(), prompt_ids=None)
    np.testing.assert_array_equal(opened.prompt_ids, group.prompt_ids)
    for ours, theirs in zip(opened.rollouts, group.rollouts, strict=True):
        assert replace(ours, trace=None) == replace(theirs, trace=None)
        assert (ours.trace is None) == (theirs.trace is None)
        if ours.trace is None or theirs.trace is None:
            continue
        assert ours.trace.spans == theirs.trace.spans
        for name in ("token_ids", "action_mask", "logprobs", "turn_ids"):
            left, right = getattr(ours.trace, name), getattr(theirs.trace, name)
            assert (left is None) == (right is None)
            if left is not None:
                assert left.dtype == right.dtype
                np.testing.assert_array_equal(left, right)


@given(st.binary(max_size=300), st.booleans())
def test_signed_random_bytes_are_refused(body: bytes, is_compressed: bool):
    assert refusal(open_group(signed(body, is_compressed=is_compressed), MAX_BYTES)) in {
        RefusalReason.MALFORMED,
        RefusalReason.TOO_LARGE,
    }


@given(groups, st.data())
def test_mutated_bodies_signed_by_a_hostile_owner_never_raise(group: RolloutGroup, data: st.DataObject):
    body = bytearray(group_to_body(group).SerializeToString())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(body) - 1))
        body[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    is_compressed = data.draw(st.booleans())
    sent = zstandard.compress(bytes(body)) if is_compressed else bytes(body)
    assert isinstance(open_group(signed(sent, is_compressed=is_compressed), MAX_BYTES), (RolloutGroup, Refused))


@given(groups, st.integers(0), st.integers(1, 255))
def test_any_flipped_byte_in_transit_is_refused(group: RolloutGroup, position: int, flip: int):
    data = bytearray(sealed_to_bytes(seal_group(group, IDENTITY)))
    data[position % len(data)] ^= flip
    sealed = sealed_from_bytes(bytes(data))
    assert isinstance(sealed, Refused) or isinstance(open_group(sealed, MAX_BYTES), Refused)


@given(st.binary(max_size=600))
def test_random_bytes_are_no_sealed_group_and_no_advert(data: bytes):
    sealed = sealed_from_bytes(data)
    assert isinstance(sealed, Refused) or isinstance(open_group(sealed, MAX_BYTES), Refused)
    assert open_advert(data, 0.0) is None


def _lying_frame(stated: int) -> bytes:
    """A zstd frame of 1 MiB of zeros whose header states another size."""
    frame = bytearray(zstandard.ZstdCompressor(level=1).compress(bytes(2**20)))
    assert frame[4] == 0x80  # not a single segment: a window byte, then four bytes of content size
    frame[6:10] = stated.to_bytes(4, "little")
    return bytes(frame)


BOMBS: dict[str, Callable[[], bytes]] = {
    "honest bomb": lambda: zstandard.compress(bytes(64 * 2**20)),
    "no size": lambda: zstandard.ZstdCompressor(level=1, write_content_size=False).compress(bytes(64 * 2**20)),
    "states less": lambda: _lying_frame(1000),
    "states more": lambda: _lying_frame(2**20 + 1),
    "states 4 GiB": lambda: _lying_frame(2**32 - 1),
    "two frames": lambda: zstandard.compress(bytes(1000)) + zstandard.compress(bytes(64 * 2**20)),
    "skippable": lambda: b"\x50\x2a\x4d\x18" + (2**31).to_bytes(4, "little"),
}


@pytest.mark.parametrize("name", list(BOMBS))
def test_bomb_is_refused_within_the_bound(name: str):
    sealed = signed(BOMBS[name](), is_compressed=True)
    open_group(sealed, MAX_BYTES)  # loads what is loaded once
    tracemalloc.start()
    reason = refusal(open_group(sealed, MAX_BYTES))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert reason in {RefusalReason.TOO_LARGE, RefusalReason.MALFORMED}
    assert peak < 2 * MAX_BYTES


@pytest.mark.parametrize(
    "body",
    [
        b"\x3a\x00" * 500_000,  # half a million empty rollouts
        b"\x3a\x80\x89\x7a" + b"\x2a\x00" * 1_000_000,  # truncated
        rollout_pb2.GroupBody(
            rollouts=[rollout_pb2.Rollout(trace=rollout_pb2.TokenTrace(spans=[{}] * 100_000))]  # type: ignore[list-item]
        ).SerializeToString(),
    ],
    ids=["rollouts", "truncated", "spans"],
)
def test_many_empty_fields_are_refused_before_they_are_built(body: bytes):
    assert refusal(open_group(signed(body), 2**22)) is RefusalReason.MALFORMED


head = PolicyVersion(policy_id=IDENTITY.node_id, step=2**40, digest=b"w" * 32)
adverts = st.builds(
    Advert,
    node_id=st.just(IDENTITY.node_id),
    run_id=st.from_regex(r"[A-Za-z0-9._-]{1,40}", fullmatch=True),
    endpoints=st.lists(st.sampled_from(["127.0.0.1:4001", "[::1]:9", "node.example:65535"]), max_size=2).map(tuple),
    roles=st.lists(st.sampled_from(Role), unique=True).map(tuple),
    tokenizer_digest=st.sampled_from([b"", b"t" * 32]),
    head=st.just(head),
    oldest_step=st.integers(0, 2**40),
    num_groups=st.integers(0, 2**32 - 1),
    reward_mean=st.sampled_from([0.0, 0.7]),
    reward_std=st.sampled_from([0.0, 0.3]),
    correction=st.sampled_from(Correction),
    held_bytes=st.integers(0, 2**50),
    cursor=st.builds(Cursor, epoch=st.text("abcdef0123456789", max_size=32), sequence=st.integers(0, 2**50)),
    expires_at_s=st.floats(1001, 1300),
)


@given(adverts)
def test_any_advert_round_trips_within_its_bound(advert: Advert):
    data = seal_advert(advert, IDENTITY)
    assert len(data) <= MAX_ADVERT_BYTES
    assert open_advert(data, 1000.0) == advert


@given(adverts, st.integers(0), st.integers(1, 255))
def test_any_flipped_byte_of_an_advert_is_refused(advert: Advert, position: int, flip: int):
    data = bytearray(seal_advert(advert, IDENTITY))
    data[position % len(data)] ^= flip
    assert open_advert(bytes(data), 1000.0) is None


@given(adverts, st.data())
@settings(max_examples=50)
def test_mutated_adverts_signed_by_a_hostile_owner_never_raise(advert: Advert, data: st.DataObject):
    signed_advert = advert_pb2.SignedAdvert.FromString(seal_advert(advert, IDENTITY))
    body = bytearray(signed_advert.body)
    at = data.draw(st.integers(0, len(body) - 1))
    body[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    signed_advert.body = bytes(body)
    signed_advert.signature = IDENTITY.sign(DOMAIN_ADVERT, bytes(body))
    opened = open_advert(signed_advert.SerializeToString(), 1000.0)
    assert opened is None or opened.node_id == IDENTITY.node_id
