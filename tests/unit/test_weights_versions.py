"""Manifests, staged copies, the edge to torch, and the bounds that hostile bytes meet."""

import json
import math
import struct
import tracemalloc
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import zstandard

from swarm.identity import Identity
from swarm.model.version_digest import weights_digest
from swarm.types import Canary, PolicyVersion, SealedManifest
from swarm.weights import delta
from swarm.weights.apply import VerifiedVersion, stage
from swarm.weights.codec import Codec, decode, encode
from swarm.weights.delta import decode_delta, encode_delta
from swarm.weights.manifest import Limits, Manifest, layout_digest, open_manifest, seal_manifest
from swarm.weights.payload import (
    CHUNK_BYTES,
    MalformedPayload,
    StreamReader,
    Unusable,
    UnusableReason,
    chunk_digest,
    pack,
    split_chunks,
)
from swarm.weights.publish import publish
from swarm.weights.tensors import DTYPES, TensorSpec, TorchWeights, part_of, published_digest, specs_of, to_torch

OWNER = Identity.from_seed(b"o" * 32)
LIMITS = Limits()


def held(state: dict[str, torch.Tensor], step: int) -> VerifiedVersion:
    version = PolicyVersion(policy_id=OWNER.node_id, step=step, digest=weights_digest(state))
    found = VerifiedVersion.of(TorchWeights(state), version)
    assert isinstance(found, VerifiedVersion)
    return found


