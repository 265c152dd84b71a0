"""Recipes side by side: held-out success of each, with intervals over seeds or problems, as table and as page.

Invariant: all recipes were run with the same seeds and evaluated on the same problems; differences are to the first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from swarm.events import PolicyEvaluated
from swarm.pages import charts as svg
from swarm.report.figures import Points
from swarm.report.html import SHARE, report_templates
from swarm.report.live import figure
from swarm.report.result import SwarmResult
from swarm.report.terminal import ARROW
from swarm.trained.intervals import Interval, graded_interval
from swarm.trained.learning_evidence import learning_difference, learning_evidence, pooled


@dataclass(frozen=True, kw_only=True)
class RecipeRow:
    """Result of one recipe over its seeds, success in [0, 1].

    `before`, `after` and `baseline` weight each problem of a seed's run equally, `curve` each environment.
    """

    recipe: str
    seeds: tuple[int, ...]
    num_steps: int  # at the last evaluation
    before: float
    after: float
    gain: Interval
    difference: float  # of `after`, to the first recipe; 0 for itself
    difference_interval: Interval | None  # None: the first recipe
    num_problems: int
    baseline: float  # success of always giving the commonest answer
    curve: Points  # (step, mean success)


def recipe_rows(runs: Mapping[str, Mapping[int, SwarmResult]]) -> list[RecipeRow]:
    """Rows by recipe, from recipe -> seed -> run.

    Intervals are Student's over seeds, paired by seed in a difference; of one seed they are those of its problems. A
    run that was evaluated fewer than twice is left out; a recipe without any has no row.
    """
    found = {recipe: {seed: rows for seed, run in of.items() if (rows := _pooled(run))} for recipe, of in runs.items()}
    found = {recipe: of for recipe, of in found.items() if of}
    first = next(iter(found.values()), {})
    return [_row(recipe, of, None if of is first else first) for recipe, of in found.items()]


def _pooled(run: SwarmResult) -> list[PolicyEvaluated]:
    """Held-out evaluations of all nodes that train, as if one node made them; [] for fewer than two steps."""
    by_step: dict[tuple[int, str], list[PolicyEvaluated]] = {}
    for node in run.trainers:
        for each in node.evaluations:
            if each.split == "held_out":
                by_step.setdefault((each.step, each.env), []).append(each)
    whole = [pooled(rows) for _, rows in sorted(by_step.items()) if len(rows) == len(run.trainers)]
    return whole if len({each.step for each in whole}) > 1 else []


def _row(
    recipe: str, runs: Mapping[int, list[PolicyEvaluated]], first: Mapping[int, list[PolicyEvaluated]] | None
) -> RecipeRow:
    changes = [whole for rows in runs.values() if (whole := learning_evidence(rows).whole)]
    against = [
        whole
        for seed, rows in runs.items()
        if first is not None and seed in first and (whole := learning_difference(first[seed], rows).whole)
    ]
    differences = [each.after - each.before for each in against]
    one, other = ([each.interval for each in of] for of in (changes, against))
    steps = sorted(set.intersection(*({row.step for row in rows} for rows in runs.values())))
    return RecipeRow(
        recipe=recipe,
        seeds=tuple(runs),
        num_steps=max(each.newest_step for each in changes),
        before=fmean(each.before for each in changes),
        after=fmean(each.after for each in changes),
        gain=graded_interval([each.after - each.before for each in changes]) if len(changes) > 1 else one[0],
        difference=fmean(differences) if differences else 0.0,
        difference_interval=graded_interval(differences) if len(differences) > 1 else next(iter(other), None),
        num_problems=min(each.num_problems for each in changes),
        baseline=fmean(each.baseline for each in changes),
        curve=[
            (float(step), fmean(row.accuracy for rows in runs.values() for row in rows if row.step == step))
            for step in steps
        ],
    )


def basis_words(rows: Sequence[RecipeRow]) -> str:
    """Description of the intervals: over seeds, or over the problems of one seed."""
    several = any(len(row.seeds) > 1 for row in rows)
    return (
        "95 % intervals over seeds (Student's t), differences paired by seed"
        if several
        else "95 % intervals over the problems of one seed: of other seeds they say nothing (--seeds N)"
    )


def recipe_table(rows: Sequence[RecipeRow]) -> Table:
    """The rows for a terminal of 80 columns."""
    table = Table(title=Text("Held-out success"), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("recipe", overflow="fold")
    for name in ("seeds", "steps", "success", "gain", "to the first"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        seeds = "-".join(dict.fromkeys(map(str, (min(row.seeds), max(row.seeds)))))
        gain, difference = row.after - row.before, row.difference
        course = f"{figure(row.before)}{ARROW}{figure(row.after)}"
        table.add_row(
            Text(row.recipe), seeds, str(row.num_steps), course, _short(gain, row.gain),
            _short(difference, row.difference_interval),
        )  # fmt: skip
    found = [f"n={row.num_problems}, always the commonest answer {figure(row.baseline)}; " for row in rows[:1]]
    table.caption, table.caption_justify = Text("".join(found) + basis_words(rows)), "left"
    return table


def _short(value: float, interval: Interval | None) -> str:
    """A difference with its interval in few columns, such as `.18 (.08, .28)`."""
    return "-" if interval is None else f"{figure(value)} ({figure(interval[0])}, {figure(interval[1])})"


def write_recipes(rows: Sequence[RecipeRow], title: str, links: Mapping[str, str], path: Path) -> None:
    """Writes the page: the table with its intervals drawn, the courses, and links to the report of each run."""
    series = [svg.Series(name=row.recipe, points=row.curve, color=index) for index, row in enumerate(rows)]
    page = (
        report_templates()
        .get_template("recipes.html")
        .render(
            root="",
            title=title,
            basis=basis_words(rows),
            rows=[
                (row, _words(row.after - row.before, row.gain), _bar(row.after - row.before, row.gain),
                 _words(row.difference, row.difference_interval), _bar(row.difference, row.difference_interval))
                for row in rows
            ],
            chart=svg.line_chart(
                series, x_label="steps", y_range=SHARE, level=rows[0].baseline if rows else None,
                level_name="commonest answer",
            ),
            links=links,
        )
    )  # fmt: skip
    path.write_text(page, encoding="utf-8")


def _words(value: float, interval: Interval | None) -> str:
    return "-" if interval is None else f"{value:+.2f} ({interval[0]:+.2f} to {interval[1]:+.2f})"


def _bar(value: float, interval: Interval | None) -> str:
    if interval is None:
        return ""
    low, high = interval
    return svg.interval_bar(max(low, -1.0), value, min(high, 1.0), _words(value, interval))
