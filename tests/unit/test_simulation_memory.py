"""Memory of a simulation: said before anything is loaded, where its nodes together need more than there is."""

from pathlib import Path

import pytest

from swarm.simulate import command
from swarm.simulate.presets import SimulationOptions, node_configs

GIB = 2**30


@pytest.fixture(autouse=True)
def no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "has_card", lambda: False)


def test_a_preset_that_does_not_fit_says_what_its_nodes_need_together_and_what_takes_less(tmp_path: Path) -> None:
    nodes = node_configs(SimulationOptions(preset="tiny", nodes=4), tmp_path)
    (line,) = command.memory_lines(nodes, GIB // 2)
    assert line.startswith("memory: 4 nodes need about") and "--nodes or --preset tiny takes less" in line


def test_a_preset_that_fits_says_nothing(tmp_path: Path) -> None:
    assert command.memory_lines(node_configs(SimulationOptions(preset="tiny"), tmp_path), 2 * GIB) == []
