"""Figures of recipes over turns: which there are, and what the table calls shown."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT))  # the benchmarks are not in the wheel; last, so that an installed swarm stays the one tested

from benchmarks._statistics import estimate  # noqa: E402
from benchmarks._turn_figure import Job, Outcome  # noqa: E402
from benchmarks._turn_figures import FIGURES  # noqa: E402
from benchmarks.turns import decode, markdown, verdict  # noqa: E402
from swarm.objectives.methods import list_recipes, load_recipe  # noqa: E402
from swarm.objectives.part import Requirement  # noqa: E402


def test_every_recipe_over_turns_is_measured_or_said_not_to_be() -> None:
    written = (ROOT / "docs" / "measurements" / "turns.md").read_text(encoding="utf-8")
    over_turns = {name for name in list_recipes() if Requirement.TURNS in load_recipe(name).needs}
    assert {figure.recipe for figure in FIGURES} <= over_turns
    assert not {name for name in over_turns if f"`{name}`" not in written}
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)


@pytest.mark.parametrize(
    ("values", "is_more", "said"),
    [
        ([0.2, 0.3, 0.25, 0.2, 0.3], True, "yes"),
        ([0.2, 0.3, 0.25, 0.2, 0.3], False, "no"),
        ([0.2, -0.3, 0.25, -0.2, 0.3], True, "no"),
        ([0.2, 0.3, 0.25, 0.2], True, "open"),
    ],
)
def test_a_quantity_is_shown_only_by_an_interval_over_all_seeds(values: list[float], is_more: bool, said: str) -> None:
    assert verdict(estimate(values), is_more) == said


def test_the_table_has_what_is_in_the_file_and_nothing_else() -> None:
    figure = FIGURES[0]
    line = {"job": {"figure": figure.name, "seed": 3}, "method": 1.5, "baseline": 1.0}
    assert decode(dict(line)) == Outcome(job=Job(figure=figure.name, seed=3), method=1.5, baseline=1.0)
    table = markdown([decode(dict(line))]).splitlines()
    assert len(table) == 3 and f"`{figure.recipe}`" in table[2] and "+0.500" in table[2] and "open" in table[2]
