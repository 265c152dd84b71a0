"""docs/recipes.md and docs/recipes_table.md say what the code says."""

from pathlib import Path

from swarm.cli.recipe_description import ORDER, VERIFICATION, markdown_table
from swarm.config import LearnerConfig
from swarm.objectives.fallbacks import KEYS
from swarm.objectives.methods import list_recipes, load_recipe

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_of_recipes_is_current() -> None:
    """Mend it by: swarm recipes list --markdown > docs/recipes_table.md."""
    made = markdown_table([load_recipe(name) for name in list_recipes()])
    shown = (DOCS / "recipes_table.md").read_text(encoding="utf-8")
    missing = [line for line in made.splitlines() if line not in shown.splitlines()]
    assert not missing, missing
    assert shown == made


def test_slots_levels_and_keys_are_explained() -> None:
    text = (DOCS / "recipes.md").read_text(encoding="utf-8")
    assert all(f"| `{slot}` |" in text for slot in ORDER)
    assert all(f"| {level} |" in text for level in VERIFICATION)
    assert all(f"`learner.{key}`" in text for key in KEYS.values())
    assert {getattr(LearnerConfig(), key) for key in KEYS.values()} == {"sapo_swarm"}


def test_recipes_that_the_text_names_exist() -> None:
    rows = (DOCS / "recipes.md").read_text(encoding="utf-8").partition("| acronym | recipes |")[2].partition("\n## ")[0]
    named = [word for index, word in enumerate(rows.split("`")) if index % 2]
    assert "sapo_swarm" in named
    assert [name for name in named if name not in list_recipes() and " " not in name] == []
