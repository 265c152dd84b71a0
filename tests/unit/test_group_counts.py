"""Small messages that become large ones are refused before they are parsed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zstandard
from sealed_groups import seal_bytes

from swarm.exchange.checks.admission_limits import AdmissionLimits
from swarm.testing.builders import make_group, make_identity
from swarm.types import RefusalReason, Refused, RolloutGroup, SealedGroup
from swarm.wire import envelopes
from swarm.wire.envelopes import open_group, seal_group
from swarm.wire.group_counts import SMALL_BYTES
from swarm.wire.rollout_groups import group_to_body
from swarm.wire.v1 import rollout_pb2

EVE = make_identity(5)
LIMITS = AdmissionLimits(group_size=4)
MAX_ELEMENTS = 2 * SMALL_BYTES  # objects or loop turns: about 1 ms of CPU
Body = rollout_pb2.GroupBody


def compressed(body: bytes) -> SealedGroup:
    """Any body, signed by a valid key and compressed as well as can be."""
    return seal_bytes(zstandard.ZstdCompressor(level=19).compress(body), EVE, is_compressed=True)


def honest_body() -> Body:
    return group_to_body(make_group(EVE.node_id, texts=["7"] * 4))


def with_prompt(count: int) -> bytes:
    body = honest_body()
    body.prompt_ids.extend([0] * count)
    return body.SerializeToString()


def with_trace(**fields: Any) -> bytes:
    body = honest_body()
    for name, values in fields.items():
        getattr(body.rollouts[0].trace, name).extend(values)
    return body.SerializeToString()


def in_two_halves(count: int) -> bytes:
    """The same trace twice in one rollout: a parser puts them together."""
    half = Body(rollouts=[rollout_pb2.Rollout(trace=rollout_pb2.TokenTrace(token_ids=[0] * (count // 2)))])
    trace = half.rollouts[0].SerializeToString()
    return honest_body().SerializeToString() + b"\x3a" + _varint(2 * len(trace)) + 2 * trace


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*parts, value])


def with_raw_trace(trace: bytes) -> bytes:
    rollout = b"\x12" + _varint(len(trace)) + trace
    return honest_body().SerializeToString() + b"\x3a" + _varint(len(rollout)) + rollout


def with_text(size: int) -> bytes:
    body = honest_body()
    body.rollouts[0].text = "a" * size
    return body.SerializeToString()


def with_name(size: int) -> bytes:
    body = honest_body()
    body.run_id = "a" * size
    return body.SerializeToString()


UNPACKED_ID, EMPTY_SPAN = b"\x08\x00", b"\x2a\x00"
SPAN = b"\x2a\x07\x12\x05\x0a\x01p\x10\x01"  # of policy p, step 1
BOMBS: dict[str, Callable[[], bytes]] = {
    "prompt": lambda: with_prompt(1_000_000),
    "token ids": lambda: with_trace(token_ids=[0] * 1_000_000),
    "token ids in two halves": lambda: in_two_halves(1_000_000),
    "token ids one by one": lambda: with_raw_trace(UNPACKED_ID * 1_000_000),
    "action runs": lambda: with_trace(action_runs=[0] * 1_000_000),
    "turns": lambda: with_trace(turn_starts=[0] * 1_000_000),
    "byte lengths": lambda: with_trace(byte_lengths=[0] * 1_000_000),
    "spans": lambda: with_raw_trace(SPAN * 100_000),
    "empty spans": lambda: with_raw_trace(EMPTY_SPAN * 1_000_000),
    "rollouts": lambda: honest_body().SerializeToString() + b"\x3a\x00" * 1_000_000,
    "text": lambda: with_text(4_000_000),
    "name": lambda: with_name(4_000_000),
}


@pytest.fixture
def parsed_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the bodies that reach the parser: it makes an object of every two bytes, or fewer."""
    seen: list[int] = []

    class Counting:
        @staticmethod
        def FromString(data: bytes) -> Body:
            seen.append(len(data))
            return Body.FromString(data)

    class Module:
        GroupBody = Counting
        BODY_CODEC_ZSTD, BODY_CODEC_IDENTITY = rollout_pb2.BODY_CODEC_ZSTD, rollout_pb2.BODY_CODEC_IDENTITY

    monkeypatch.setattr(envelopes, "rollout_pb2", Module)
    return seen


@pytest.mark.parametrize("name", list(BOMBS))
def test_a_few_hundred_bytes_never_become_a_million_objects(name: str, parsed_bytes: list[int]) -> None:
    sealed = compressed(BOMBS[name]())
    assert sealed.size_bytes < 1500
    opened = open_group(sealed, LIMITS.max_group_bytes, LIMITS.counts)
    assert isinstance(opened, Refused) and opened.reason is not RefusalReason.TOO_LARGE
    assert sum(parsed_bytes) <= MAX_ELEMENTS


def test_a_bomb_that_nobody_compressed_is_refused_before_it_is_parsed(parsed_bytes: list[int]) -> None:
    sealed = seal_bytes(with_trace(token_ids=[0] * 1_000_000), EVE)
    assert isinstance(open_group(sealed, LIMITS.max_group_bytes, LIMITS.counts), Refused)
    assert not parsed_bytes


@pytest.mark.parametrize("max_new_tokens", [8, 512, 4096])
@pytest.mark.parametrize("group_size", [2, 8, 64])
def test_an_honest_group_of_any_run_is_opened(group_size: int, max_new_tokens: int) -> None:
    limits = AdmissionLimits(group_size=group_size, max_new_tokens=max_new_tokens, max_group_bytes=64 * 2**20)
    body = group_to_body(make_group(EVE.node_id, texts=["7"] * group_size))
    body.prompt_ids.extend(np.random.default_rng(0).integers(0, 50_000, 20_000).tolist())
    version = rollout_pb2.TokenTrace()
    version.CopyFrom(body.rollouts[0].trace)
    for rollout in body.rollouts:
        trace = rollout.trace
        trace.Clear()
        trace.token_ids.extend([49_000] * max_new_tokens)
        trace.action_runs.append(max_new_tokens)
        trace.logprobs = bytes(4 * max_new_tokens)
        trace.byte_lengths.extend([3] * max_new_tokens)
        for start in range(min(max_new_tokens, limits.max_age_steps + 1)):
            version.spans[0].start = start
            trace.spans.append(version.spans[0])
        rollout.text = "abc" * max_new_tokens
    opened = open_group(compressed(body.SerializeToString()), limits.max_group_bytes, limits.counts)
    assert isinstance(opened, RolloutGroup), opened


def test_a_group_of_another_configuration_is_opened_and_refused_for_what_it_is() -> None:
    group = make_group(EVE.node_id)
    assert isinstance(open_group(seal_group(group, EVE), 2**20, LIMITS.counts), RolloutGroup)


def test_what_is_stored_opens_whatever_its_prompt() -> None:
    opened = open_group(compressed(with_prompt(500_000)), LIMITS.max_group_bytes)
    assert isinstance(opened, RolloutGroup)
