"""Figures of benchmarks as data: written with what made them, and compared with a tolerance."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import compare
from benchmarks._baselines import Baseline, machine_kind, write_record


def test_a_record_keeps_figures_commit_versions_and_the_arguments_that_make_it_again(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    write_record(path, "exchange", ["--peers", "2", "--record", str(path), "--json"], {"ratio": 1.23456789})
    found = Baseline.read(path)
    assert (found.benchmark, found.machine, found.arguments) == ("exchange", machine_kind(), ("--peers", "2", "--json"))
    assert found.figures == {"ratio": 1.23457} and found.commit and "python" in found.versions


def test_a_figure_beyond_the_tolerance_or_missing_fails_the_comparison(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"exchange-{machine_kind()}.json"
    write_record(path, "exchange", ["--record", str(path)], {"a": 1.0, "b": 2.0})
    recorded = Baseline.read(path)
    monkeypatch.setattr(compare, "FOLDER", tmp_path)
    for figures, code in (({"a": 1.2, "b": 1.8}, 0), ({"a": 1.3, "b": 2.0}, 1), ({"a": 1.0}, 1)):
        monkeypatch.setattr(compare, "run_again", lambda _, figures=figures: replace(recorded, figures=figures))
        assert compare.main([]) == code
    assert "| exchange | a | 1 | 1.3 | 1.30 ! |" in capsys.readouterr().out
