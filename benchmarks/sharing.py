"""What sharing rollouts is worth: training arms against each other, seed by seed, with a negative control.

Invariant: a run is written whole when it is done and never made twice; a table only mixes runs of one setting.

Four tiny nodes in one process without network, in synchronous rounds. Modes: `heteroq` (each node asks only its
own two tasks), `spec` (nodes start as different specialists and ask all), `homo` (all alike: nothing to gain).

    python -m benchmarks.sharing                 # the full table; stop and start again as you like
    python -m benchmarks.sharing --quick         # under 5 minutes on 2 cores
    python -m benchmarks.sharing --table         # of the runs so far, as markdown
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
if not __package__:  # started as a file: let `benchmarks` be found as with -m
    sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn  # noqa: E402

from benchmarks._sharing_run import ARMS, MODES, Job, Outcome, Setting, run, starting_weights  # noqa: E402
from benchmarks._sharing_table import markdown, rows  # noqa: E402

FULL: Final = Setting()
QUICK: Final = Setting(num_rounds=30, evaluate_every=5, num_problems=20, num_warm=1)
_SEEDS: Final = {FULL: 6, QUICK: 3}


def jobs(setting: Setting, num_seeds: int, modes: Sequence[str], arms: Sequence[str]) -> list[Job]:
    """Every run of a table; seed by seed, so that an unfinished table is balanced."""
    return [
        Job(setting=setting, mode=mode, arm=arm, seed=seed)
        for seed in range(num_seeds)
        for mode in modes
        for arm in arms
    ]


def read(path: Path) -> list[Outcome]:
    """The runs of a file, in order; none where it does not exist. A line cut off by a kill is left out.

    Raises:
        ValueError: a whole line is no run of this version of the benchmark.
    """
    if not path.is_file():
        return []
    outcomes: list[Outcome] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            outcomes.append(decode(json.loads(line)))
        except json.JSONDecodeError:
            continue
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path}:{number}: not a run of this version ({error}); give another --out") from error
    return outcomes


def append(path: Path, outcome: Outcome) -> None:
    """Adds a run to the file, and a line break before it where the last one was cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")
        file.write(json.dumps(asdict(outcome)).encode() + b"\n")


def decode(data: dict[str, Any]) -> Outcome:
    """What `dataclasses.asdict` made of an outcome, after JSON."""
    job = data["job"]
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    fields["job"] = Job(**job | {"setting": Setting(**job["setting"])})
    return Outcome(**fields)


def measure(wanted: Sequence[Job], path: Path, num_workers: int, console: Console) -> None:
    """Makes every wanted run that the file lacks. A run that fails stops the rest; finished ones stay."""
    done = {outcome.job for outcome in read(path)}
    missing = [job for job in wanted if job not in done]
    if not missing:
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    context = multiprocessing.get_context("spawn")  # torch and fork do not go together
    with Progress(*columns, console=console) as progress, ProcessPoolExecutor(num_workers, context) as pool:
        _prepare(missing, pool, progress)
        bar = progress.add_task("runs", total=len(wanted), completed=len(wanted) - len(missing))
        running = {pool.submit(run, job) for job in missing}
        try:
            while running:
                finished, running = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    _note(future, path, progress)
                    progress.advance(bar)
        finally:
            for future in running:
                future.cancel()


def _prepare(missing: Sequence[Job], pool: ProcessPoolExecutor, progress: Progress) -> None:
    """Builds the starting weights first, each once: workers would otherwise build the same one side by side."""
    warm = {job.warm_seed: (job, 0) for job in missing}
    specialists = {
        (job.warm_seed, node): (job, node)
        for job in missing
        if job.mode == "spec"
        for node in range(job.setting.num_nodes)
    }
    bar = progress.add_task("starting weights", total=len(warm) + len(specialists))
    for batch in (warm.values(), specialists.values()):  # a specialist begins where its warm start ends
        for future in [pool.submit(_build, job, node) for job, node in batch]:
            future.result()
            progress.advance(bar)


def _build(job: Job, node: int) -> None:
    import torch

    torch.set_num_threads(1)
    starting_weights(job, node)


def _note(future: Future[Outcome], path: Path, progress: Progress) -> None:
    outcome = future.result()
    append(path, outcome)
    job = outcome.job
    progress.console.print(
        f"{job.mode:8s} {job.arm:13s} seed {job.seed}: AUC {outcome.auc:.3f} final {outcome.final:.3f} "
        f"{outcome.generated_tokens} tokens {outcome.seconds:.0f} s",
        highlight=False,
    )


def summary(outcomes: Sequence[Outcome]) -> str:
    """The table, with what its intervals are made of."""
    seeds = sorted({outcome.job.seed for outcome in outcomes})
    starts = sorted({outcome.job.warm_seed for outcome in outcomes})
    setting = outcomes[0].job.setting
    head = (
        f"{setting.num_nodes} nodes, {setting.num_rounds} rounds, seeds {_span(seeds)} on {len(starts)} warm start(s), "
        f"{len(outcomes)} runs of {sum(o.seconds for o in outcomes) / len(outcomes):.0f} s on average. "
        "± is the half-width of a 95 % t interval; differences are paired by seed, bold where the interval excludes 0."
    )
    return f"{head}\n\n{markdown(rows(outcomes))}"


def _span(values: Sequence[int]) -> str:
    return ", ".join(map(str, values))


def as_json(outcomes: Sequence[Outcome]) -> str:
    """Every run and every row, for other programs."""
    data = {"rows": [asdict(row) for row in rows(outcomes)], "runs": [asdict(outcome) for outcome in outcomes]}
    return json.dumps(data, indent=2)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m benchmarks.sharing", description=(__doc__ or "").split("\n")[0])
    made.add_argument("--quick", action="store_true", help="30 rounds, 3 seeds, the shipped warm start only")
    made.add_argument("--seeds", type=int, help="runs for each cell (default 6, quick 3); more extends what is there")
    made.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    made.add_argument("--arms", nargs="+", choices=[arm.name for arm in ARMS], default=[arm.name for arm in ARMS])
    made.add_argument("--workers", type=int, default=2, help="processes of one thread each (default 2)")
    made.add_argument("--out", type=Path, default=ROOT / "runs" / "sharing.jsonl", help="where runs are kept")
    made.add_argument("--table", action="store_true", help="only print the table of the runs that are there")
    made.add_argument("--json", action="store_true", help="print rows and runs as JSON instead of the table")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 when every wanted run exists."""
    made = parser()
    options = made.parse_args(arguments)
    setting = QUICK if options.quick else FULL
    num_seeds = _SEEDS[setting] if options.seeds is None else options.seeds
    if num_seeds < 1 or options.workers < 1:
        made.error("--seeds and --workers must be at least 1")
    wanted = jobs(setting, num_seeds, options.modes, options.arms)
    console = Console(stderr=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # read by the workers
    start_s = time.monotonic()
    if not options.table:
        try:
            measure(wanted, options.out, options.workers, console)
        except KeyboardInterrupt:
            console.print(f"stopped; what is done is in {options.out}, start again to go on")
            return 130
        console.print(f"{len(wanted)} runs in {time.monotonic() - start_s:.0f} s", highlight=False)
    # One setting never mixes with another; a seed beyond those asked for is left out.
    outcomes = [outcome for outcome in read(options.out) if outcome.job in wanted]
    if not outcomes:
        console.print(f"{options.out} holds no run of this setting yet")
        return 1
    print(as_json(outcomes) if options.json else summary(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
