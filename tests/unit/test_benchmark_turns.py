"""Figures of recipes over turns: their list, and the rule by which the table calls one shown."""

from pathlib import Path

import pytest

from benchmarks._statistics import estimate
from benchmarks._turn_figures import FIGURES
from benchmarks.turns import Job, Outcome, markdown, verdict
from swarm.objectives.methods import list_recipes, load_recipe
from swarm.objectives.part import Requirement

ROOT = Path(__file__).parents[2]


def test_every_recipe_over_turns_is_measured_or_said_not_to_be() -> None:
    written = (ROOT / "docs" / "measurements" / "turns.md").read_text(encoding="utf-8")
    over_turns = {name for name in list_recipes() if Requirement.TURNS in load_recipe(name).needs}
    assert {figure.recipe for figure in FIGURES} <= over_turns
    assert not {name for name in over_turns if f"`{name}`" not in written}
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)


@pytest.mark.parametrize(
    ("values", "claim", "shown"),
    [
        ([0.2, 0.3, 0.25, 0.2, 0.3], "more", "yes"),
        ([0.2, 0.3, 0.25, 0.2, 0.3], "less", "no"),
        ([0.2, -0.3, 0.25, -0.2, 0.3], "more", "no"),
        ([0.2, 0.3, 0.25, 0.2], "more", "open"),
    ],
)
def test_a_quantity_is_shown_only_by_an_interval_over_all_seeds(values: list[float], claim: str, shown: str) -> None:
    assert verdict(estimate(values), claim) == shown


def test_the_table_has_a_row_for_each_figure_with_outcomes() -> None:
    figure = FIGURES[0]
    table = markdown([Outcome(job=Job(figure=figure.name, seed=3), method=1.5, baseline=1.0)]).splitlines()
    assert len(table) == 3 and f"`{figure.recipe}`" in table[2] and "+0.500" in table[2] and "open" in table[2]
