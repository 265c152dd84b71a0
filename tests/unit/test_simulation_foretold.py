"""Memory and time of a simulation: said before anything is loaded, where it takes more than there is, or long."""

from pathlib import Path

import pytest

from swarm.model.compute_choice import ComputeChoice
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


@pytest.mark.parametrize(
    ("gflops", "options", "num_cores", "expected"),
    [
        (60.0, {}, 2, ""),
        (20.0, {}, 2, "takes about 11 min here"),
        (20.0, {"rounds": 18}, 2, ""),
        (20.0, {"minutes": 5.0}, 2, ""),
        (20.0, {}, 1, "takes about 23 min here"),
        (20.0, {}, 16, "takes about 11 min here"),
    ],
)
def test_a_preset_that_takes_over_ten_minutes_here_says_so(
    gflops: float, options: dict[str, float], num_cores: int, expected: str
) -> None:
    slow = ComputeChoice(dtype="float32", reason="measured", float32_gflops=gflops, bfloat16_gflops=1.0)
    wanted = SimulationOptions(**options)  # pyright: ignore[reportArgumentType]
    lines = command.forecast_lines(wanted, [slow, None], 2, num_cores)
    assert len(lines) == bool(expected) and "".join(lines).startswith(expected)
    assert not lines or "--rounds N makes fewer steps" in lines[0]
