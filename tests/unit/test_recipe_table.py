"""Recipes side by side: intervals over seeds or problems, in one table and on one page."""

from pathlib import Path

import pytest
from logged_events import ADA, BELL, evaluated
from rich.console import Console

from swarm.report.recipe_table import recipe_rows, recipe_table, write_recipes
from swarm.report.result import SwarmResult
from swarm.report.tally import node_result

NUM = 32


def run(right: int, begin: int = 4, num_steps: int = 9) -> SwarmResult:
    """Two nodes that have so many right answers at the end."""
    counts = ((0, begin), (num_steps, right))
    events = [evaluated(step, (1,) * count + (0,) * (NUM - count)) for step, count in counts]
    nodes = tuple(node_result(name, node_id, ("sort",), events, {}) for name, node_id in (("ada", ADA), ("bell", BELL)))
    return SwarmResult(nodes=nodes, began_at_s=0.0, first_step_at_s=1.0, ended_at_s=9.0)


def test_of_one_seed_the_interval_is_that_of_its_problems() -> None:
    first, second = recipe_rows({"dapo": {0: run(8)}, "gspo": {0: run(24)}})
    assert (first.before, first.after, first.difference_interval) == (0.125, 0.25, None)
    assert second.difference == 0.5 and second.difference_interval is not None and second.difference_interval[0] > 0.25
    assert second.num_problems == NUM, "two nodes at the same problems are no further problems"
    assert first.curve == [(0.0, 0.125), (9.0, 0.25)]


def test_of_several_seeds_it_is_students_and_paired_by_seed() -> None:
    first, second = recipe_rows({"dapo": {0: run(8), 1: run(16)}, "gspo": {0: run(12), 1: run(21)}})
    # differences 4 and 5 of 32: mean .1406, s = .0221, t(1) = 12.706: half width .1985
    assert second.difference == pytest.approx(0.140625) and second.seeds == (0, 1)
    assert second.difference_interval == pytest.approx((-0.0579, 0.3392), abs=1e-3)
    assert first.gain[0] < 0 < first.gain[1], "two seeds show little"


def test_table_and_page_hold_every_row_and_what_the_intervals_are_about(tmp_path: Path) -> None:
    rows = recipe_rows({"<b>dapo": {0: run(8)}, "gspo": {0: run(24)}, "unfinished": {0: run(4, num_steps=0)}})
    assert [row.recipe for row in rows] == ["<b>dapo", "gspo"]
    console = Console(width=80)
    with console.capture() as captured:
        console.print(recipe_table(rows))
    text = captured.get()
    assert ".50 (.2" in text and "of other seeds they say" in text and "gspo" in text and "n=32" in text
    assert "\N{HORIZONTAL ELLIPSIS}" not in text and all(len(line) <= 80 for line in text.splitlines())
    write_recipes(rows, "two recipes", {"gspo, seed 0": "1-gspo-seed0/report.html"}, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "+0.50 (" in page and 'class="interval good"' in page and "1-gspo-seed0/report.html" in page
    assert "<b>dapo" not in page and "&lt;b&gt;dapo" in page
    write_recipes([], "none", {}, tmp_path / "report.html")
