"""docs/off_policyness.md names keys, recipes, constants, metrics and files that exist, with their defaults."""

import re
from pathlib import Path

import pytest

from swarm.config import NodeConfig
from swarm.objectives.methods import list_recipes, load_recipe
from swarm.telemetry.metrics import METRICS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "off_policyness.md").read_text(encoding="utf-8")
DEFAULTS = NodeConfig.model_validate({"environments": [{"name": "a", "kind": "char"}]}).model_dump(mode="json")
CONSTANTS = {address for name in list_recipes() for address in load_recipe(name).constants}


def words() -> set[str]:
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)))


def test_every_key_is_one_of_node_toml() -> None:
    sections = "|".join(name for name, value in DEFAULTS.items() if isinstance(value, dict | list))
    keys = {word.partition(" =")[0].partition("=")[0] for word in words() if re.match(rf"({sections})\.\w", word)}
    known = {f"{section}.{key}" for section, values in DEFAULTS.items() if isinstance(values, dict) for key in values}
    known |= {f"environments.{key}" for key in DEFAULTS["environments"][0]} | {"learner.recipe_params.corrections"}
    unknown = {key for key in keys - known if key.removeprefix("learner.recipe_params.") not in CONSTANTS}
    assert len(keys) > 20 and not unknown, unknown


def test_the_defaults_that_are_told_are_those_of_the_configuration() -> None:
    told = re.findall(r"`(\w+)\.(\w+)` \((\d[\de.-]*)[);]", PAGE) + re.findall(
        r"^\| `(\w+)\.(\w+)` \| (\d+) \|", PAGE, re.M
    )
    assert len(told) > 8
    assert [each for each in told if float(each[2]) != DEFAULTS[each[0]][each[1]]] == []


@pytest.mark.parametrize("recipe", ["tis", "icepop", "decoupled_ppo", "sapo_swarm"])
def test_a_ratio_against_the_proximal_policy_is_one(recipe: str) -> None:
    assert load_recipe(recipe).constants["ratio.against"] == "proximal"


@pytest.mark.parametrize("recipe", ["grpo", "dapo", "gspo", "cispo"])
def test_a_ratio_against_the_generator_is_one(recipe: str) -> None:
    assert load_recipe(recipe).constants["ratio.against"] == "behavior"


def test_every_recipe_named_as_one_exists() -> None:
    named = {
        name
        for row in re.findall(r"recipes? (.+?)(?:[|;:]|$)", PAGE, re.M)
        for name in re.findall(r"`([a-z][a-z0-9_]+)`", row)
    }
    foreign = {"token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "against", "behavior"}
    assert len(named) > 20
    assert named - foreign - set(list_recipes()) == set()


def test_every_file_and_every_metric_exists() -> None:
    files = {word for word in words() if word.startswith("swarm/")}
    metrics = {word for word in words() if re.match(r"learn/\w+$", word)}
    assert len(files) > 8 and [file for file in files if not (ROOT / file).exists()] == []
    assert len(metrics) > 3 and metrics <= set(METRICS)
