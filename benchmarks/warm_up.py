"""Own tasks in words that the small model was never shown, with and without the supervised warm-up before step 1.

python -m benchmarks.warm_up                                    # tiny, two tasks, 3 seeds: about 20 minutes
python -m benchmarks.warm_up --model smollm2 --tasks days --steps 60 --seeds 1

Prints a table in Markdown, a row for each run. `before` and `after` are held-out success at step 0, which is after the
warm-up, and at the end, with the 95 % interval of their difference; `model alone` is that of the model as it came.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from swarm.events import StepMade, WarmedUp, events_of
from swarm.telemetry import read_events
from swarm.trained.learning_evidence import read_learning

DAYS: Final = ("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday")
HEADER: Final = (
    "| task | seed | | model alone | updates, signal | before -> after | gain | verdict | steps | time | end |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)
Pair = tuple[str, str]  # question, answer


def days(source: random.Random) -> Pair:
    """Weekday arithmetic, which the tiny model knows nothing of."""
    day, later = source.randrange(7), source.randint(1, 30)
    return f"which day is {later} days after {DAYS[day]}?", DAYS[(day + later) % 7]


def order(source: random.Random) -> Pair:
    """Letters in order, which the tiny model half knows by another name (`sort:`)."""
    word = "".join(source.choice("abcdefgh") for _ in range(source.randint(3, 4)))
    return f"in order: {word}=", "".join(sorted(word))


TASKS: Final[dict[str, Callable[[random.Random], Pair]]] = {"days": days, "order": order}


def write_records(task: str, path: Path, count: int = 300) -> None:
    """Writes different questions of a task as a .jsonl file, the same at every call."""
    source, rows = random.Random(0), dict[str, str]()
    for _ in range(20 * count):
        rows |= [TASKS[task](source)]
        if len(rows) == count:
            break
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in rows.items()))


def run(options: argparse.Namespace, task: str, seed: int, is_warmed: bool, folder: Path) -> str:
    """Trains once, in a process of its own; returns its row of the table."""
    data, directory = folder / f"{task}.jsonl", folder / f"{task}-{seed}-{'warm' if is_warmed else 'cold'}"
    write_records(task, data)
    command = [sys.executable, "-m", "swarm.cli.main", "train", str(directory), "-m", options.model]
    command += ["--data", str(data)]
    command += ["--steps", str(options.steps), "--set", f"seed={seed}", "--set", "evaluation.num_problems=64"]
    command += ["--warm-up", "references"] if is_warmed else []
    began_s = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True)
    taken_s = time.monotonic() - began_s
    events = read_events(directory / "events.jsonl")
    num_steps = sum(not step.was_skipped for step in events_of(StepMade, events))
    warmed, alone, updates = events_of(WarmedUp, events), "", ""
    if warmed:
        report = warmed[-1].report
        alone = ", ".join(f"{accuracy:.2f}" for accuracy in report.accuracy.values())
        updates = f"{report.num_steps}, {report.signal_before} -> {report.signal_after} of {report.num_groups} groups"
    whole, verdict = read_learning(directory).whole, read_learning(directory).verdict
    shown = "not evaluated" if whole is None else f"{whole.before:.2f} -> {whole.after:.2f}"
    gain = "" if whole is None or not whole.is_change else whole.gain
    how = "" if ended.returncode == 0 else ended.stderr.strip().splitlines()[-1][:80]
    kind = "warmed up" if is_warmed else "without"
    cells = [task, str(seed), kind, alone, updates, shown, gain, str(verdict), f"{num_steps}", f"{taken_s:.0f} s", how]
    return "| " + " | ".join(cells) + " |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs every combination and prints the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.warm_up", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--tasks", nargs="+", choices=sorted(TASKS), default=sorted(TASKS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args(arguments)
    print(HEADER)
    with tempfile.TemporaryDirectory(prefix="swarm-warm-up-") as folder:
        for task in options.tasks:
            for is_warmed in (False, True):
                for seed in range(options.seeds):
                    print(run(options, task, seed, is_warmed, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
