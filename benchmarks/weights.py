"""How small is the step from one published version to the next, and how fast is it coded?

    python -m benchmarks.weights [--steps 8] [--rates 1e-6,3e-6,1e-5] [--json FILE]

SmolLM2-135M is trained on sums by `PolicyLearner` for a few steps at each learning rate (once; kept in the cache
directory), and every step between consecutive published bf16 versions is coded in every way. Rivals are concatenated
per way over the whole model before zstd, so that none of them pays for small streams. Times are CPU seconds of one
thread, best of three.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks._weights_rivals import RIVALS, Change, Floors, changes_between
from benchmarks._weights_run import versions
from swarm.identity import Identity
from swarm.types import PolicyVersion
from swarm.weights.delta import decode_delta, encode_delta
from swarm.weights.manifest import seal_manifest
from swarm.weights.publish import Held, publish, stage
from swarm.weights.tensors import TorchWeights, published_digest

REPETITIONS = 3


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU seconds of this thread, best of three, and the result."""
    best, result = float("inf"), None
    for _ in range(REPETITIONS):
        start = time.thread_time()
        result = work()
        best = min(best, time.thread_time() - start)
    return best, result


def exhausted(items: Iterator[Any]) -> None:
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
    changes = changes_between(base, target)
    one, floors = whole(changes), Floors()
    floors.add(one)
    before, after = (np.concatenate([w[spec.name].bits for spec in w.specs]) for w in (base, target))
    return {
        "density": floors.num_changed / floors.num_elements,
        "floor_bytes": floors.iid_bytes,
        "rivals": {name: len(encode(one, before, after)) for name, encode in RIVALS.items()},
    }


def measure_ours(base: TorchWeights, target: TorchWeights) -> dict[str, Any]:
    """Bytes and speed of the codec."""
    num_bytes = sum(spec.num_bytes for spec in target.specs)
    encode_s, payload = timed(lambda: list(encode_delta(base, target)))
    decode_s, _ = timed(lambda: exhausted(decode_delta(base, payload)))
    for tensor in decode_delta(base, payload):
        assert tensor.bits.tobytes() == target[tensor.spec.name].bits.tobytes(), tensor.spec.name
    return {
        "full_bytes": num_bytes,
        "ours_bytes": sum(map(len, payload)),
        "encode_gb_s": num_bytes / encode_s / 1e9,
        "decode_gb_s": num_bytes / decode_s / 1e9,
    }


def measure_transfer(base: TorchWeights, target: TorchWeights) -> dict[str, Any]:
    """A whole sync: publish with every hash, then stage with every check."""
    held = [
        Held(version=PolicyVersion(policy_id="a" * 64, step=step, digest=published_digest(one)), weights=one)
        for step, one in enumerate((base, target))
    ]
    chunks: dict[bytes, bytes] = {}
    publish_s, manifest = timed(lambda: publish(held[1], held[0], chunks.__setitem__))
    payload = [chunks[digest] for digest in manifest.chunks]
    stage_s, staged = timed(lambda: stage(manifest, payload, held[0]))
    assert isinstance(staged, Held) and staged.version == held[1].version
    num_bytes = sum(spec.num_bytes for spec in target.specs)
    sealed = seal_manifest(manifest, Identity.create())
    return {
        "manifest_bytes": len(sealed.body) + len(sealed.signature) + len(sealed.public_key),
        "publish_gb_s": num_bytes / publish_s / 1e9,
        "stage_gb_s": num_bytes / stage_s / 1e9,
    }


def pairs_of(learning_rate: float, num_steps: int) -> Iterator[tuple[TorchWeights, TorchWeights]]:
    """Consecutive versions of one run."""
    for number, (base, target) in enumerate(pairwise(map(TorchWeights, versions(learning_rate, num_steps))), start=1):
        print(f"lr {learning_rate:.0e} step {number}", file=sys.stderr)
        yield base, target


