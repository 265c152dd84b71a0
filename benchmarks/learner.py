"""Cost of a learner step: our fused path against TRL's and against whole logits.

Invariant: each figure is the median over fresh processes, each of which runs one path once on the same tensors.

    python -m benchmarks.learner                        # about 15 minutes on 2 cores; TRL is measured where installed
    python -m benchmarks.learner --cases head --repetitions 5
    python -m benchmarks.learner --device cuda          # the memory is then that of tensors on the GPU

Head: hidden states of 16 x 192 tokens, SmolLM2-135M's output layer, forward and backward. Step: SmolLM2-135M in
float32, 16 responses in two groups behind prompts of 32 tokens, forward and backward without AdamW.
"""

import argparse
import importlib.util
import json
import random
import subprocess
import sys
from statistics import median
from typing import Final

from rich.console import Console

from benchmarks._baselines import ROOT, add_record, write_record

PATHS: Final = {
    "head": ("head", ("swarm", "function", "plain", "trl")),
    "equal": ("step", ("swarm", "checkpointed", "plain", "trl")),
    "ragged": ("step", ("swarm", "checkpointed", "trl")),
}
NAMES: Final = {
    "swarm": "ours",
    "function": "ours, as an autograd function",
    "checkpointed": "ours, gradient checkpointing",
    "plain": "whole logits",
    "trl": "TRL",
}


def lengths_of(case: str, rollouts: int, longest: int) -> list[int]:
    """Tokens of each response: all the longest, or from a sixth of that to it."""
    if case != "ragged":
        return [longest] * rollouts
    return random.Random(0).choices(range(longest // 6, longest + 1), k=rollouts)


def title(case: str, rollouts: int, longest: int) -> str:
    """For people."""
    tokens = f"{longest // 6}-{longest}" if case == "ragged" else str(longest)
    return f"{'output layer' if case == 'head' else 'whole step'}, {rollouts} x {tokens} tokens"


def child(path: str, lengths: list[int], threads: int, device: str = "cpu") -> dict[str, float]:
    """Figures of one fresh process. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "benchmarks._learner_child", path, "--threads", str(threads), "--device", device]
    command += ["--lengths", ",".join(map(str, lengths))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


def markdown(figures: dict[str, dict[str, list[dict[str, float]]]], rollouts: int, longest: int) -> str:
    """The table as it stands in docs/measurements/learner.md."""
    columns = ("case", "path", "CPU s (min - max)", "wall s", "peak above baseline, MiB", "CPU / ours", "memory / ours")
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for case, paths in figures.items():
        ours = {key: median(run[key] for run in paths["swarm"]) for key in ("cpu_s", "peak_mib")}
        for name, runs in paths.items():
            cpu_s, wall_s = [run["cpu_s"] for run in runs], median(run["seconds"] for run in runs)
            peak = median(run["peak_mib"] for run in runs)
            spread = f"{median(cpu_s):.2f} ({min(cpu_s):.2f} - {max(cpu_s):.2f}) | {wall_s:.2f}"
            ratios = f"{median(cpu_s) / ours['cpu_s']:.2f} | {peak / ours['peak_mib']:.2f}"
            lines.append(f"| {title(case, rollouts, longest)} | {NAMES[name]} | {spread} | {peak:.0f} | {ratios} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the cases, the paths of a repetition one after the other, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(PATHS), help="of head, equal, ragged")
    parser.add_argument("--repetitions", type=int, default=5, help="fresh processes for each path")
    parser.add_argument("--rollouts", type=int, default=16, help="responses, a multiple of 8")
    parser.add_argument("--longest", type=int, default=192, help="tokens of the longest response")
    parser.add_argument("--threads", type=int, default=1, help="torch threads; CPU time means most with one")
    parser.add_argument("--device", default="cpu", help="torch device of all tensors")
    parser.add_argument("--without", default="", help="paths to leave out, such as plain,function")
    parser.add_argument("--same", action="store_true", help="also compare gradients with those of whole logits")
    parser.add_argument("--json", action="store_true", help="print every repetition")
    add_record(parser)
    arguments = parser.parse_args()
    console = Console(stderr=True)
    left_out = set(arguments.without.split(","))
    if importlib.util.find_spec("trl") is None:
        console.print("TRL is not installed: its path is left out")
        left_out.add("trl")
    figures: dict[str, dict[str, list[dict[str, float]]]] = {}
    for case in filter(None, arguments.cases.split(",")):
        kind, paths = PATHS[case]
        lengths = lengths_of(case, arguments.rollouts, arguments.longest)
        chosen = [name for name in paths if name not in left_out]
        figures[case] = {name: [] for name in chosen}
        for repetition in range(arguments.repetitions):
            for name in chosen:  # in turn, so that what else the machine does hits all alike
                found = child(f"{kind}:{name}", lengths, arguments.threads, arguments.device)
                figures[case][name].append(found)
                console.print(f"{case} {repetition + 1}: {NAMES[name]} {found['seconds']:.2f} s")
    if arguments.same:
        lengths = lengths_of("equal", arguments.rollouts, arguments.longest)
        error = child("same", lengths, arguments.threads, arguments.device)["relative_error"]
        console.print(f"largest relative error of a parameter's gradient against whole logits: {error:.1e}")
    recorded = {
        f"{case}, {name}, {key}": median(run[key] for run in runs)
        for case, paths in figures.items()
        for name, runs in paths.items()
        for key in ("cpu_s", "peak_mib")
    }
    write_record(arguments.record, "learner", None, recorded)
    shape = arguments.rollouts, arguments.longest
    print(json.dumps(figures) if arguments.json else markdown(figures, *shape))


if __name__ == "__main__":
    main()
