"""The nodes of a simulation are made with every override; a recipe of one's own is offered to nobody."""

from pathlib import Path

import pytest

from swarm.config import EntryConfig
from swarm.errors import ConfigError
from swarm.identity import Identity
from swarm.simulate.local.run import _config_to_offer, _listed
from swarm.simulate.presets import SimulationOptions, node_configs


def test_overrides_are_part_of_every_node() -> None:
    nodes = node_configs(SimulationOptions(preset="tiny", nodes=2, overrides=("replay.max_groups=7",)), Path("out"))
    assert [(node.name, node.dir, node.replay.max_groups) for node in nodes] == [
        ("ada", Path("out/ada"), 7),
        ("bell", Path("out/bell"), 7),
    ]


def test_other_environments_are_shared_among_the_nodes_as_those_of_the_preset() -> None:
    names = ("a", "b", "c")
    sections = ", ".join(f'{{name = "{name}", kind = "char", dataset = "sort"}}' for name in names)
    options = SimulationOptions(preset="tiny", nodes=2, overrides=(f"environments=[{sections}]",))
    nodes = node_configs(options, Path("out"))
    assert [tuple(each.name for each in node.environments) for node in nodes] == [names, names]
    assert [tuple(node.generator.env_weights) for node in nodes] == [("a", "c"), ("b",)]


def test_only_a_limit_of_time_has_no_limit_of_rounds() -> None:
    def num_steps(**changes: float) -> int:
        return node_configs(SimulationOptions(preset="tiny", **changes), Path())[0].learner.num_steps  # type: ignore[arg-type]

    assert (num_steps(), num_steps(minutes=0), num_steps(minutes=2, rounds=3)) == (30, 0, 3)


def test_a_run_with_a_recipe_of_ones_own_offers_only_its_bounds() -> None:
    (plain,) = node_configs(SimulationOptions(preset="tiny", nodes=1), Path())
    (own,) = node_configs(SimulationOptions(preset="tiny", nodes=1, recipe="my_file.py:RECIPE"), Path())
    assert _config_to_offer(plain) == plain
    assert _config_to_offer(own).learner.recipe == "sapo_swarm"
    assert _config_to_offer(own).replay.max_age_steps == own.replay.max_age_steps


def test_a_preset_with_a_member_list_admits_the_nodes_of_its_own_keys(tmp_path: Path) -> None:
    nodes = node_configs(SimulationOptions(preset="tiny-agents", nodes=2), tmp_path)
    listed = _listed(nodes)
    ids = tuple(Identity.load(node.dir / "identity.key").node_id for node in nodes)
    assert len(set(ids)) == 2 and _listed(nodes) == listed, "a second run of the same folder has the same keys"
    assert [node.entry for node in listed] == [EntryConfig(kind="members", members=ids)] * 2
    open_to_all = SimulationOptions(preset="tiny-agents", nodes=2, overrides=("entry.established=everybody",))
    assert [node.entry.kind for node in _listed(node_configs(open_to_all, tmp_path))] == ["open", "open"]


def test_a_recipe_of_the_command_takes_the_place_of_the_presets() -> None:
    def recipe(**changes: str) -> str:
        return node_configs(SimulationOptions(preset="tiny-agents", **changes), Path())[0].learner.recipe  # type: ignore[arg-type]

    assert (recipe(), recipe(recipe="gigpo")) == ("turn_reward_to_go", "gigpo")


def test_a_simulation_whose_checkpoints_are_deleted_writes_none_at_its_end() -> None:
    def saves(**changes: object) -> bool:
        return node_configs(SimulationOptions(preset="smollm", **changes), Path())[0].disk.checkpoint_at_end  # type: ignore[arg-type]

    assert (saves(), saves(keep_checkpoints=True)) == (False, True)
    assert saves(overrides=("disk.checkpoint_at_end=true",)), "who asks for one gets it"


def test_an_override_may_be_of_one_node() -> None:
    changes = ("ada:compute_dtype=float32", 'bell:telemetry.metrics_listen="127.0.0.1:0"', "replay.max_groups=7")
    ada, bell = node_configs(SimulationOptions(preset="tiny", nodes=2, overrides=changes), Path("out"))
    assert (ada.compute_dtype, bell.compute_dtype) == ("float32", "auto")
    assert (ada.telemetry.metrics_listen, bell.telemetry.metrics_listen) == ("", "127.0.0.1:0")
    assert ada.replay.max_groups == bell.replay.max_groups == 7
    with pytest.raises(ConfigError, match="no node 'zoe'; the nodes are ada, bell"):
        node_configs(SimulationOptions(preset="tiny", nodes=2, overrides=("zoe:seed=1",)), Path("out"))
