"""Effect of each recipe over turns on its own quantity, against the trajectory-level method at equal episodes.

    python -m benchmarks.turns                       # everything, minutes; stop and start again as you like
    python -m benchmarks.turns --recipes gigpo ufo
    python -m benchmarks.turns --table               # of the figures so far, as markdown

Invariant: both sides of a figure see the same weights, tasks and seeds. What failed stays in the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import torch

from benchmarks._baselines import add_record, write_record
from benchmarks._runs import Runs, run_parser
from benchmarks._statistics import Estimate, estimate, plain, signed
from benchmarks._turn_figures import FIGURES

NUM_SEEDS: Final = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One figure with one seed."""

    figure: str
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The quantity of the method and of the one that it is compared with."""

    job: Job
    method: float
    baseline: float


def run(job: Job) -> Outcome:
    """One figure (blocking; sets torch to one thread)."""
    torch.set_num_threads(1)
    method, baseline = next(each for each in FIGURES if each.name == job.figure).values(job.seed)
    return Outcome(job=job, method=method, baseline=baseline)


def verdict(difference: Estimate, claim: str) -> str:
    """`yes` if the interval of the difference excludes 0 on the claimed side; `open` where seeds are missing."""
    if difference.n < NUM_SEEDS:
        return "open"
    return "yes" if difference.is_nonzero and (difference.mean > 0) == (claim == "more") else "no"


def markdown(outcomes: Sequence[Outcome]) -> str:
    """A row for each figure that has outcomes."""
    lines = ["| recipe | quantity | where | seeds | method | trajectory level | difference | claimed | shown |"]
    lines.append("|---|---|---|---|---|---|---|---|---|")
    for figure in FIGURES:
        own = [outcome for outcome in outcomes if outcome.job.figure == figure.name]
        if not own:
            continue
        difference = estimate([outcome.method - outcome.baseline for outcome in own])
        sides = [plain(estimate([getattr(outcome, side) for outcome in own])) for side in ("method", "baseline")]
        lines.append(
            f"| `{figure.recipe}` | {figure.quantity} | {figure.where} | {len(own)} | {sides[0]} | {sides[1]} "
            f"| {signed(difference)} | {figure.claim} | {verdict(difference, figure.claim)} |"
        )
    return "\n".join(lines)


def _describe(outcome: Outcome) -> str:
    job = outcome.job
    return f"{job.figure:24s} seed {job.seed}: {outcome.method:.4f} against {outcome.baseline:.4f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the missing figures and prints the table."""
    parser = run_parser("turns", __doc__, seeds=NUM_SEEDS)
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="only these")
    add_record(parser)
    options = parser.parse_args(arguments)
    figures = [each for each in FIGURES if options.recipes is None or each.recipe in options.recipes]
    wanted = [Job(figure=figure.name, seed=seed) for seed in range(options.seeds) for figure in figures]
    runs = Runs(path=options.out, outcome=Outcome, run=run, describe=_describe, num_workers=options.workers)
    outcomes = runs.finished(wanted, only_kept=options.table)
    print(markdown(outcomes))
    means = {each.name: [o.method - o.baseline for o in outcomes if o.job.figure == each.name] for each in figures}
    write_record(options.record, "turns", arguments, {name: fmean(of) for name, of in means.items() if of})


if __name__ == "__main__":
    main()
