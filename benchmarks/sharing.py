"""What sharing rollouts is worth: training arms against each other, seed by seed, with a negative control.

Invariant: a run is written whole when it is done and never made twice; a table only mixes runs of one setting.

Four tiny nodes in one process without network, in synchronous rounds. Modes: `heteroq` (each node trains on its
own two tasks only), `spec` (nodes start as different specialists and train on all), `homo` (all alike).

    python -m benchmarks.sharing                 # the full table; stop and start again as you like
    python -m benchmarks.sharing --quick         # under 5 minutes on 2 cores
    python -m benchmarks.sharing --table         # of the runs so far, as markdown
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


def decode(data: dict[str, Any]) -> Outcome:
    """What `dataclasses.asdict` made of an outcome, after JSON."""
    job = data["job"]
    fields: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}
    fields["job"] = Job(**job | {"setting": Setting(**job["setting"])})
    return Outcome(**fields)


def workers(wanted: Sequence[Job], num: int) -> Workers[Outcome]:
    """How runs are made: starting weights first, each once, since workers would build the same one side by side."""
    warm = {job.warm_seed: (job, 0) for job in wanted}
    specialists = {
        (job.warm_seed, node): (job, node)
        for job in wanted
        if job.mode == "spec"
        for node in range(job.setting.num_nodes)
    }
    starts = ("warm starts", list(warm.values()), _build)
    return Workers(
        run=run,
        describe=_describe,
        prepare=(starts, ("specialists", list(specialists.values()), _build)),  # they begin where a warm start ends
        num=num,
    )


def _build(start: tuple[Job, int]) -> None:
    import torch

    torch.set_num_threads(1)
    starting_weights(*start)


def _describe(outcome: Outcome) -> str:
    job = outcome.job
    return (
        f"{job.mode:8s} {job.arm:13s} seed {job.seed}: AUC {outcome.auc:.3f} final {outcome.final:.3f} "
        f"{outcome.generated_tokens} tokens {outcome.seconds:.0f} s"
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
    file = RunFile(path=options.out, decode=decode)
    start_s = time.monotonic()
    if not options.table:
        try:
            workers(wanted, options.workers).measure(wanted, file, console)
        except KeyboardInterrupt:
            console.print(f"stopped; what is done is in {options.out}, start again to go on", soft_wrap=True)
            return 130
        console.print(f"{len(wanted)} runs in {time.monotonic() - start_s:.0f} s", highlight=False)
    # One setting never mixes with another; a seed beyond those asked for is left out.
    outcomes = [outcome for outcome in file.read() if outcome.job in wanted]
    if not outcomes:
        console.print(f"{options.out} holds no run of this setting yet", soft_wrap=True)
        return 1
    print(as_json(outcomes) if options.json else summary(outcomes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
