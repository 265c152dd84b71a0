"""Age that data may have: objectives against each other on rollouts of age 0 to 64 updates and of other policies.

A tiny model learns eight character tasks from batches that are exactly so many updates old, with one update
for each batch and with four; the learning rate was chosen before (docs/measurements/staleness.md).

    python -m benchmarks.staleness               # everything; stop and start again as you like
    python -m benchmarks.staleness --quick       # under 10 minutes on 2 cores
    python -m benchmarks.staleness --table       # of the runs so far, as markdown

Invariant: a table only mixes runs of one setting; a difference is taken seed by seed between runs of one schedule,
source, age and learning rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from benchmarks._runs import Runs, run_parser
from benchmarks._staleness_run import METHODS, Job, Outcome, Setting, build_start, run
from benchmarks._statistics import Estimate, estimate, plain, signed

FULL: Final = Setting()
QUICK: Final = Setting(num_updates=96, num_problems=20, num_warm=1)
BASELINE: Final = "PPO-clip"
LEARNING_RATE: Final = 3e-4
HARD_LEARNING_RATE: Final = 1e-3
AGES: Final = (0, 4, 16, 64)
HARD_AGE: Final = 16
EXTERNAL_AGE: Final = 4
FOUR: Final = ("none", "PPO-clip", "GSPO", "TIS", "decoupled PPO", "BAPO", "M2PO", "MinPRO")
QUICK_METHODS: Final = ("none", "PPO-clip", "GSPO", "MinPRO", "BAPO")


def _job(setting: Setting, seed: int, method: str, age: int, **changes: Any) -> Job:
    given: dict[str, Any] = {"schedule": "one", "source": "own", "learning_rate": LEARNING_RATE} | changes
    return Job(setting=setting, method=method, age=age, seed=seed, **given)


def jobs(num_seeds: int, names: Sequence[str] | None = None) -> list[Job]:
    """Every run of the full tables; seed by seed, so that an unfinished table is balanced."""
    names = list(METHODS) if names is None else names
    wanted: list[Job] = []
    for seed in range(num_seeds):
        wanted += [_job(FULL, seed, name, age) for age in AGES for name in names]
        wanted += [_job(FULL, seed, name, age, schedule="four") for age in AGES for name in names if name in FOUR]
        wanted += [_job(FULL, seed, name, EXTERNAL_AGE, source="external") for name in names]
        wanted += [_job(FULL, seed, name, HARD_AGE, learning_rate=HARD_LEARNING_RATE) for name in names]
    return wanted + [_job(FULL, seed, name, 1) for seed in range(num_seeds) for name in names]


def quick_jobs(num_seeds: int, names: Sequence[str] | None = None) -> list[Job]:
    """A few methods at three ages, half as long."""
    chosen = QUICK_METHODS if names is None else names
    return [_job(QUICK, seed, name, age) for seed in range(num_seeds) for age in (0, 16, 64) for name in chosen]


Condition = tuple[str, str, float, int]  # schedule, source, learning rate, age


def _condition(job: Job) -> Condition:
    return job.schedule, job.source, job.learning_rate, job.age


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One method under one condition."""

    method: str
    condition: Condition
    runs: list[Outcome]
    gain: Estimate | None  # final, paired against BASELINE under the same condition
    auc_gain: Estimate | None  # mean of the curve, likewise

    @property
    def table(self) -> tuple[str, str, float]:
        """Schedule, source and learning rate: the table that the cell is in."""
        return self.condition[:3]

    @property
    def age(self) -> int:
        """Age of the data, updates."""
        return self.condition[3]

    @property
    def final(self) -> Estimate:
        """Accuracy at the end."""
        return estimate([run.final for run in self.runs])

    def mean(self, figure: str) -> float:
        """Mean over runs; of a curve its last point."""
        values = [getattr(run, figure) for run in self.runs]
        return fmean(value[-1] if isinstance(value, tuple) else value for value in values)