def measure_rate(learning_rate: float, num_steps: int) -> dict[str, Any]:
    """The codec on all steps of one run, and on the way from its first version to its last."""
    steps: list[dict[str, Any]] = []
    first = base = target = None
    for base, target in pairs_of(learning_rate, num_steps):
        first = first or base
        steps.append(measure_ours(base, target))
    assert first is not None and base is not None and target is not None
    return {
        "learning_rate": learning_rate,
        "steps": steps,
        "transfer": measure_transfer(base, target),
        "catch_up": measure_ours(first, target),
    }


def add_rivals(run: dict[str, Any]) -> None:
    """Adds what the other ways take to each step of a run; apart, since their large arrays slow what follows."""
    pairs = pairs_of(run["learning_rate"], len(run["steps"]))
    for step, (base, target) in zip(run["steps"], pairs, strict=True):
        step |= measure_rivals(base, target)


def mean(run: dict[str, Any], key: str) -> float:
    """Over the steps of a run."""
    return float(np.mean([step[key] for step in run["steps"]]))


def tables(runs: list[dict[str, Any]]) -> str:
    """Markdown."""
    heads = [f"{run['learning_rate']:.0e}" for run in runs]
    rule = "|---" * (len(heads) + 1) + "|"

    def row(name: str, cells: list[str]) -> str:
        return f"| {name} | " + " | ".join(cells) + " |"

    def ratio(run: dict[str, Any], size: float) -> str:
        return f"{mean(run, 'full_bytes') / size:,.1f} x ({size / 1e6:.3f} MB)"

    lines = [row("", [f"lr {head}" for head in heads]), rule]
    shares = [[f"{100 * step['density']:.2f}" for step in run["steps"]] for run in runs]
    lines.append(row("changed weights, %, step by step", [" ".join(cells) for cells in shares]))
    for name in RIVALS:
        sizes = [float(np.mean([step["rivals"][name] for step in run["steps"]])) for run in runs]
        lines.append(row(name, [ratio(run, size) for run, size in zip(runs, sizes, strict=True)]))
    lines.append(row("iid entropy floor", [ratio(run, mean(run, "floor_bytes")) for run in runs]))
    lines.append(row("**ours**", [ratio(run, mean(run, "ours_bytes")) for run in runs]))
    worst = [min(step["full_bytes"] / step["ours_bytes"] for step in run["steps"]) for run in runs]
    best = [max(step["full_bytes"] / step["ours_bytes"] for step in run["steps"]) for run in runs]
    lines.append(row("ours, worst to best step", [f"{a:.0f} - {b:.0f} x" for a, b in zip(worst, best, strict=True)]))
    sync = [step["steps"][-1]["ours_bytes"] + step["transfer"]["manifest_bytes"] for step in runs]
    lines.append(row("last step with its manifest", [ratio(run, size) for run, size in zip(runs, sync, strict=True)]))
    for key, name in (("encode_gb_s", "encode, GB/s of weights"), ("decode_gb_s", "decode, GB/s of weights")):
        lines.append(row(name, [f"{mean(run, key):.2f}" for run in runs]))
    for key, name in (("publish_gb_s", "publish: encode and hash"), ("stage_gb_s", "stage: decode and check")):
        lines.append(row(f"{name}, GB/s", [f"{run['transfer'][key]:.2f}" for run in runs]))
    replay = [sum(step["ours_bytes"] for step in run["steps"]) for run in runs]
    lines.append(row("all steps, one patch each", [f"{size / 1e6:.3f} MB" for size in replay]))
    direct = [run["catch_up"]["ours_bytes"] for run in runs]
    cells = [f"{size / 1e6:.3f} MB ({all_ / size:.1f} x fewer)" for size, all_ in zip(direct, replay, strict=True)]
    lines.append(row("all steps, one patch from end to end", cells))
    return "\n".join(lines)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rates", default="1e-6,3e-6,1e-5", help="learning rates, comma-separated")
    parser.add_argument("--json", type=Path, default=None, help="also write every figure to this file")
    arguments = parser.parse_args()
    runs = [measure_rate(float(rate), arguments.steps) for rate in arguments.rates.split(",")]
    for run in runs:
        add_rivals(run)
    if arguments.json:
        arguments.json.write_text(json.dumps(runs, indent=1) + "\n", encoding="utf-8")
    print(tables(runs))


if __name__ == "__main__":
    main()
