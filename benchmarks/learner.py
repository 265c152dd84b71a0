"""What a learner step costs: our fused path against TRL's and against whole logits.

Invariant: each figure is the median over fresh processes, each of which runs one path once on the same tensors.

    python -m benchmarks.learner                        # about 15 minutes on 2 cores; TRL is measured where installed
    python -m benchmarks.learner --cases head --repetitions 5

Head: hidden states of 16 x 192 tokens, SmolLM2-135M's output layer, forward and backward. Step: SmolLM2-135M in
float32, 16 responses in two groups behind prompts of 32 tokens, forward and backward without AdamW.
"""

import argparse
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
if not __package__:  # started as a file: let `benchmarks` be found as with -m
    sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402

NUM_ROLLOUTS, LONGEST, SHORTEST = 16, 192, 32
EQUAL: Final = [LONGEST] * NUM_ROLLOUTS
RAGGED: Final = random.Random(0).choices(range(SHORTEST, LONGEST + 1), k=NUM_ROLLOUTS)
PATHS: Final = {
    "head": ("head", EQUAL, ("swarm", "function", "plain", "trl")),
    "equal": ("step", EQUAL, ("swarm", "plain", "trl")),
    "ragged": ("step", RAGGED, ("swarm", "trl")),
}
TITLES: Final = {
    "head": "output layer, 16 x 192 tokens",
    "equal": "whole step, 16 x 192 tokens",
    "ragged": f"whole step, 16 x {SHORTEST}-{LONGEST} tokens",
}
NAMES: Final = {
    "swarm": "ours",
    "function": "ours, as an autograd function",
    "plain": "whole logits",
    "trl": "TRL",
}


def child(path: str, lengths: list[int], threads: int) -> dict[str, float]:
    """Figures of one fresh process. Raises CalledProcessError when it fails."""
    command = [sys.executable, "-m", "benchmarks._learner_child", path, "--threads", str(threads)]
    command += ["--lengths", ",".join(map(str, lengths))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout.splitlines()[-1])


def markdown(figures: dict[str, dict[str, list[dict[str, float]]]]) -> str:
    """The table as it stands in docs/measurements/learner.md."""
    lines = ["| case | path | s (min - max) | peak above baseline, MiB | time of it / ours | memory of it / ours |"]
    lines.append("|---|---|---|---|---|---|")
    for case, paths in figures.items():
        ours = {key: median(run[key] for run in paths["swarm"]) for key in ("seconds", "peak_mib")}
        for name, runs in paths.items():
            seconds, peak = [run["seconds"] for run in runs], median(run["peak_mib"] for run in runs)
            spread = f"{median(seconds):.2f} ({min(seconds):.2f} - {max(seconds):.2f})"
            ratios = f"{median(seconds) / ours['seconds']:.2f} | {peak / ours['peak_mib']:.2f}"
            lines.append(f"| {TITLES[case]} | {NAMES[name]} | {spread} | {peak:.0f} | {ratios} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the cases, the paths of a repetition one after the other, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(PATHS), help="of head, equal, ragged")
    parser.add_argument("--repetitions", type=int, default=5, help="fresh processes for each path")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--without", default="", help="paths to leave out, such as plain,function")
    parser.add_argument("--same", action="store_true", help="also compare gradients with those of whole logits")
    parser.add_argument("--json", action="store_true", help="print every repetition")
    arguments = parser.parse_args()
    console = Console(stderr=True)
    left_out = set(arguments.without.split(","))
    if importlib.util.find_spec("trl") is None:
        console.print("TRL is not installed: its path is left out")
        left_out.add("trl")
    figures: dict[str, dict[str, list[dict[str, float]]]] = {}
    for case in arguments.cases.split(","):
        kind, lengths, paths = PATHS[case]
        chosen = [name for name in paths if name not in left_out]
        figures[case] = {name: [] for name in chosen}
        for repetition in range(arguments.repetitions):
            for name in chosen:  # in turn, so that what else the machine does hits all alike
                found = child(f"{kind}:{name}", lengths, arguments.threads)
                figures[case][name].append(found)
                console.print(f"{case} {repetition + 1}: {NAMES[name]} {found['seconds']:.2f} s")
    if arguments.same:
        error = child("same", EQUAL, arguments.threads)["relative_error"]
        console.print(f"largest relative error of a parameter's gradient against whole logits: {error:.1e}")
    print(json.dumps(figures) if arguments.json else markdown(figures))


if __name__ == "__main__":
    main()
