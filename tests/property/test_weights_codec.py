"""Patches are lossless for every dtype and every bit pattern, and nothing else decodes."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.types import PolicyVersion
from swarm.weights import delta, segment
from swarm.weights.apply import VerifiedVersion, stage
from swarm.weights.codec import Codec, decode, encode
from swarm.weights.delta import decode_delta, encode_delta
from swarm.weights.payload import MalformedPayload, Unusable
from swarm.weights.publish import publish
from swarm.weights.tensors import DTYPES, HostTensor, TensorSpec, Weights, published_digest, specs_of

SHAPES = [(), (0,), (1,), (3, 0), (7,), (64,), (65,), (3, 5), (40, 33), (300,)]


@st.composite
def weights(draw: st.DrawFn, seed: int = 0) -> dict[str, HostTensor]:
    """Up to five tensors of any dtypes and shapes; patterns uniform over all bits, or like trained weights."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)) + seed)
    count = draw(st.integers(0, 5))
    names = [f"layer.{number}.weight" for number in range(count)]
    tensors: dict[str, HostTensor] = {}
    for name in names:
        spec = TensorSpec(name=name, dtype=draw(st.sampled_from(sorted(DTYPES))), shape=draw(st.sampled_from(SHAPES)))
        tensors[name] = HostTensor(spec=spec, bits=patterns(rng, spec, draw(st.booleans())))
    return tensors


