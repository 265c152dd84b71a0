"""Weights on the wire: round trips of anything in bounds, and no bytes at all that come out of bounds or raise."""

import json

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import TooLarge
from swarm.types import ApplyReport, Credit, PolicyVersion, SealedManifest
from swarm.weights.manifest import Limits
from swarm.weights.payload import CHUNK_BYTES
from swarm.wire.local import apply_report_from_json, report_to_json
from swarm.wire.rollout_groups import MAX_STEP, Malformed
from swarm.wire.session import MAX_MESSAGE_BYTES
from swarm.wire.v1 import exchange_service_pb2 as pb
from swarm.wire.v1 import policy_pb2
from swarm.wire.weights import (
    MAX_CHUNK_BYTES,
    MAX_LOCAL_MANIFEST_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_PUBLISHED_MANIFESTS,
    MAX_WINDOW,
    bounded_bodies,
    manifest_from_message,
    manifest_to_message,
    require_digest,
    watch_from_message,
    watch_to_message,
    watched_from_message,
    watched_to_message,
)

manifests = st.builds(
    SealedManifest,
    body=st.binary(min_size=1, max_size=200),
    public_key=st.binary(min_size=32, max_size=32),
    signature=st.binary(min_size=64, max_size=64),
)
credits = st.builds(Credit, head_step=st.integers(0, MAX_STEP - 1), granted=st.integers(0, MAX_STEP - 1))
finite = st.floats(0, 1e6, allow_nan=False)
reports = st.builds(
    ApplyReport,
    version=st.builds(
        PolicyVersion, policy_id=st.text(min_size=1, max_size=20), step=st.integers(0, 2**50), digest=st.just(b"d" * 32)
    ),
    error=st.text(max_size=80),
    num_bytes=st.integers(0, 2**50),
    seconds=st.dictionaries(st.sampled_from(["stage", "pause", "load", "canary"]), finite),
    mismatch_nats=finite,
)


@given(manifests | credits)
def test_what_is_watched_round_trips(item: SealedManifest | Credit) -> None:
    data = watched_to_message(item).SerializeToString()
    assert watched_from_message(pb.WatchResponse.FromString(data)) == item


@given(st.text(min_size=1, max_size=128), st.integers(-5, 2 * MAX_WINDOW))
def test_request_to_watch_round_trips_with_its_window_within_bounds(policy_id: str, window: int) -> None:
    data = watch_to_message(policy_id, window).SerializeToString()
    assert watch_from_message(pb.WatchRequest.FromString(data)) == (policy_id, max(0, min(window, MAX_WINDOW)))


@given(reports)
def test_any_report_of_an_engine_round_trips_as_plain_json(report: ApplyReport) -> None:
    data = report_to_json(report)
    assert apply_report_from_json(data) == report
    assert json.loads(data)["version"]["digest"] == "64" * 32


@given(st.binary(max_size=400))
def test_no_bytes_are_watched_but_those_within_bounds(data: bytes) -> None:
    try:
        item = watched_from_message(pb.WatchResponse.FromString(data))
    except (DecodeError, Malformed):
        return
    if isinstance(item, Credit):
        assert 0 <= item.head_step < MAX_STEP and 0 <= item.granted < MAX_STEP
    else:
        assert (len(item.public_key), len(item.signature)) == (32, 64) and 0 < len(item.body) <= MAX_MANIFEST_BYTES


@given(st.binary(max_size=80), st.binary(max_size=80), st.binary(max_size=80))
def test_only_a_key_of_32_and_a_signature_of_64_bytes_around_something_is_a_manifest(
    key: bytes, signature: bytes, body: bytes
) -> None:
    message = policy_pb2.SealedManifest(public_key=key, signature=signature, body=body)
    if (len(key), len(signature)) == (32, 64) and body:
        assert manifest_from_message(message).body == body
    else:
        with pytest.raises(Malformed):
            manifest_from_message(message)


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_credit_is_exact_as_a_float_or_malformed(head_step: int, granted: int) -> None:
    message = pb.WatchResponse(credit=pb.Credit(head_step=head_step, granted=granted))
    try:
        credit = watched_from_message(message)
    except Malformed:
        assert max(head_step, granted) >= MAX_STEP
    else:
        assert credit == Credit(head_step=head_step, granted=granted) and max(head_step, granted) < MAX_STEP


@given(st.text(max_size=200), st.integers(0, 2**32 - 1))
def test_only_a_named_lineage_and_a_bounded_window_can_be_watched(policy_id: str, window: int) -> None:
    message = pb.WatchRequest(policy_id=policy_id, window=window)
    if 0 < len(policy_id) <= 128 and window <= MAX_WINDOW:
        assert watch_from_message(message) == (policy_id, window)
    else:
        with pytest.raises(Malformed):
            watch_from_message(message)


def test_manifests_beyond_their_bounds_are_neither_sent_nor_taken() -> None:
    body = bytes(MAX_MANIFEST_BYTES + 1)
    sealed = SealedManifest(body=body, public_key=bytes(32), signature=bytes(64))
    with pytest.raises(TooLarge, match=str(MAX_MANIFEST_BYTES)):
        watched_to_message(sealed)
    local = manifest_to_message(sealed, MAX_LOCAL_MANIFEST_BYTES)
    assert manifest_from_message(local, MAX_LOCAL_MANIFEST_BYTES) == sealed
    with pytest.raises(Malformed, match=str(MAX_MANIFEST_BYTES)):
        manifest_from_message(local)
    with pytest.raises(TooLarge):
        bounded_bodies([b"x"] * (MAX_PUBLISHED_MANIFESTS + 1))
    with pytest.raises(TooLarge):
        bounded_bodies([bytes(MAX_LOCAL_MANIFEST_BYTES + 1)])


def test_bounds_of_the_wire_are_those_of_the_manifests_and_chunks_it_carries() -> None:
    assert Limits().manifest_bytes == MAX_MANIFEST_BYTES < MAX_MESSAGE_BYTES
    assert MAX_CHUNK_BYTES == CHUNK_BYTES


@given(st.binary(max_size=40))
def test_only_32_bytes_are_a_digest(data: bytes) -> None:
    if len(data) == 32:
        assert require_digest(data) == data
    else:
        with pytest.raises(Malformed):
            require_digest(data)
