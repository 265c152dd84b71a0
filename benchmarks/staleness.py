"""How old may data be? Objectives against each other on rollouts of age 0 to 64 updates and of other policies.

Invariant: a run is written whole when it is done and never made twice; a table only mixes runs of one setting.

A tiny model learns eight character tasks from batches that are exactly so many updates old, with one update
for each batch and with four; the learning rate was chosen before (docs/measurements/staleness.md).

    python -m benchmarks.staleness               # everything; stop and start again as you like
    python -m benchmarks.staleness --quick       # under 10 minutes on 2 cores
    python -m benchmarks.staleness --table       # of the runs so far, as markdown
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
if not __package__:  # started as a file: let `benchmarks` be found as with -m
    sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402

from benchmarks._runs import RunFile, Workers  # noqa: E402
from benchmarks._staleness_run import METHODS, Job, Outcome, Setting, build_start, run  # noqa: E402
from benchmarks._staleness_table import cells, markdown, plot  # noqa: E402

FULL: Final = Setting()
QUICK: Final = Setting(num_updates=96, num_problems=20, num_warm=1)
LEARNING_RATE: Final = 3e-4
HARD_LEARNING_RATE: Final = 1e-3
AGES: Final = (0, 4, 16, 64)
HARD_AGE: Final = 16
EXTERNAL_AGE: Final = 4
FOUR: Final = ("none", "PPO-clip", "GSPO", "TIS", "decoupled PPO", "BAPO", "M2PO", "MinPRO")
QUICK_METHODS: Final = ("none", "PPO-clip", "GSPO", "MinPRO", "BAPO")


def jobs(num_seeds: int, names: Sequence[str] | None = None) -> list[Job]:
    """Every run of the full tables; seed by seed, so that an unfinished table is balanced."""
    names = [method.name for method in METHODS] if names is None else names

    def job(seed: int, method: str, age: int, **changes: Any) -> Job:
        given: dict[str, Any] = {"schedule": "one", "source": "own", "learning_rate": LEARNING_RATE} | changes
        return Job(setting=FULL, method=method, age=age, seed=seed, **given)

    wanted: list[Job] = []
    for seed in range(num_seeds):
        wanted += [job(seed, name, age) for age in AGES for name in names]
        wanted += [job(seed, name, age, schedule="four") for age in AGES for name in names if name in FOUR]
        wanted += [job(seed, name, EXTERNAL_AGE, source="external") for name in names]
        wanted += [job(seed, name, HARD_AGE, learning_rate=HARD_LEARNING_RATE) for name in names]
    return wanted + [job(seed, name, 1) for seed in range(num_seeds) for name in names]


def quick_jobs(num_seeds: int, names: Sequence[str] | None = None) -> list[Job]:
    """A few methods at three ages, half as long."""
    return [
        Job(
            setting=QUICK,
            method=name,
            schedule="one",
            source="own",
            age=age,
            learning_rate=LEARNING_RATE,
            seed=seed,
        )
        for seed in range(num_seeds)
        for age in (0, 16, 64)
        for name in (QUICK_METHODS if names is None else names)
    ]


def decode(data: dict[str, Any]) -> Outcome:
    """What `dataclasses.asdict` made of an outcome, after JSON."""
    job = data["job"]
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    fields["job"] = Job(**job | {"setting": Setting(**job["setting"])})
    return Outcome(**fields)


def workers(wanted: Sequence[Job], num: int) -> Workers[Outcome]:
    """How runs are made: warm starts first, each once."""
    starts = list({job.warm_seed: job for job in wanted}.values())
    return Workers(run=run, describe=_describe, prepare=(("warm starts", starts, build_start),), num=num)


def summary(outcomes: Sequence[Outcome]) -> str:
    """The tables, with what their intervals are made of."""
    setting = outcomes[0].job.setting
    seeds = sorted({outcome.job.seed for outcome in outcomes})
    head = (
        f"{setting.num_updates} updates, seeds {', '.join(map(str, seeds))} on "
        f"{len({o.job.warm_seed for o in outcomes})} warm start(s), {len(outcomes)} runs of "
        f"{sum(o.seconds for o in outcomes) / len(outcomes):.0f} s on average. Final held-out greedy accuracy; ± is "
        "the half-width of a 95 % t interval; differences are paired by seed, bold where the interval excludes 0."
    )
    return f"{head}\n\n{markdown(cells(outcomes))}"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    names = [method.name for method in METHODS]
    made = argparse.ArgumentParser(prog="python -m benchmarks.staleness", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--quick", action="store_true", help="96 updates, five methods, ages 0, 16 and 64")
    made.add_argument("--seeds", type=int, default=0, help="runs for each cell (default 3, quick 1); more extends")
    made.add_argument("--methods", nargs="+", choices=names, help="only these")
    made.add_argument("--workers", type=int, default=2, help="processes of one thread each (default 2)")
    made.add_argument("--out", type=Path, default=ROOT / "runs" / "staleness.jsonl", help="where runs are kept")
    made.add_argument("--plot", type=Path, help="write the picture here (PNG)")
    made.add_argument("--table", action="store_true", help="only print the table of the runs that are there")
    made.add_argument("--json", action="store_true", help="print cells and runs as JSON instead of the table")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 when every wanted run exists."""
    made = parser()
    options = made.parse_args(arguments)
    if options.seeds < 0 or options.workers < 1:
        made.error("--seeds and --workers must be at least 1")
    num_seeds = options.seeds or (1 if options.quick else 3)
    wanted = (quick_jobs if options.quick else jobs)(num_seeds, options.methods)
    file = RunFile(path=options.out, decode=decode)
    console = Console(stderr=True)
    start_s = time.monotonic()
    if not options.table:
        try:
            workers(wanted, options.workers).measure(wanted, file, console)
        except KeyboardInterrupt:
            console.print(f"stopped; what is done is in {options.out}, start again to go on", soft_wrap=True)
            return 130
        console.print(f"{len(wanted)} runs in {time.monotonic() - start_s:.0f} s", highlight=False)
    place = {job: index for index, job in enumerate(wanted)}
    # One setting never mixes with another; a seed beyond those asked for is left out.
    outcomes = sorted((o for o in file.read() if o.job in place), key=lambda outcome: place[outcome.job])
    if not outcomes:
        console.print(f"{options.out} holds no run of this setting yet", soft_wrap=True)
        return 1
    if options.plot is not None:
        plot(cells(outcomes), options.plot)
    if options.json:
        print(json.dumps({"cells": [asdict(c) for c in cells(outcomes)], "runs": [asdict(o) for o in outcomes]}))
    else:
        print(summary(outcomes))
    return 0


def _describe(outcome: Outcome) -> str:
    job = outcome.job
    return (
        f"{job.method:14s} age {job.age:2d} {job.schedule:4s} {job.source:7s} lr {job.learning_rate:g} "
        f"seed {job.seed}: "
        f"final {outcome.final:.3f} AUC {outcome.auc:.3f} {outcome.seconds:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