def bf16(seed: int = 0, num: int = 4000) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "model.a": (0.05 * torch.randn(num // 40, 40, generator=generator)).bfloat16(),
        "model.b": torch.randn(30, generator=generator).bfloat16(),
    }


def stepped(state: dict[str, torch.Tensor], seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: (tensor.float() + 1e-4 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
        for name, tensor in state.items()
    }


def published(target: VerifiedVersion, base: VerifiedVersion | None, **options: Any) -> tuple[Manifest, list[bytes]]:
    chunks: dict[bytes, bytes] = {}
    manifest = publish(target, base, chunks.__setitem__, **options)
    return manifest, [chunks[digest] for digest in manifest.chunks]


def refusal(found: object) -> UnusableReason:
    assert isinstance(found, Unusable), found
    assert found.detail
    return found.reason


# --- the edge to torch -------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_torch_tensors_survive_with_digest_dtype_and_shape(dtype: str) -> None:
    kind = getattr(torch, dtype)
    raw = torch.arange(24, dtype=torch.uint8).view(-1)
    content = (raw % 2).view(torch.bool) if dtype == "bool" else raw.view(kind)
    state = {
        "b.matrix": content[: content.numel() // 3 * 3].reshape(3, -1),
        "a.transposed": content[: content.numel() // 3 * 3].reshape(3, -1).T,
        "c.empty": torch.zeros((0, 4), dtype=kind),
        "d.scalar": content[0],
    }
    weights = TorchWeights(state)
    assert published_digest(weights) == weights_digest(state)
    assert [spec.name for spec in specs_of(weights)] == sorted(state)
    for name, tensor in state.items():
        back = to_torch(weights[name])
        assert back.dtype == kind and back.shape == tensor.shape
        assert back.contiguous().reshape(-1).view(torch.uint8).equal(tensor.contiguous().reshape(-1).view(torch.uint8))


def test_the_full_payload_is_a_safetensors_file() -> None:
    from safetensors.torch import load

    state = {**bf16(), "x.counts": torch.arange(5), "x.half": torch.ones(3, dtype=torch.float16)}
    found = load(b"".join(encode(Codec.FULL, TorchWeights(state), None)))
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_adapters_travel_alone_in_full_or_as_a_patch() -> None:
    first = {f"layers.{place}.q_proj.lora_{factor}": torch.randn(8, 4) for place in range(3) for factor in "ab"}
    second = stepped(first)
    old, new = held(first, 1), held(second, 2)
    whole, chunks = published(old, None)
    assert whole.codec is Codec.LORA and whole.base is None and isinstance(stage(whole, chunks, None), VerifiedVersion)
    patch, chunks = published(new, old, delta_at_most=2.0)
    assert patch.codec is Codec.LORA and patch.base == old.version
    found = stage(patch, chunks, old)
    assert isinstance(found, VerifiedVersion) and found.version == new.version
    with pytest.raises(ValueError, match="adapter factors and nothing else"):
        list(encode(Codec.LORA, TorchWeights(bf16()), None))


def test_a_patch_between_different_layouts_is_refused() -> None:
    base = bf16()
    for other in (
        {**base, "more": torch.zeros(1)},
        {"model.a": base["model.a"]},
        {**base, "model.b": base["model.b"].float()},
        {**base, "model.b": base["model.b"].reshape(5, 6)},
    ):
        with pytest.raises(ValueError, match="equal names, dtypes and shapes"):
            list(encode_delta(TorchWeights(base), TorchWeights(other)))


# --- publish and stage -------------------------------------------------------------------------


def test_a_staged_version_is_the_published_one_and_a_base_for_the_next() -> None:
    old, new = held(bf16(), 1), held(stepped(bf16()), 2)
    manifest, chunks = published(new, old)
    assert manifest.codec is Codec.DELTA and manifest.base == old.version and not manifest.tensors
    found = stage(manifest, chunks, old)
    assert isinstance(found, VerifiedVersion)
    assert weights_digest({n: to_torch(found.weights[n]) for n in found.weights}) == new.version.digest
    again = stage(*published(held(stepped(bf16(), 2), 3), found), base=found)
    assert isinstance(again, VerifiedVersion) and again.version.step == 3


@pytest.mark.parametrize(("share", "codec"), [(0.01, Codec.DELTA), (0.2, Codec.DELTA), (1.0, Codec.FULL)])
def test_a_version_is_published_in_full_where_much_of_it_changed(share: float, codec: Codec) -> None:
    first, noise = torch.randn(5000), torch.randn(5000)
    second = torch.where(torch.arange(5000) < share * 5000, noise, first)
    old, new = held({"w": first}, 1), held({"w": second}, 2)
    manifest, chunks = published(new, old)
    assert manifest.codec is codec and (manifest.base is None) == (codec is Codec.FULL)
    assert manifest.payload_bytes == sum(map(len, chunks))
    assert isinstance(stage(manifest, chunks, old), VerifiedVersion)


@pytest.mark.parametrize("is_seen_by_the_sample", [True, False])
def test_no_chunk_of_a_patch_that_is_given_up_is_handed_on(
    is_seen_by_the_sample: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_seen_by_the_sample:  # two slices, one at the start and one in the middle
        monkeypatch.setattr(delta, "_SLICE", 1 << 10)
        monkeypatch.setattr(delta, "_SAMPLED", 1 << 11)
    size = 1 << 21
    first, noise = torch.randn(size), torch.randn(size)
    is_changed = torch.ones(size, dtype=torch.bool)
    if not is_seen_by_the_sample:
        is_changed[: 1 << 10] = is_changed[size // 2 : size // 2 + (1 << 10)] = False
    old, new = held({"w": first}, 1), held({"w": torch.where(is_changed, noise, first)}, 2)
    seen = delta.sample_changes(old.weights, new.weights).num_bytes
    assert (seen > 0.5 * 4 * size) == is_seen_by_the_sample
    put: list[bytes] = []
    manifest = publish(new, old, lambda digest, chunk: put.append(digest))
    assert manifest.codec is Codec.FULL and manifest.base is None
    assert tuple(put) == manifest.chunks


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_a_patch_takes_is_known_from_a_sample(dtype: torch.dtype) -> None:
    base = {"w": (0.05 * torch.randn(1 << 20)).to(dtype)}
    for size in (1e-6, 1e-4, 1e-2):
        target = {"w": (base["w"].float() + size * torch.randn(1 << 20)).to(dtype)}
        old, new = TorchWeights(base), TorchWeights(target)
        taken = sum(map(len, encode_delta(old, new)))
        assert delta.sample_changes(old, new).num_bytes == pytest.approx(taken, rel=0.1, abs=1000)


def test_tensors_of_the_host_are_read_where_they_are() -> None:
    state = {"a": torch.randn(1000).bfloat16(), "b": torch.randn(10, 10).T}
    weights = TorchWeights(state)
    for _ in range(2):
        assert weights["a"].bits.ctypes.data == state["a"].data_ptr()
    assert part_of(weights, "a", slice(3, 8)).ctypes.data == state["a"].data_ptr() + 6
    assert part_of(weights, "b", slice(3, 8)).tolist() == weights["b"].bits[3:8].tolist()
    assert weights["b"].bits.view(np.float32).tolist() == state["b"].contiguous().reshape(-1).tolist()


def test_a_patch_is_refused_on_another_base() -> None:
    old, new = held(bf16(), 1), held(stepped(bf16()), 2)
    manifest, chunks = published(new, old)
    other = held(bf16(seed=5), 1)
    asked: list[bytes] = []
    watched = (asked.append(chunk) or chunk for chunk in chunks)
    assert refusal(stage(manifest, watched, other)) is UnusableReason.WRONG_BASE
    assert refusal(stage(manifest, watched, None)) is UnusableReason.WRONG_BASE
    assert refusal(stage(manifest, watched, new)) is UnusableReason.WRONG_BASE
    assert not asked, "a chunk was read before the base was checked"


def test_weights_that_are_not_the_version_are_not_held() -> None:
    version = replace(held(bf16(), 1).version, digest=bytes(32))
    assert refusal(VerifiedVersion.of(TorchWeights(bf16()), version)) is UnusableReason.WRONG_TARGET


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_version_with_a_number_that_is_not_finite_is_refused(bad: float, dtype: torch.dtype) -> None:
    state = {"w": torch.linspace(-1, 1, 3000).to(dtype)}
    changed = {"w": state["w"].clone()}
    changed["w"][1234] = bad
    old, new = held(state, 1), held(changed, 2)
    assert refusal(stage(*published(new, old, delta_at_most=2.0), old)) is UnusableReason.NOT_FINITE
    assert refusal(stage(*published(new, None), None)) is UnusableReason.NOT_FINITE
    changed["w"][1234] = torch.finfo(dtype).max
    assert isinstance(stage(*published(held(changed, 2), old, delta_at_most=2.0), old), VerifiedVersion)


def test_a_manifest_that_lies_about_its_content_is_found_out() -> None:
    old, new = held(bf16(), 1), held(stepped(bf16()), 2)
    manifest, chunks = published(new, old)
    wrong_target = replace(manifest, version=replace(new.version, digest=bytes(32)))
    assert refusal(stage(wrong_target, chunks, old)) is UnusableReason.WRONG_TARGET
    wrong_tensor = replace(manifest, hashes=(manifest.hashes[0], bytes(32)))
    assert refusal(stage(wrong_tensor, chunks, old)) is UnusableReason.WRONG_TENSOR
    first_wrong = replace(manifest, hashes=(bytes(32), manifest.hashes[1]))
    assert refusal(stage(first_wrong, chunks, old)) is UnusableReason.WRONG_TENSOR
    wrong_layout = replace(manifest, layout=bytes(32))
    assert refusal(stage(wrong_layout, chunks, old)) is UnusableReason.WRONG_LAYOUT


def test_chunks_in_another_order_missing_or_repeated_are_refused() -> None:
    state = {"w": torch.arange(700_000, dtype=torch.int32)}
    manifest, chunks = published(held(state, 1), None)
    assert [len(chunk) for chunk in chunks[:-1]] == [CHUNK_BYTES] * 2
    for wrong in (chunks[::-1], chunks[:-1], [*chunks, chunks[-1]], [chunks[0]] * 3, [chunks[0][:-1], *chunks[1:]], []):
        found = stage(manifest, wrong, None)
        assert refusal(found) is UnusableReason.WRONG_CHUNK
    assert isinstance(stage(manifest, chunks, None), VerifiedVersion)


def test_chunks_do_not_depend_on_how_the_payload_was_cut() -> None:
    data = np.random.default_rng(0).bytes(2 * CHUNK_BYTES + 5)
    whole = list(split_chunks([data]))
    parts = list(split_chunks(data[start : start + 300_001] for start in range(0, len(data), 300_001)))
    assert whole == parts and b"".join(whole) == data
    assert chunk_digest(whole[0]) == chunk_digest(memoryview(data)[:CHUNK_BYTES])


# --- the manifest ------------------------------------------------------------------------------


def a_manifest(with_base: bool = False) -> Manifest:
    canary = Canary(token_ids=np.array([1, 2, 3], np.int32), logprobs=np.array([np.nan, -0.5, -2.0], np.float32))
    old, new = held(bf16(), 1), held(stepped(bf16()), 2)
    return published(new, old if with_base else None, canaries=(canary,))[0]


@pytest.mark.parametrize("with_base", [False, True])
def test_a_manifest_survives_the_wire(with_base: bool) -> None:
    manifest = a_manifest(with_base)
    found = open_manifest(seal_manifest(manifest, OWNER), OWNER.node_id, LIMITS)
    assert isinstance(found, Manifest)
    assert replace(found, canaries=()) == replace(manifest, canaries=())
    (canary,) = found.canaries
    assert canary.token_ids.tolist() == [1, 2, 3]
    assert np.array_equal(canary.logprobs, manifest.canaries[0].logprobs, equal_nan=True)


def test_only_the_owner_of_a_lineage_signs_its_manifests() -> None:
    sealed = seal_manifest(a_manifest(), OWNER)
    other = Identity.from_seed(b"s" * 32)
    forged = seal_manifest(a_manifest(), other)
    assert refusal(open_manifest(forged, OWNER.node_id, LIMITS)) is UnusableReason.WRONG_OWNER
    swapped = replace(forged, public_key=sealed.public_key)
    assert refusal(open_manifest(swapped, OWNER.node_id, LIMITS)) is UnusableReason.WRONG_SIGNATURE


def signed(body: bytes) -> SealedManifest:
    """By a hostile owner, who signs anything."""
    from swarm.weights.manifest import DOMAIN_WEIGHTS

    return SealedManifest(body=body, public_key=OWNER.public_key, signature=OWNER.sign(DOMAIN_WEIGHTS, body))


@pytest.mark.parametrize("with_base", [False, True])
def test_no_body_that_a_hostile_owner_signs_raises(with_base: bool) -> None:
    body = seal_manifest(a_manifest(with_base), OWNER).body
    rng = np.random.default_rng(0)
    outcomes: set[str] = set()
    for _ in range(600):
        changed = bytearray(body[: rng.integers(0, len(body) + 1)] if rng.random() < 0.3 else body)
        for _ in range(int(rng.integers(1, 4))):
            if changed:
                changed[rng.integers(0, len(changed))] = rng.integers(0, 256)
        found = open_manifest(signed(bytes(changed)), OWNER.node_id, LIMITS)
        outcomes.add(found.reason if isinstance(found, Unusable) else "opened")
    assert {"malformed", "too_large", "opened"} <= outcomes


def test_a_manifest_over_the_receivers_limits_is_refused_before_anything_is_allocated() -> None:
    huge = TensorSpec(name="w", dtype="float32", shape=(2**39,))
    body_of = seal_manifest(
        replace(a_manifest(), tensors=(huge,), hashes=(bytes(32),), layout=layout_digest((huge,))), OWNER
    )
    many = a_manifest()
    too_long = signed(seal_manifest(many, OWNER).body + bytes(LIMITS.manifest_bytes))
    claimed = bytearray(seal_manifest(replace(many, payload_bytes=0, chunks=()), OWNER).body)
    place = len(claimed) - 8 - 2 - (2 + 3 * 8)
    assert claimed[place : place + 8] == bytes(8)
    claimed[place : place + 8] = struct.pack("<Q", 2**45)
    tracemalloc.start()
    for sealed in (body_of, too_long, signed(bytes(claimed))):
        assert refusal(open_manifest(sealed, OWNER.node_id, LIMITS)) is UnusableReason.TOO_LARGE
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()


@pytest.mark.parametrize(
    "fields",
    [
        {"name": "a b"},
        {"name": ""},
        {"name": "x" * 600},
        {"dtype": "complex64"},
        {"shape": (-1,)},
        {"shape": (1,) * 9},
        {"shape": (2**20, 2**21)},
        {"shape": (2**40, 2**40, 0)},  # no elements, and strides that torch cannot count
    ],
)
def test_a_tensor_out_of_bounds_is_no_tensor(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="tensor"):
        replace(TensorSpec(name="w", dtype="float32", shape=(1,)), **fields)


# --- hostile payloads --------------------------------------------------------------------------


def test_a_decompression_bomb_is_refused_before_it_is_given_memory() -> None:
    bomb = zstandard.compress(bytes(1 << 28), 19)
    assert len(bomb) < 1 << 17
    tracemalloc.start()
    for plain, bound in ((1 << 28, 1 << 20), (1 << 20, 1 << 20), (len(bomb) + 1, 1 << 20)):
        stream = struct.pack("<II", plain, len(bomb)) + bomb
        with pytest.raises(MalformedPayload):
            StreamReader([stream]).stream(0, bound)
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()


def test_a_frame_without_its_size_and_bytes_after_a_frame_are_refused() -> None:
    data = bytes(1000)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(data)
    doubled = zstandard.compress(data) + b"x"
    for packed in (unsized, doubled):
        with pytest.raises(MalformedPayload):
            StreamReader([struct.pack("<II", len(data), len(packed)) + packed]).stream(0, 1000)
    assert StreamReader([pack(data)]).stream(1000, 1000) == data


def test_a_segment_that_claims_many_changes_is_refused_before_it_is_read() -> None:
    """The thresholds, one piece, and headers that together claim more changes than a segment may have."""
    base = TorchWeights({"w": torch.zeros(1 << 22, dtype=torch.uint8)})
    headers = np.array([(1 << 26) - 1 | 31 << 26] * 4, "<u4").view(np.uint8).reshape(4, 4)
    planes = b"".join(pack(headers[:, place].tobytes()) for place in range(4))
    payload = b"\0" + struct.pack("<I", 4) + planes
    with pytest.raises(MalformedPayload, match="changes exceeds") as caught:
        list(decode_delta(base, [payload]))
    assert caught.value.reason is UnusableReason.TOO_LARGE


def test_a_forged_safetensors_header_is_refused_unparsed() -> None:
    weights = TorchWeights(bf16())
    payload = b"".join(encode(Codec.FULL, weights, None))
    (length,) = struct.unpack("<Q", payload[:8])
    header = json.loads(payload[8 : 8 + length])
    header["model.a"]["data_offsets"][1] += 2
    text = json.dumps(header, separators=(",", ":")).encode()
    forged = struct.pack("<Q", len(text)) + text + payload[8 + length :]
    with pytest.raises(MalformedPayload, match="header"):
        list(decode(specs_of(weights), [forged], None))
