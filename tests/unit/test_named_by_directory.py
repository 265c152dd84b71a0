"""A node is named by its directory in every command, also with `--dir`; `--config FILE` names a file elsewhere."""

import threading
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from coordinator.cli import _settings as coordinator_settings
from coordinator.cli import app as coordinator_app
from node.cli import _settings as node_settings
from node.cli import app as node_app
from swarm.cli.main import app as swarm_app
from swarm.config import config_file
from swarm.errors import ConfigError
from swarm.process import write_json

RUN = CliRunner()
ONE = ("status", "why", "samples", "eval", "chat", "serve", "train")
SEVERAL = ("report", "watch")


def test_a_directory_stands_for_the_configuration_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, file in (("ada", "node.toml"), ("swarm-node", "node.toml"), ("run", "coordinator.toml")):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("")
    assert config_file(Path("ada")) == config_file(None, Path("ada")) == Path("ada/node.toml")
    assert config_file(None) == Path("swarm-node/node.toml") and config_file(Path("run")) == Path(
        "run/coordinator.toml"
    )
    assert config_file(None, Path("ada/node.toml")) == Path("ada/node.toml")
    assert node_settings(Path("ada"), None, []).dir == Path("ada"), "its state is where it was named"
    assert coordinator_settings(Path("run"), None).dir == Path("run")
    for directory, config, words in (
        (Path("ada"), Path("run"), "both name"),
        (tmp_path, None, "neither node.toml nor coordinator.toml"),
        (None, Path("gone.toml"), "no such file"),
    ):
        with pytest.raises(ConfigError, match=words):
            config_file(directory, config)


@pytest.mark.parametrize(
    ("app", "words"),
    [
        (swarm_app, ["check"]),
        (swarm_app, ["doctor"]),
        (swarm_app, ["status"]),
        (node_app, ["start"]),
        (node_app, ["invite", "ID"]),
        (coordinator_app, ["start"]),
        (coordinator_app, ["link"]),
        (coordinator_app, ["invite", "ID"]),
    ],
)
def test_every_command_takes_a_directory_and_names_it_in_an_error(
    app: typer.Typer, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.cli.GRACE_S", 0.0)
    result = RUN.invoke(app, [*words, str(tmp_path)])
    assert result.exit_code == 2 and str(tmp_path) in result.output.replace("\n", ""), result.output
    assert "Usage" not in result.output


def test_an_empty_link_asks_whether_the_coordinator_runs(tmp_path: Path) -> None:
    """As `swarm join "$(swarm-coordinator link)"` gives it where that command failed."""
    result = RUN.invoke(swarm_app, ["join", "", str(tmp_path / "ada")])
    assert result.exit_code == 2 and "it is empty: does the coordinator run?" in result.output


def test_the_link_of_a_coordinator_that_is_starting_is_waited_for(tmp_path: Path) -> None:
    comes = threading.Timer(0.2, write_json, (tmp_path / "coordinator.json", {"link": "swarm://x"}))
    comes.start()
    try:
        assert RUN.invoke(coordinator_app, ["link", str(tmp_path)]).stdout == "swarm://x\n"
    finally:
        comes.join()


@pytest.fixture(autouse=True)
def logging_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this process, whose tests read what is logged."""
    monkeypatch.setattr("swarm.telemetry.setup_logging", lambda *_: None)


@pytest.mark.parametrize("name", (*ONE, *SEVERAL))
def test_an_argument_and_dir_say_the_same(name: str, tmp_path: Path) -> None:
    options = ["--once"] if name == "watch" else []
    missing = str(tmp_path / "nowhere")
    said = [
        RUN.invoke(swarm_app, [name, *options, *spelled])
        for spelled in ([missing], ["--dir", missing], [f"--dir={missing}"])
    ]
    assert {(each.exit_code, each.output) for each in said} == {(said[0].exit_code, said[0].output)}
    assert said[0].exit_code == 2 and "nowhere" in "".join(said[0].output.split())


@pytest.mark.parametrize("name", ONE)
def test_two_directories_where_one_is_meant_are_refused(name: str) -> None:
    assert "unexpected extra argument" in RUN.invoke(swarm_app, [name, "here", "--dir", "there"]).output


def test_a_model_is_exported_from_dir_into_the_argument(tmp_path: Path) -> None:
    found = RUN.invoke(swarm_app, ["export", "--dir", str(tmp_path / "nowhere"), str(tmp_path / "out")])
    assert found.exit_code == 2 and "nowhere: no node.toml" in "".join(found.output.splitlines())
    help_text = RUN.invoke(swarm_app, ["export", "--help"]).output
    assert "--dir DIR is the same as the first argument" in help_text
