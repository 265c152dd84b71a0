"""What one step between two versions takes: by our codec, by every other way, and as a whole sync.

Invariant: what is timed was checked to be lossless in the same run.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks._weights_rivals import RIVALS, Change, Floors, changes_between
from swarm.identity import Identity
from swarm.types import PolicyVersion
from swarm.weights.apply import VerifiedVersion, stage
from swarm.weights.delta import decode_delta, encode_delta
from swarm.weights.manifest import seal_manifest
from swarm.weights.publish import publish
from swarm.weights.tensors import TorchWeights, published_digest

REPETITIONS = 3
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


def exhausted(items: Iterable[Any]) -> None:
    """Takes all and keeps none."""
    for _ in items:
        pass


def whole(changes: list[Change]) -> Change:
    """All tensors as one."""
    starts = np.cumsum([0, *(change.num_elements for change in changes[:-1])])
    return Change(
        num_elements=sum(change.num_elements for change in changes),
        at=np.concatenate([change.at + start for change, start in zip(changes, starts, strict=True)]),
        old=np.concatenate([change.old for change in changes]),
        new=np.concatenate([change.new for change in changes]),
        steps=np.concatenate([change.steps for change in changes]),
    )


def measure_rivals(base: TorchWeights, target: TorchWeights) -> dict[str, Any]:
    """Bytes of every other way, and the floor."""
    one, floors = whole(changes_between(base, target)), Floors()
    floors.add(one)
    before, after = (np.concatenate([w[spec.name].bits for spec in w.specs]) for w in (base, target))
    return {
        "density": floors.num_changed / floors.num_elements,
        "floor_bytes": floors.iid_bytes,
        "rivals": {name: len(encode(one, before, after)) for name, encode in RIVALS.items()},
    }


def measure_ours(base: TorchWeights, target: TorchWeights, clock: Clock = time.thread_time) -> dict[str, Any]:
    """Bytes and speed of the codec."""
    num_bytes = sum(spec.num_bytes for spec in target.specs)
    (encode_s,), payload = timed(lambda: list(encode_delta(base, target)), clock)
    (decode_s,), _ = timed(lambda: exhausted(decode_delta(base, payload)), clock)
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
