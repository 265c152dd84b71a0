"""The nodes of a simulation are made with every override; a recipe of one's own is offered to nobody."""

from pathlib import Path

from swarm.simulate.local.run import _config_to_offer
from swarm.simulate.presets import SimulationOptions, node_configs


def test_overrides_are_part_of_every_node() -> None:
    nodes = node_configs(SimulationOptions(preset="tiny", nodes=2, overrides=("replay.max_groups=7",)), Path("out"))
    assert [(node.name, node.dir, node.replay.max_groups) for node in nodes] == [
        ("ada", Path("out/ada"), 7),
        ("bell", Path("out/bell"), 7),
    ]


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
