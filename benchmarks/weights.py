"""Size of the step from one published version to the next, and speed of coding it.

    python -m benchmarks.weights [--steps 40] [--every 1] [--rates 1e-6,3e-6,1e-5] [--json FILE]
    python -m benchmarks.weights --device cuda [--parameters 1e9]

SmolLM2-135M is trained on sums by `PolicyLearner` at each learning rate (once; kept in the cache directory), and every
step between consecutive published bf16 versions is coded. Masters start exactly on bf16 values, which makes the first
steps easy: the first and the last 8 are reported on their own, with every rival. Rivals are concatenated
per way over the whole model before zstd, so that none of them pays for small streams. Times of encoding and decoding
are CPU seconds of one thread, best of three; `publish` and `stage` hash in a second thread, so theirs are of the clock,
with the CPU seconds of both beside them.

With --device there is no run: random weights and one step of the size of an optimizer's are made on that device, and
coded from there. Those sizes say nothing about training; times are of the clock.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks._baselines import add_record, write_record
from benchmarks._weights_made import measure_made
from benchmarks._weights_measure import measure_ours, measure_rivals, measure_transfer
from benchmarks._weights_run import versions
from benchmarks._weights_table import made_table, run_tables
from swarm.weights.tensors import TorchWeights

WINDOW = 8  # steps that are reported together


def windows_of(num_steps: int) -> list[range]:
    """The first steps, and the last ones where they are others."""
    first = range(1, min(WINDOW, num_steps) + 1)
    return [first] if num_steps < 2 * WINDOW else [first, range(num_steps - WINDOW + 1, num_steps + 1)]


def pairs_of(learning_rate: float, num_steps: int) -> Iterator[tuple[int, TorchWeights, TorchWeights]]:
    """Steps of one run, with the version before and after each."""
    for step, (base, target) in enumerate(pairwise(map(TorchWeights, versions(learning_rate, num_steps))), start=1):
        print(f"lr {learning_rate:.0e} step {step}", file=sys.stderr)
        yield step, base, target


def measure_rate(learning_rate: float, num_steps: int, every: int) -> dict[str, Any]:
    """One run: our codec on each step of the windows and each one that `every` divides."""
    windows = windows_of(num_steps)
    steps: dict[int, dict[str, Any]] = {}
    results: list[dict[str, Any]] = [{"steps": [window[0], window[-1]]} for window in windows]
    run: dict[str, Any] = {"learning_rate": learning_rate, "windows": results, "by_step": steps}
    starts: dict[int, TorchWeights] = {}  # the version before each window
    for step, base, target in pairs_of(learning_rate, num_steps):
        if step % every == 0 or any(step in window for window in windows):
            steps[step] = measure_ours(base, target)
        for window, result in zip(windows, results, strict=True):
            if step == window[0]:
                starts[step] = base
            if step == window[-1]:
                result["transfer"] = measure_transfer(base, target)
                result["direct"] = measure_ours(starts[window[0]], target)
        if step == num_steps:
            run["direct"] = measure_ours(starts[1], target)
    return run


def add_rivals(run: dict[str, Any], num_steps: int) -> None:
    """Adds the bytes of the other ways to each step of the windows; in a pass of its own: their arrays are large."""
    windows = windows_of(num_steps)
    for step, base, target in pairs_of(run["learning_rate"], num_steps):
        if any(step in window for window in windows):
            run["by_step"][step] |= measure_rivals(base, target)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=1, help="between the windows, measure each step that this divides")
    parser.add_argument("--rates", default="1e-6,3e-6,1e-5", help="learning rates, comma-separated")
    parser.add_argument("--device", default=None, help="code made-up weights from this torch device instead")
    parser.add_argument("--parameters", type=float, default=1e9, help="how many, with --device")
    parser.add_argument("--json", type=Path, default=None, help="also write every figure to this file")
    add_record(parser)
    arguments = parser.parse_args()
    rates = [float(rate) for rate in arguments.rates.split(",")]
    if arguments.device is not None:
        results = [measure_made(arguments.device, int(arguments.parameters), rate) for rate in rates]
        text = made_table(results)
        kinds = ("ours_bytes", "encode_gb_s", "decode_gb_s")
        figures = {f"lr {one['learning_rate']:.0e}, {kind}": one["ours"][kind] for one in results for kind in kinds}
    else:
        results = [measure_rate(rate, arguments.steps, arguments.every) for rate in rates]
        for run in results:
            add_rivals(run, arguments.steps)
        text = run_tables(results)
        figures = {
            f"lr {run['learning_rate']:.0e}, step {step}, bytes": of["ours_bytes"]
            for run in results
            for step, of in run["by_step"].items()
        }
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(text)
    write_record(arguments.record, "weights", None, figures)


if __name__ == "__main__":
    main()
