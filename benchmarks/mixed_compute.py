"""Swarms whose nodes compute in one dtype or in two: accuracy, refused groups, and the distance of log-probs.

python -m benchmarks.mixed_compute --preset tiny --nodes 4 --seeds 3       # 3 runs a seed, about a minute each
python -m benchmarks.mixed_compute --preset smollm --seeds 2 --out runs/mixed

Prints a table in Markdown: a row for each way to compute, means over seeds with the standard deviation.
"""

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, pstdev
from typing import Final

from swarm.events import GroupAdmitted, GroupRefused, PolicyEvaluated, StepMade, events_of
from swarm.simulate.presets import PRESETS, SimulationOptions, node_configs
from swarm.telemetry import read_events

DTYPES: Final = {"float32": ("float32",), "bfloat16": ("bfloat16",), "both": ("bfloat16", "float32")}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Accuracy and exchange of one run."""

    accuracy: float  # mean over nodes and environments, all problems, after the last step
    kl: float  # mean over steps, nats per token, learner against generators
    num_admitted: int
    refused: Counter[str]  # reason -> groups


def run(preset: str, num_nodes: int | None, rounds: int | None, seed: int, dtypes: Sequence[str], out: Path) -> Outcome:
    """Simulates once, in processes of its own. Raises CalledProcessError where an invariant broke."""
    options = SimulationOptions(preset=preset, nodes=num_nodes, seed=seed)
    names = [config.name for config in node_configs(options, out)]
    command = [sys.executable, "-m", "swarm.cli.main", "simulate", "--preset", preset, "--seed", str(seed)]
    command += ["--nodes", str(len(names)), "--out", str(out), "--set", "model.dtype=bfloat16"]
    command += ["--rounds", str(rounds)] if rounds else []
    for number, name in enumerate(names):
        command += ["--set", f"{name}:compute_dtype={dtypes[number % len(dtypes)]}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    events = {name: read_events(out / "swarm" / name / "events.jsonl") for name in names}
    accuracies, kls, refused = list[float](), list[float](), Counter[str]()
    for own in events.values():
        last: dict[str, float] = {}
        for event in events_of(PolicyEvaluated, own):
            if event.split == "all":
                last[event.env] = event.accuracy
        accuracies.append(fmean(last.values()))
        kls += [step.diagnostics["mismatch_kl_k3"] for step in events_of(StepMade, own) if not step.was_skipped]
        for event in events_of(GroupRefused, own):
            refused[event.reason] += event.count
    num_admitted = sum(len(events_of(GroupAdmitted, own)) for own in events.values())
    return Outcome(accuracy=fmean(accuracies), kl=fmean(kls), num_admitted=num_admitted, refused=refused)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="tiny")
    parser.add_argument("--nodes", type=int, default=None, help="default: the preset's")
    parser.add_argument("--rounds", type=int, default=None, help="default: the preset's")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=None, help="keeps the runs there")
    arguments = parser.parse_args()
    print("| computes in | accuracy | by seed | KL | admitted | refused |\n|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        found: dict[str, list[Outcome]] = {name: [] for name in DTYPES}
        for seed in range(arguments.seeds):  # one after the other, so that none has the quieter hours
            for name, dtypes in DTYPES.items():
                out = (arguments.out or Path(folder)) / f"{name}-{seed}"
                found[name].append(run(arguments.preset, arguments.nodes, arguments.rounds, seed, dtypes, out))
                print(f"{name}, seed {seed}: {found[name][-1]}", file=sys.stderr, flush=True)
    for name, outcomes in found.items():
        accuracies = [each.accuracy for each in outcomes]
        refused = sum((each.refused for each in outcomes), Counter[str]())
        words = ", ".join(f"{reason} {count}" for reason, count in refused.most_common()) or "none"
        print(
            f"| {name} | {fmean(accuracies):.3f} +- {pstdev(accuracies):.3f} | "
            f"{', '.join(f'{each:.3f}' for each in accuracies)} | {fmean(each.kl for each in outcomes):.1e} | "
            f"{sum(each.num_admitted for each in outcomes)} | {words} |"
        )


if __name__ == "__main__":
    main()
