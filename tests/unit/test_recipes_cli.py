"""`swarm recipes` and `swarm check`: what they print for programs and people, and names that do not exist."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from swarm.cli.main import app
from swarm.cli.recipe_description import ORDER, parts_of
from swarm.config import EnvironmentConfig, GeneratorConfig, LearnerConfig, NodeConfig, ReplayConfig
from swarm.objectives.methods import list_recipes, load_recipe
from swarm.objectives.requirements import supplied_by

ROOT = Path(__file__).parents[2]
LAPTOP = ROOT / "deploy" / "configs" / "laptop.toml"

MINE = '''"""My method: a clip that closes with the group."""
from swarm.objectives.methods import load_recipe
from dataclasses import replace
RECIPE = replace(load_recipe("grpo"), name="mine", title="Mine", acronym="", arxiv="", verification="ours")
NOT_ONE = 3
'''


def swarm(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_every_recipe_is_listed_with_every_field() -> None:
    rows = json.loads(swarm("recipes", "--json").stdout)
    assert [row["name"] for row in rows] == list(list_recipes())
    assert len(rows) >= 60
    fields = ["name", "acronym", "title", "arxiv", "url", "verification", "scope", "needs", "not_yet"]
    assert all(list(row) == [*fields, "accepts", "parts"] for row in rows)
    for row in rows:
        assert row["title"] and (row["url"] or row["verification"] == "ours"), row["name"]
        assert row["verification"] in ("code", "paper", "secondary", "ours")
        assert {"advantage", "ratio", "weight", "aggregate"} <= set(row["parts"])
        for part in row["parts"].values():
            assert part["part"] and part["equation"].isascii() and isinstance(part["constants"], dict)


def test_recipes_list_says_the_same_as_recipes() -> None:
    assert swarm("recipes", "list", "--json").stdout == swarm("recipes", "--json").stdout
    shown = swarm("recipes").stdout
    assert shown == swarm("recipes", "list").stdout
    assert all(name in shown for name in list_recipes())


def test_a_recipe_that_no_run_can_feed_says_so_wherever_it_is_shown() -> None:
    """Inputs that runs supply are computed from the widest configuration, not from the list that marks recipes."""
    env = EnvironmentConfig(name="sums", kind="char", dataset="sum", num_tasks=100)
    episodes = EnvironmentConfig(name="apps", kind="apps", num_tasks=100)
    widest = NodeConfig(
        environments=(env, episodes),
        replay=ReplayConfig(keep_zero_variance=True),
        generator=GeneratorConfig(byte_lengths=True, group_size=4, largest_group=8),
        learner=LearnerConfig(updates_per_step=2),
    )
    idle = {name for name in list_recipes() if load_recipe(name).needs - supplied_by(widest)}
    assert {"hbpo", "pipo"} <= idle
    assert not {"at2po", "gigpo", "otc_po", "matchtir", "gdpo"} & idle
    rows = json.loads(swarm("recipes", "--json").stdout)
    assert {row["name"] for row in rows if row["not_yet"]} == idle
    assert all(set(row["not_yet"]) <= set(row["needs"]) for row in rows)
    shown, table = swarm("recipes").stdout, swarm("recipes", "list", "--markdown").stdout
    assert f"{len(idle)} cannot run yet" in shown
    for name in list_recipes():
        line = next(line for line in table.splitlines() if line.startswith(f"| `{name}` |"))
        assert line.endswith("| yes |") == (name not in idle), name
        assert (f"  {name} (" in shown) == (name in idle), name
    assert "not yet: nothing supplies budgets" in swarm("recipes", "show", "hbpo").stdout


def test_a_recipe_is_shown_with_its_equation_and_the_address_of_every_constant() -> None:
    shown = swarm("recipes", "show", "dapo").stdout
    recipe = load_recipe("dapo")
    assert recipe.title in shown and "swarm/objectives/methods/dapo.py" in shown
    assert all(part.equation in shown for part in parts_of(recipe))
    assert "--set learner.recipe_params.weight.high=0.28" in shown
    assert "EXACT" in shown and "NO_LOGPROBS" in shown and "no, it needs behaviour log-probs" in shown


@pytest.mark.parametrize("name", ["tis_veto", "fg_expo"])
def test_parts_are_shown_in_the_order_in_which_a_rollout_meets_them(name: str) -> None:
    slots = [part.address.split(".")[0] for part in parts_of(load_recipe(name))]
    assert slots == sorted(slots, key=ORDER.index)
    assert len(slots) == len(load_recipe(name).parts)


def test_what_show_gives_to_programs_can_be_set() -> None:
    page = json.loads(swarm("recipes", "show", "dapo", "--json").stdout)
    prefix = "learner.recipe_params."
    overrides = {address.removeprefix(prefix): value for address, value in page["constants"].items()}
    assert load_recipe("dapo", overrides) == load_recipe("dapo")
    assert set(page["supply"]) == set(page["needs"])
    assert page["about"].startswith("Clip-higher")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("gspoo", "gspo"), ("SAPO", "sapo_swarm"), ("clip_higher", "dapo"), ("swarm-sampling", "sapo_swarm")],
)
def test_a_wrong_name_is_answered_with_the_likely_one(wrong: str, meant: str) -> None:
    result = swarm("recipes", "show", wrong)
    assert result.exit_code == 2
    assert f"unknown recipe '{wrong}'; did you mean" in result.stderr and meant in result.stderr


@pytest.mark.parametrize(
    ("acronym", "name"),
    [("GSPO", "gspo"), ("Dr.GRPO", "dr_grpo"), ("REINFORCE++", "reinforce_plus_plus"), ("A*-PO", "a_star_po")],
)
def test_a_recipe_is_known_by_its_acronym_as_the_paper_spells_it(acronym: str, name: str) -> None:
    assert load_recipe(acronym) == load_recipe(name)
    assert load_recipe(name).acronym == acronym


def test_a_name_like_no_other_is_answered_with_where_to_look() -> None:
    assert "`swarm recipes` lists" in swarm("recipes", "show", "xyzzy").stderr


def test_check_names_the_recipe_and_what_the_run_does_not_supply() -> None:
    good = swarm("check", "--config", str(LAPTOP), "--set", "recipe=gspo")
    assert good.exit_code == 0 and "recipe gspo (GSPO)" in good.stdout
    bad = swarm("check", "--config", str(LAPTOP), "--set", "learner.recipe=ngrpo")
    assert bad.exit_code == 2
    assert "replay.keep_zero_variance = true" in " ".join(bad.stderr.split())


def test_check_reads_the_run_of_a_coordinator() -> None:
    run = str(LAPTOP.with_name("coordinator.toml"))
    good = swarm("check", "--config", run)
    assert good.exit_code == 0 and "groups of every kind" in good.stdout
    bad = swarm("check", "--config", run, "--set", "node.learner.recipe=ngrpo")
    assert bad.exit_code == 2 and "keep_zero_variance" in bad.stderr
    assert "no such file" in swarm("check", "--config", "nowhere.toml").stderr


@pytest.mark.parametrize("spec", ["mine.py:RECIPE", "mine:RECIPE", "./mine.py:RECIPE"])
def test_a_file_of_the_working_directory_is_a_recipe(
    spec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    assert "My method: a clip that closes with the group." in swarm("recipes", "show", spec).stdout
    assert "recipe mine" in swarm("check", "--config", str(LAPTOP), "--set", f"recipe={spec}").stdout
    wrong = swarm("recipes", "show", spec.replace("RECIPE", "NOT_ONE"))
    assert wrong.exit_code == 2 and "not a swarm.objectives.recipe.Recipe" in " ".join(wrong.stderr.split())


def test_a_file_of_the_working_directory_never_shadows_an_installed_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    result = swarm("recipes", "show", "json:RECIPE")
    assert result.exit_code == 2 and "no 'RECIPE'" in " ".join(result.stderr.split())
