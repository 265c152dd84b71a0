"""The preset `tiny-agents` as processes: its nodes admit each other alone, and the report has their episodes."""

import io
import json
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from swarm.identity import Identity
from swarm.simulate.command import run_command
from swarm.simulate.presets import SimulationOptions

pytestmark = pytest.mark.sweep


def test_two_nodes_learn_each_others_episodes_and_the_report_shows_them(tmp_path: Path) -> None:
    quick = ("evaluation.num_problems=4", "evaluation.num_tries=2")
    options = SimulationOptions(preset="tiny-agents", nodes=2, rounds=12, overrides=quick)
    said = io.StringIO()
    assert run_command(options, tmp_path, "", Console(file=said, width=80)), said.getvalue()

    homes = [tmp_path / "swarm" / name for name in ("ada", "bell")]
    ids = [Identity.load(home / "identity.key").node_id for home in homes]
    for home in (*homes, tmp_path / "swarm" / "coordinator"):
        (path,) = home.glob("*.toml")
        config = tomllib.loads(path.read_text())
        entry = config.get("node", config)["entry"]
        assert (entry["kind"], entry["members"]) == ("members", ids), path

    ada, bell = json.loads((tmp_path / "report.json").read_text())["result"]["swarm"]["nodes"]
    assert ada["learned_from"]["look_up"][0] > 0 and bell["learned_from"]["grid"][0] > 0
    assert ada["learned_from"]["grid"][0] == 0 < ada["learned_from"]["grid"][1]
    assert bell["learned_from"]["look_up"][0] == 0 < bell["learned_from"]["look_up"][1]
    for node in (ada, bell):
        shown = {(episode["env"], episode["step"]) for episode in node["episodes"]}
        assert shown == {(env, step) for env in ("look_up", "grid") for step in (0, 12)}
    page = (tmp_path / "report.html").read_text()
    assert "which never generates it" in page and "of 2 tries succeed" in page
    assert "An episode of grid, which ada never generates" in said.getvalue()
