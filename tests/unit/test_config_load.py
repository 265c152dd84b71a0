"""A configuration that cannot be read says why, in one line; one that is changed is validated as a whole."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm.cli.main import app
from swarm.config import CoordinatorConfig, NodeConfig, load_config
from swarm.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "reason"),
    [("", "Is a directory"), ("node.toml/deeper", "Not a directory"), ("nowhere.toml", "no such file")],
)
def test_what_is_no_readable_file_is_named_with_the_reason(tmp_path: Path, name: str, reason: str) -> None:
    (tmp_path / "node.toml").write_text("")
    path = tmp_path / name
    with pytest.raises(ConfigError, match=f"^{path}: .*{reason}$"):
        load_config(NodeConfig, path)
    found = CliRunner().invoke(app, ["check", "--config", str(path)], env={"COLUMNS": "400"})
    assert found.exit_code == 2
    assert found.stderr.startswith("ConfigError:")


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(NodeConfig, path)


def test_the_configuration_of_a_coordinator_given_for_a_node_is_told_from_it(tmp_path: Path) -> None:
    path = tmp_path / "coordinator.toml"
    path.write_text('listen = "127.0.0.1:0"\n[node]\nrun_id = "demo"\n')
    with pytest.raises(ConfigError, match="so it is a coordinator's"):
        load_config(NodeConfig, path)
    assert load_config(CoordinatorConfig, path).node.run_id == "demo"
    found = CliRunner().invoke(app, ["doctor", "--config", str(path)], env={"COLUMNS": "400"})
    assert found.exit_code == 2 and "a table [node], so" in found.stderr, "brackets are no markup"


@pytest.mark.parametrize("port", [-1, 1, 80, 442, 444, 1023, 65_536, 70_000])
def test_a_port_that_nobody_dials_for_a_relay_is_refused_with_the_ones_that_are(port: int, tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    path.write_text(f"[exchange]\nrelay_port = {port}")
    with pytest.raises(ConfigError, match=r"relay_port: .*expected 443, 1024 to 65535, or 0 .*got"):
        load_config(NodeConfig, path)
