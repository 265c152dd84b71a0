"""Whoever remembers one spelling of a directory can use it with every command."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm.cli.main import app

RUN = CliRunner()
ONE = ("status", "why", "samples", "eval", "chat", "serve", "train")
SEVERAL = ("report", "watch")


@pytest.fixture(autouse=True)
def logging_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this process, whose tests read what is logged."""
    monkeypatch.setattr("swarm.telemetry.setup_logging", lambda *_: None)


@pytest.mark.parametrize("name", (*ONE, *SEVERAL))
def test_an_argument_and_dir_say_the_same(name: str, tmp_path: Path) -> None:
    options = ["--once"] if name == "watch" else []
    missing = str(tmp_path / "nowhere")
    said = [
        RUN.invoke(app, [name, *options, *spelled]) for spelled in ([missing], ["--dir", missing], [f"--dir={missing}"])
    ]
    assert {(each.exit_code, each.output) for each in said} == {(said[0].exit_code, said[0].output)}
    assert said[0].exit_code == 2 and "nowhere" in "".join(said[0].output.split())


@pytest.mark.parametrize("name", ONE)
def test_two_directories_where_one_is_meant_are_refused(name: str) -> None:
    assert "unexpected extra argument" in RUN.invoke(app, [name, "here", "--dir", "there"]).output


def test_a_model_is_exported_from_dir_into_the_argument(tmp_path: Path) -> None:
    found = RUN.invoke(app, ["export", "--dir", str(tmp_path / "nowhere"), str(tmp_path / "out")])
    assert found.exit_code == 2 and "nowhere: no node.toml" in "".join(found.output.splitlines())
    help_text = RUN.invoke(app, ["export", "--help"]).output
    assert "--dir DIR is the same as the first argument" in help_text
