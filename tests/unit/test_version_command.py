"""`swarm --version`: from a checkout it names the commit, so that a report of a fault can."""

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm import __version__
from swarm.cli import main
from swarm.cli.main import app

RUN = CliRunner()
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_a_checkout_names_its_commit() -> None:
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    said = RUN.invoke(app, ["--version"]).stdout.strip()
    assert said.removesuffix("-dirty)").removesuffix(")") == f"{__version__} ({head[:12]}"


def test_an_installed_wheel_and_a_machine_without_git_say_the_version_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert RUN.invoke(app, ["--version"]).stdout.strip() == __version__
    monkeypatch.undo()
    monkeypatch.setattr(main, "__file__", str(tmp_path / "site" / "swarm" / "cli" / "main.py"))
    assert RUN.invoke(app, ["--version"]).stdout.strip() == __version__