def cells(outcomes: Sequence[Outcome]) -> list[Cell]:
    """A cell for each method and condition that has a run, conditions in order of first run."""
    found: list[Cell] = []
    for condition in dict.fromkeys(_condition(outcome.job) for outcome in outcomes):
        of = [outcome for outcome in outcomes if _condition(outcome.job) == condition]
        by_method = {name: {o.job.seed: o for o in of if o.job.method == name} for name in METHODS}
        others = by_method[BASELINE]
        for name, runs in by_method.items():
            common = sorted(runs.keys() & others.keys()) if name != BASELINE else []
            if runs:
                gains = [estimate([getattr(runs[s], f) - getattr(others[s], f) for s in common]) if common else None
                         for f in ("final", "auc")]  # fmt: skip
                cell = Cell(
                    method=name, condition=condition, runs=list(runs.values()), gain=gains[0], auc_gain=gains[1]
                )
                found.append(cell)
    return found


def markdown(found: Sequence[Cell]) -> str:
    """One table for each schedule, source and learning rate: methods down, ages across."""
    parts: list[str] = []
    for key in dict.fromkeys(cell.table for cell in found):
        parts.append(f"**{_title(*key)}**\n\n{_table([cell for cell in found if cell.table == key])}")
    if guarded := [cell for cell in found if METHODS[cell.method].is_guarded]:
        parts.append(f"**Effect of the guard**\n\n{_guard_table(guarded, found)}")
    return "\n\n".join(parts)


def _title(schedule: str, source: str, learning_rate: float) -> str:
    updates = "one update a batch" if schedule == "one" else "four updates a batch"
    whose = "" if source == "own" else ", half of the groups from another policy"
    return f"{updates}{whose}, learning rate {learning_rate:g}"


def _table(chosen: Sequence[Cell]) -> str:
    ages = sorted({cell.age for cell in chosen})
    oldest = ages[-1]
    lines = [
        "| method | " + " | ".join(f"age {age}" for age in ages) + f" | at {oldest}: over {BASELINE} | AUC | over "
        f"{BASELINE} | KL, ESS, clipped | collapsed, by age |",
        "|---" * (len(ages) + 6) + "|",
    ]
    for name in dict.fromkeys(cell.method for cell in chosen):
        row = {cell.age: cell for cell in chosen if cell.method == name}
        finals = [plain(row[age].final) if age in row else "-" for age in ages]
        end = ["-"] * 4
        if last := row.get(oldest):
            auc = estimate([run.auc for run in last.runs])
            mismatch = ", ".join(f"{last.mean(name):.2f}" for name in ("mismatch_kl", "ess_share", "clip_share"))
            end = [signed(last.gain), plain(auc), signed(last.auc_gain), mismatch]
        collapsed = "; ".join(filter(None, (_collapse(row[age]) for age in ages if age in row)))
        lines.append(f"| {name} | " + " | ".join([*finals, *end, collapsed or "none"]) + " |")
    return "\n".join(lines)


def _collapse(cell: Cell) -> str:
    collapses = [run.collapse for run in cell.runs if run.collapse is not None]
    return f"{cell.age}: {len(collapses)} of {len(cell.runs)} (update {fmean(collapses):.0f})" if collapses else ""