def patterns(rng: np.random.Generator, spec: TensorSpec, is_uniform: bool) -> np.ndarray[Any, Any]:
    size = spec.info.size
    if is_uniform or spec.info.mantissa_bits is None or size == 1:
        return rng.integers(0, 256, spec.num_elements * size, np.uint8).view(f"<u{size}")
    wide = 0.05 * rng.standard_normal(spec.num_elements)
    if spec.dtype == "bfloat16":
        return (wide.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return wide.astype(f"<f{size}").view(f"<u{size}")


def changed(
    rng: np.random.Generator, base: Weights, density: float, largest_step: int, *, is_finite: bool = False
) -> dict[str, HostTensor]:
    """A copy with some patterns moved by some steps, and a few replaced by rare ones, a NaN only if not `is_finite`."""
    result: dict[str, HostTensor] = {}
    for name, tensor in base.items():
        bits, info = tensor.bits.copy(), tensor.spec.info
        touched = rng.random(len(bits)) < density
        bits[touched] += rng.integers(1, largest_step + 1, int(touched.sum())).astype(bits.dtype)
        if len(bits) > 3:
            sign = 1 << (8 * info.size - 1)
            all_ones = (1 << (8 * info.size)) - 1  # a NaN with payload
            bits[:3] = [sign, 0, sign + 1 if is_finite else all_ones]  # -0.0, 0.0
        result[name] = HostTensor(spec=tensor.spec, bits=bits)
    return result


def equal(one: Weights, other: Weights) -> bool:
    return specs_of(one) == specs_of(other) and all(
        one[name].bits.tobytes() == other[name].bits.tobytes() for name in one
    )


def applied(base: Weights, payload: bytes) -> dict[str, HostTensor]:
    return {tensor.spec.name: tensor for tensor in decode_delta(base, [payload])}


@given(base=weights(), data=st.data())
@settings(max_examples=120, deadline=None)
def test_a_patch_gives_the_target_bit_for_bit_and_leaves_the_base(base: Weights, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    density = data.draw(st.sampled_from([0.0, 0.01, 0.2, 0.9, 1.0]))
    target = changed(rng, base, density, data.draw(st.sampled_from([1, 3, 200])))
    before = published_digest(base)
    payload = b"".join(encode_delta(base, target))
    assert equal(applied(base, payload), target)
    assert published_digest(base) == before
    assert b"".join(encode_delta(base, target)) == payload


@given(data=st.data(), dtype=st.sampled_from(sorted(DTYPES)))
@settings(max_examples=60, deadline=None)
def test_unrelated_patterns_survive_too(data: st.DataObject, dtype: str) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    spec = TensorSpec(name="w", dtype=dtype, shape=(data.draw(st.integers(0, 400)),))
    base, target = ({"w": HostTensor(spec=spec, bits=patterns(rng, spec, True))} for _ in range(2))
    assert equal(applied(base, b"".join(encode_delta(base, target))), target)


@given(base=weights(), cuts=st.lists(st.integers(1, 50), min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_a_full_version_survives_in_parts_of_any_size(base: Weights, cuts: list[int]) -> None:
    payload = b"".join(encode(Codec.FULL, base, None))
    parts: list[bytes] = []
    while payload:
        size = cuts[len(parts) % len(cuts)]
        parts.append(payload[:size])
        payload = payload[size:]
    found = {tensor.spec.name: tensor for tensor in decode(specs_of(base), parts, None)}
    assert equal(found, base)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_pieces_and_segments_of_any_size_give_the_same(data: st.DataObject) -> None:
    sizes = pytest.MonkeyPatch()
    piece = data.draw(st.sampled_from([64, 128, 4096]))
    sizes.setattr(segment, "PIECE", piece)
    sizes.setattr(delta, "PIECE", piece)
    sizes.setattr(segment, "SEGMENT_CHANGES", data.draw(st.sampled_from([1, 50, 1 << 20])))
    sizes.setattr(segment, "SEGMENT_PIECES", data.draw(st.sampled_from([1, 3, 4096])))
    try:
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        base = trained(rng)
        target = changed(rng, base, data.draw(st.sampled_from([0.01, 0.3])), 3)
        assert equal(applied(base, b"".join(encode_delta(base, target))), target)
    finally:
        sizes.undo()


def trained(rng: np.random.Generator, num: int = 2000) -> dict[str, HostTensor]:
    specs = [
        TensorSpec(name="a", dtype="bfloat16", shape=(num,)),
        TensorSpec(name="b", dtype="float32", shape=(40, 5)),
        TensorSpec(name="c", dtype="bfloat16", shape=(20, 7)),
        TensorSpec(name="d", dtype="int64", shape=(9,)),
    ]
    return {spec.name: HostTensor(spec=spec, bits=patterns(rng, spec, False)) for spec in specs}


# --- whole versions ----------------------------------------------------------------------------


def held(weights: Weights, step: int) -> VerifiedVersion:
    version = PolicyVersion(policy_id="a" * 64, step=step, digest=published_digest(weights))
    return VerifiedVersion(version=version, weights=weights)


def published(target: VerifiedVersion, base: VerifiedVersion | None, **options: Any) -> tuple[Any, list[bytes]]:
    chunks: dict[bytes, bytes] = {}
    manifest = publish(target, base, chunks.__setitem__, **options)
    return manifest, [chunks[digest] for digest in manifest.chunks]


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_any_flipped_bit_of_a_payload_is_refused(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 20)))
    base = held(trained(rng), 1)
    target = held(changed(rng, base.weights, 0.05, 3), 2)
    manifest, chunks = published(target, data.draw(st.sampled_from([base, None])))
    payload = bytearray(b"".join(chunks))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    found = stage(manifest, [bytes(payload)], base)
    assert isinstance(found, Unusable) and found.reason == "wrong_chunk"


@given(data=st.data())
@settings(max_examples=300, deadline=None)
def test_a_forged_payload_raises_nothing_but_malformed_and_never_grows(data: st.DataObject) -> None:
    """The decoder alone, without the digests in front of it."""
    rng = np.random.default_rng(data.draw(st.integers(0, 20)))
    base = trained(rng)
    target = changed(rng, base, data.draw(st.sampled_from([0.01, 0.5])), 300)
    payload = bytearray(b"".join(encode_delta(base, target)))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from([len(payload), len(payload), data.draw(st.integers(0, len(payload)))]))
    mutate: Callable[[], dict[str, HostTensor]] = lambda: applied(base, bytes(payload[:cut]))  # noqa: E731
    try:
        found = mutate()
    except MalformedPayload:
        return
    assert specs_of(found) == specs_of(target)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_truncated_and_oversized_payloads_are_refused(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 20)))
    base = trained(rng)
    payload = b"".join(encode_delta(base, changed(rng, base, 0.1, 2)))
    with pytest.raises(MalformedPayload):
        applied(base, payload[: data.draw(st.integers(0, len(payload) - 1))])
    with pytest.raises(MalformedPayload):
        applied(base, payload + data.draw(st.binary(min_size=1, max_size=40)))


@given(data=st.data(), num_steps=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_one_patch_from_end_to_end_equals_replaying_each(data: st.DataObject, num_steps: int) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    versions = [held(trained(rng), 0)]
    for step in range(1, num_steps + 1):
        versions.append(held(changed(rng, versions[-1].weights, 0.1, 2, is_finite=True), step))
    replayed = versions[0]
    for base, target in pairwise(versions):
        found = stage(*published(target, base), base=replayed)
        assert isinstance(found, VerifiedVersion)
        replayed = found
    direct = stage(*published(versions[-1], versions[0], delta_at_most=2.0), base=versions[0])
    assert isinstance(direct, VerifiedVersion)
    assert direct.version == replayed.version == versions[-1].version
    assert equal(direct.weights, replayed.weights)
