"""`swarm bench` lists and runs what `benchmarks/` holds."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from swarm.cli.main import app

ROOT = Path(__file__).parents[2]


def test_every_benchmark_is_listed_with_its_question() -> None:
    shown = CliRunner().invoke(app, ["bench"], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    names = [path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")]
    assert "staleness" in names and all(name in shown.output for name in names)
    assert "Age that data may have" in shown.output


def test_what_follows_the_name_reaches_the_benchmark(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "none.jsonl"
    found = CliRunner().invoke(app, ["bench", "staleness", "--table", "--out", str(out)])
    assert found.exit_code == 1
    assert f"{out} holds no run" in capfd.readouterr().err  # in one line, to be copied


def test_an_unknown_benchmark_is_named_with_the_known_ones() -> None:
    found = CliRunner().invoke(app, ["bench", "stalenes"])
    assert found.exit_code == 2 and "known: " in found.output and "staleness" in found.output
