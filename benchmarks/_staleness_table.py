"""Runs of the staleness benchmark as tables and a picture: final accuracy against the age of the data.

Invariant: a difference is taken seed by seed between runs of one schedule, source, age and learning rate;
its interval is Student's t at 95 % over those pairs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks._staleness_run import METHODS, Job, Outcome, find_method
from benchmarks._statistics import Estimate, estimate, plain, signed

BASELINE = "PPO-clip"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One method under one condition."""

    method: str
    schedule: str
    source: str
    age: int
    learning_rate: float
    final: Estimate
    auc: Estimate
    gain: Estimate | None  # final, paired against BASELINE under the same condition
    auc_gain: Estimate | None  # mean of the curve, likewise
    num_collapsed: int
    collapse_update: float | None  # mean over the runs that collapsed
    generated_tokens: float  # mean over runs
    num_dropped: float  # groups that the guard's lag bound refused, mean over runs
    guard_level: float  # mean over batches and runs
    max_age_steps: tuple[int, int]  # least and greatest lag bound at the end
    mismatch_kl: float  # of the last batch, mean over runs
    ess_share: float
    clip_share: float


def cells(outcomes: Sequence[Outcome]) -> list[Cell]:
    """A cell for each method and condition that has a run, conditions in order of first run."""
    conditions = list(dict.fromkeys(_condition(outcome.job) for outcome in outcomes))
    found: list[Cell] = []
    for condition in conditions:
        by_method = {
            method.name: {
                o.job.seed: o for o in outcomes if _condition(o.job) == condition and o.job.method == method.name
            }
            for method in METHODS
        }
        found += [_cell(name, condition, by_method) for name, runs in by_method.items() if runs]
    return found


def markdown(found: Sequence[Cell]) -> str:
    """One table for each schedule, source and learning rate: methods down, ages across."""
    parts: list[str] = []
    for key in dict.fromkeys((cell.schedule, cell.source, cell.learning_rate) for cell in found):
        chosen = [cell for cell in found if (cell.schedule, cell.source, cell.learning_rate) == key]
        parts.append(f"**{_title(*key)}**\n\n{_table(chosen)}")
    if guarded := [cell for cell in found if find_method(cell.method).is_guarded]:
        parts.append(f"**What the guard did**\n\n{_guard_table(guarded, found)}")
    return "\n\n".join(parts)


def _guard_table(guarded: Sequence[Cell], found: Sequence[Cell]) -> str:
    """A guarded row learns from younger data and pays for it in generation: by how much."""
    lines = [
        "| method | age | learning rate | lag bound at the end | groups refused | mean level | generated tokens "
        "| without the guard |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in guarded:
        plain_name = cell.method.removesuffix(" + guard")
        without = next((c for c in found if c.method == plain_name and _key(c) == _key(cell)), None)
        low, high = cell.max_age_steps
        lines.append(
            f"| {cell.method} | {cell.age} | {cell.learning_rate:g} | {low if low == high else f'{low}-{high}'} "
            f"| {cell.num_dropped:.0f} | {cell.guard_level:.2f} | {cell.generated_tokens / 1000:.0f}k "
            f"| {'-' if without is None else f'{without.generated_tokens / 1000:.0f}k'} |"
        )
    return "\n".join(lines)


def _key(cell: Cell) -> tuple[str, str, int, float]:
    return cell.schedule, cell.source, cell.age, cell.learning_rate


def plot(found: Sequence[Cell], path: Path) -> None:
    """Final accuracy against age, means, one line for each method, one panel for each schedule (PNG)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    base = min(cell.learning_rate for cell in found)
    chosen = [cell for cell in found if cell.source == "own" and cell.learning_rate == base]
    schedules = list(dict.fromkeys(cell.schedule for cell in chosen))
    figure = Figure(figsize=(5.6 * len(schedules), 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes: list[Any] = list(figure.subplots(1, len(schedules), squeeze=False)[0])
    for axis, schedule in zip(axes, schedules, strict=True):
        for index, method in enumerate(METHODS):
            line = sorted(
                (cell for cell in chosen if cell.method == method.name and cell.schedule == schedule),
                key=lambda cell: cell.age,
            )
            if line:
                style: dict[str, Any] = {"color": f"C{index % 10}", "linestyle": "-" if index < 10 else "--"}
                means = [cell.final.mean for cell in line]
                axis.plot([cell.age for cell in line], means, label=method.name, marker=".", **style)
        axis.set_xscale("symlog", linthresh=1)
        ages = sorted({cell.age for cell in chosen})
        axis.set_xticks(ages, [str(age) for age in ages])
        axis.set(title=_title(schedule, "own", base), xlabel="age of the data, updates", ylim=(0.35, 0.75))
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("held-out greedy accuracy at the end")
    axes[0].legend(frameon=False, fontsize=7, ncols=2, loc="lower left")
    figure.savefig(path)


def _condition(job: Job) -> tuple[str, str, int, float]:
    return job.schedule, job.source, job.age, job.learning_rate


def _cell(name: str, condition: tuple[str, str, int, float], by_method: dict[str, dict[int, Outcome]]) -> Cell:
    schedule, source, age, learning_rate = condition
    runs, others = by_method[name], by_method[BASELINE]
    common = sorted(runs.keys() & others.keys())
    is_compared = name != BASELINE and bool(common)
    collapses = [run.collapse for run in runs.values() if run.collapse is not None]
    return Cell(
        method=name,
        schedule=schedule,
        source=source,
        age=age,
        learning_rate=learning_rate,
        final=estimate([run.final for run in runs.values()]),
        auc=estimate([run.auc for run in runs.values()]),
        gain=estimate([runs[s].final - others[s].final for s in common]) if is_compared else None,
        auc_gain=estimate([runs[s].auc - others[s].auc for s in common]) if is_compared else None,
        num_collapsed=len(collapses),
        collapse_update=sum(collapses) / len(collapses) if collapses else None,
        generated_tokens=fmean(run.generated_tokens for run in runs.values()),
        num_dropped=fmean(run.num_dropped for run in runs.values()),
        guard_level=fmean(run.guard_level for run in runs.values()),
        max_age_steps=(
            min(run.max_age_steps for run in runs.values()),
            max(run.max_age_steps for run in runs.values()),
        ),
        mismatch_kl=sum(run.mismatch_kl[-1] for run in runs.values()) / len(runs),
        ess_share=sum(run.ess_share[-1] for run in runs.values()) / len(runs),
        clip_share=sum(run.clip_share for run in runs.values()) / len(runs),
    )


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
        collapsed = [_collapse(row[age]) for age in ages if age in row and row[age].num_collapsed]
        last = row.get(oldest)
        end = "-" if last is None else f"{last.mismatch_kl:.2f}, {last.ess_share:.2f}, {last.clip_share:.2f}"
        finals = [plain(row[age].final) if age in row else "-" for age in ages]
        gains = ["-"] * 3 if last is None else [signed(last.gain), plain(last.auc), signed(last.auc_gain)]
        lines.append(f"| {name} | " + " | ".join([*finals, *gains, end, "; ".join(collapsed) or "none"]) + " |")
    return "\n".join(lines)


def _collapse(cell: Cell) -> str:
    assert cell.collapse_update is not None
    return f"{cell.age}: {cell.num_collapsed} of {cell.final.n} (update {cell.collapse_update:.0f})"
