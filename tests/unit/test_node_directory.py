"""`swarm-node` finds a node's state beside its node.toml, from whatever working directory it is started."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import node.cli
from swarm.config import NodeConfig
from swarm.identity import Identity


def started_in(monkeypatch: pytest.MonkeyPatch, *options: str) -> Path:
    """`dir` of the node that the command would run."""
    seen: list[NodeConfig] = []

    async def run_daemon(config: NodeConfig) -> None:
        seen.append(config)

    monkeypatch.setattr("node.daemon.run_daemon", run_daemon)
    monkeypatch.setattr("swarm.telemetry.setup_logging", lambda *_: None)
    found = CliRunner().invoke(node.cli.app, ["start", *options])
    assert found.exit_code == 0, found.output
    return seen[0].dir


def test_a_node_that_is_started_from_elsewhere_is_the_same_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home" / "ada"
    home.mkdir(parents=True)
    Identity.create().save(home / "identity.key")
    (home / "node.toml").write_text('dir = "ada"\n')
    monkeypatch.chdir(tmp_path / "home")
    assert started_in(monkeypatch, "--config", "ada/node.toml") == Path("ada")
    monkeypatch.chdir(tmp_path)
    begun = started_in(monkeypatch, "--config", "home/ada/node.toml")
    assert begun == Path("home/ada"), "elsewhere a new key would be made"
    assert started_in(monkeypatch, "--config", "home/ada/node.toml", "--set", "dir=new") == Path("new")


def test_a_file_without_a_key_beside_it_says_where_the_node_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "node.toml").write_text('dir = "ada"\n')
    monkeypatch.chdir(tmp_path)
    assert started_in(monkeypatch, "--config", "node.toml") == Path("ada")