def _guard_table(guarded: Sequence[Cell], found: Sequence[Cell]) -> str:
    """The price of the guard: a guarded row learns from younger data and generates more for it."""
    lines = [
        "| method | age | learning rate | lag bound at the end | groups refused | mean level | generated tokens "
        "| without the guard |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in guarded:
        unguarded = (cell.method.removesuffix(" + guard"), cell.condition)
        without = next((other for other in found if (other.method, other.condition) == unguarded), None)
        bounds = sorted({run.max_age_steps for run in cell.runs})
        tokens = [f"{each.mean('generated_tokens') / 1000:.0f}k" if each else "-" for each in (cell, without)]
        lines.append(
            f"| {cell.method} | {cell.age} | {cell.condition[2]:g} "
            f"| {bounds[0] if len(bounds) == 1 else f'{bounds[0]}-{bounds[-1]}'} "
            f"| {cell.mean('num_dropped'):.0f} | {cell.mean('guard_level'):.2f} | {tokens[0]} | {tokens[1]} |"
        )
    return "\n".join(lines)


def plot(found: Sequence[Cell], path: Path) -> None:
    """Final accuracy against age, means, one line for each method, one panel for each schedule (PNG)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    base = min(cell.condition[2] for cell in found)
    chosen = [cell for cell in found if cell.table[1:] == ("own", base)]
    schedules = list(dict.fromkeys(cell.condition[0] for cell in chosen))
    figure = Figure(figsize=(5.6 * len(schedules), 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes: list[Any] = list(figure.subplots(1, len(schedules), squeeze=False)[0])
    ages = sorted({cell.age for cell in chosen})
    for axis, schedule in zip(axes, schedules, strict=True):
        for index, method in enumerate(METHODS):
            line = [cell for cell in chosen if (cell.method, cell.condition[0]) == (method, schedule)]
            line.sort(key=lambda cell: cell.age)
            if line:
                style = {"color": f"C{index % 10}", "linestyle": "-" if index < 10 else "--", "marker": "."}
                axis.plot([cell.age for cell in line], [cell.final.mean for cell in line], label=method, **style)
        axis.set_xscale("symlog", linthresh=1)
        axis.set_xticks(ages, [str(age) for age in ages])
        axis.set(title=_title(schedule, "own", base), xlabel="age of the data, updates", ylim=(0.35, 0.75))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out greedy accuracy at the end")
    axes[0].legend(frameon=False, fontsize=7, ncols=2, loc="lower left")
    figure.savefig(path)


def summary(outcomes: Sequence[Outcome]) -> str:
    """The tables, under a line that describes their runs and intervals."""
    seeds = sorted({outcome.job.seed for outcome in outcomes})
    head = (
        f"{outcomes[0].job.setting.num_updates} updates, seeds {', '.join(map(str, seeds))} on "
        f"{len({o.job.warm_seed for o in outcomes})} warm start(s), {len(outcomes)} runs of "
        f"{fmean(o.seconds for o in outcomes):.0f} s on average. Final held-out greedy accuracy; ± is "
        "the half-width of a 95 % t interval; differences are paired by seed, bold where the interval excludes 0."
    )
    return f"{head}\n\n{markdown(cells(outcomes))}"


def _describe(outcome: Outcome) -> str:
    job = outcome.job
    return (
        f"{job.method:14s} age {job.age:2d} {job.schedule:4s} {job.source:7s} lr {job.learning_rate:g} "
        f"seed {job.seed}: final {outcome.final:.3f} AUC {outcome.auc:.3f} {outcome.seconds:.0f} s"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Makes the missing runs and prints the tables."""
    parser = run_parser("staleness", __doc__, seeds=None)
    parser.add_argument("--quick", action="store_true", help="96 updates, five methods, ages 0, 16 and 64, one seed")
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="only these")
    parser.add_argument("--plot", type=Path, help="write the picture here (PNG)")
    options = parser.parse_args(arguments)
    num_seeds = options.seeds or (1 if options.quick else 3)
    wanted = (quick_jobs if options.quick else jobs)(num_seeds, options.methods)
    starts = list({job.warm_seed: job for job in wanted}.values())
    runs = Runs(
        path=options.out,
        outcome=Outcome,
        run=run,
        describe=_describe,
        prepare=(("warm starts", starts, build_start),),
        num_workers=options.workers,
    )
    outcomes = runs.finished(wanted, only_kept=options.table)
    if options.plot is not None:
        plot(cells(outcomes), options.plot)
    print(summary(outcomes))


if __name__ == "__main__":
    main()
