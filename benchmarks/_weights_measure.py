"""Size and speed of one step between two versions: by our codec, by every rival, and as a whole sync.

Invariant: what is timed was checked to be lossless in the same run.
"""

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import zstandard

from swarm.identity import Identity
from swarm.types import PolicyVersion
from swarm.weights.apply import VerifiedVersion, stage
from swarm.weights.delta import decode_delta, encode_delta
from swarm.weights.manifest import seal_manifest
from swarm.weights.publish import publish
from swarm.weights.tensors import TorchWeights, published_digest
from swarm.weights.ulp_delta import ulp_deltas

REPETITIONS: Final = 3
ZSTD_LEVEL: Final = 1
ESCAPE: Final = 255
Array = np.ndarray[Any, np.dtype[Any]]
Clock = Callable[[], float]


def timed(work: Callable[[], Any], *clocks: Clock) -> tuple[list[float], Any]:
    """Seconds by each clock, each the best of three, and the result."""
    best, result = [float("inf")] * len(clocks), None
    for _ in range(REPETITIONS):
        result = None  # before the next one is made
        starts = [clock() for clock in clocks]
        result = work()
        best = [min(least, clock() - start) for least, clock, start in zip(best, clocks, starts, strict=True)]
    return best, result


def measure_rivals(base: TorchWeights, target: TorchWeights) -> dict[str, Any]:
    """Bytes of every simpler way to write the whole change, and the entropy floor.

    Every rival is lossless and vectorised, and is given the places that changed for nothing.
    """
    before, after = (np.concatenate([w[spec.name].bits for spec in w.specs]) for w in (base, target))
    (info,) = {spec.info for spec in target.specs}  # one dtype
    at = np.flatnonzero(before != after)
    old, new = before[at], after[at]
    steps = ulp_deltas(old, new, info)
    places, gaps = at.astype(np.int32).tobytes(), _gaps_bytes(at)
    density = len(at) / len(after)
    _, counts = np.unique(steps, return_counts=True)
    floor_bits = _entropy_bits(np.array([len(at), len(after) - len(at)])) + _entropy_bits(counts)
    return {
        "density": density,
        "floor_bytes": floor_bits / 8,  # independent places at one density, independent steps from their own histogram
        "rivals": {
            "full + zstd": _zstd_bytes(after.tobytes()),
            "int32 + bf16 pairs": len(places) + new.nbytes,  # as most published systems send it
            "pairs + zstd": _zstd_bytes(places) + _zstd_bytes(new.tobytes()),
            "gaps + overwrite": gaps + _plane_bytes(new),
            "gaps + XOR": gaps + _plane_bytes(old ^ new),
            "gaps + ulp steps": gaps + _plane_bytes(steps),
        },
    }


def _gaps_bytes(at: Array) -> int:
    """uint8 gaps between places, ESCAPE for one that is in the second stream."""
    gaps = np.diff(at, prepend=-1) - 1
    long_ones = gaps[gaps >= ESCAPE].astype(np.uint32)
    return _zstd_bytes(np.minimum(gaps, ESCAPE).astype(np.uint8).tobytes()) + _zstd_bytes(long_ones.tobytes())


def _plane_bytes(values: Array) -> int:
    """Byte planes, each compressed."""
    planes = values.view(np.uint8).reshape(len(values), values.dtype.itemsize)
    return sum(_zstd_bytes(planes[:, place].tobytes()) for place in range(values.dtype.itemsize))


def _zstd_bytes(data: bytes) -> int:
    return len(zstandard.compress(data, ZSTD_LEVEL)) if data else 0


def _entropy_bits(counts: Array) -> float:
    """Total bits of a sequence with these counts."""
    known = counts[counts > 0].astype(np.float64)
    return float((known * np.log2(known.sum() / known)).sum())


def measure_ours(base: TorchWeights, target: TorchWeights, clock: Clock = time.thread_time) -> dict[str, Any]:
    """Bytes and speed of the codec."""
    num_bytes = sum(spec.num_bytes for spec in target.specs)
    (encode_s,), payload = timed(lambda: list(encode_delta(base, target)), clock)
    (decode_s,), _ = timed(lambda: deque(decode_delta(base, payload), maxlen=0), clock)
    for tensor in decode_delta(base, payload):
        assert tensor.bits.tobytes() == target[tensor.spec.name].bits.tobytes(), tensor.spec.name
    return {
        "full_bytes": num_bytes,
        "ours_bytes": sum(map(len, payload)),
        "encode_gb_s": num_bytes / encode_s / 1e9,
        "decode_gb_s": num_bytes / decode_s / 1e9,
    }


def measure_transfer(base: TorchWeights, target: TorchWeights) -> dict[str, Any]:
    """A whole sync: publish with every hash, then stage with every check. Speeds by the clock, then by CPU seconds."""
    held = [
        VerifiedVersion(version=PolicyVersion(policy_id="a" * 64, step=step, digest=published_digest(one)), weights=one)
        for step, one in enumerate((base, target))
    ]
    chunks: dict[bytes, bytes] = {}
    clocks = (time.perf_counter, time.process_time)
    publish_s, manifest = timed(lambda: publish(held[1], held[0], chunks.__setitem__), *clocks)
    payload = [chunks[digest] for digest in manifest.chunks]
    stage_s, staged = timed(lambda: stage(manifest, payload, held[0]), *clocks)
    assert isinstance(staged, VerifiedVersion) and staged.version == held[1].version
    num_bytes = sum(spec.num_bytes for spec in target.specs)
    sealed = seal_manifest(manifest, Identity.create())
    return {
        "manifest_bytes": len(sealed.body) + len(sealed.signature) + len(sealed.public_key),
        "publish_gb_s": [num_bytes / seconds / 1e9 for seconds in publish_s],
        "stage_gb_s": [num_bytes / seconds / 1e9 for seconds in stage_s],
    }
