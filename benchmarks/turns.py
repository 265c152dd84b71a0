"""What each recipe over turns does to its own quantity, against the trajectory-level method at equal episodes.

Invariant: both sides of a figure see the same weights, tasks and seeds; a figure is written when it is done and never
made twice. What failed stays in the table.

    python -m benchmarks.turns                       # everything, minutes; stop and start again as you like
    python -m benchmarks.turns --recipes gigpo ufo
    python -m benchmarks.turns --table               # of the figures so far, as markdown
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
if not __package__:  # started as a file: let `benchmarks` be found as with -m
    sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402

from benchmarks._runs import RunFile, Workers  # noqa: E402
from benchmarks._statistics import Estimate, estimate, plain, signed  # noqa: E402
from benchmarks._turn_figure import Job, Outcome  # noqa: E402
from benchmarks._turn_figures import FIGURES, run  # noqa: E402

NUM_SEEDS: Final = 5


def decode(data: dict[str, Any]) -> Outcome:
    """An outcome as it stands in the file."""
    return Outcome(job=Job(**data.pop("job")), **data)


def verdict(difference: Estimate, is_more: bool) -> str:
    """Whether the interval of the difference excludes 0 on the side that is claimed; open where seeds are missing."""
    if difference.n < NUM_SEEDS:
        return "open"
    return "yes" if difference.is_nonzero and (difference.mean > 0) == is_more else "no"


def markdown(outcomes: Sequence[Outcome]) -> str:
    """A row for each figure that has outcomes."""
    lines = ["| recipe | quantity | where | seeds | method | trajectory level | difference | claimed | shown |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for figure in FIGURES:
        own = [outcome for outcome in outcomes if outcome.job.figure == figure.name]
        if not own:
            continue
        difference = estimate([outcome.method - outcome.baseline for outcome in own])
        lines.append(
            f"| `{figure.recipe}` | {figure.quantity} | {figure.where} | {len(own)} "
            f"| {plain(estimate([outcome.method for outcome in own]))} "
            f"| {plain(estimate([outcome.baseline for outcome in own]))} | {signed(difference)} "
            f"| {'more' if figure.is_more else 'less'} | {verdict(difference, figure.is_more)} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 0 when every wanted figure exists."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--recipes", nargs="+", metavar="NAME", help="only these")
    made.add_argument("--seeds", type=int, default=NUM_SEEDS)
    made.add_argument("--workers", type=int, default=1)
    made.add_argument("--out", type=Path, default=Path("turns.jsonl"))
    made.add_argument("--table", action="store_true", help="only the table of what there is")
    options = made.parse_args(arguments)
    figures = [each for each in FIGURES if options.recipes is None or each.recipe in options.recipes]
    wanted = [Job(figure=figure.name, seed=seed) for seed in range(options.seeds) for figure in figures]
    file = RunFile(path=options.out, decode=decode)
    if not options.table:
        workers = Workers(run=run, describe=_describe, num=options.workers)
        workers.measure(wanted, file, Console(stderr=True))
    chosen = set(wanted)
    print(markdown([outcome for outcome in file.read() if outcome.job in chosen]))
    return 0


def _describe(outcome: Outcome) -> str:
    job = outcome.job
    return f"{job.figure:24s} seed {job.seed}: {outcome.method:.4f} against {outcome.baseline:.4f}"


if __name__ == "__main__":
    sys.exit(main())
