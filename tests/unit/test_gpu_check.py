"""`make gpu-check`: what it says where there is no GPU, and how it goes on where it was cut off."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import FAILED, NO_DEVICE, SECONDS, STAGES_LEFT, Record

has_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


class Stages:
    """Takes the place of the processes that run stages."""

    def __init__(self) -> None:
        self.run: list[str] = []
        self.failing: set[str] = set()
        self.code = "abc"

    def __call__(self, stage: str, device: str, label: str, code: str, model: str, limit_s: float) -> Record:
        self.run.append(stage)
        passed = stage not in self.failing
        return Record(stage=stage, device=label, code=code, passed=passed, seconds=1.0, figures={"speed": 7})


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch) -> Stages:
    made = Stages()
    monkeypatch.setattr(gpu_check, "run_stage", made)
    monkeypatch.setattr(gpu_check, "code_digest", lambda: made.code)
    return made


def check(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["gpu_check", *map(str, arguments)])
    return gpu_check.main()


@has_no_gpu
def test_without_a_gpu_nothing_is_checked_and_the_reason_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stages: Stages, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(monkeypatch, "--records", tmp_path / "records") == NO_DEVICE
    assert stages.run == [] and not (tmp_path / "records").exists()
    said = capsys.readouterr().err
    assert said.startswith("no GPU: torch") and "DEVICE=cpu" in said and said.count("\n") == 1


def test_a_stage_that_passed_is_run_again_only_for_other_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stages: Stages
) -> None:
    options = ("--device", "cpu", "--records", tmp_path)
    stages.failing = {"billion"}
    assert check(monkeypatch, *options) == FAILED and stages.run == [*SECONDS]
    stages.run, stages.failing = [], set()
    assert check(monkeypatch, *options) == 0 and stages.run == ["billion"]
    stages.run = []
    assert check(monkeypatch, *options) == 0 and stages.run == []
    (tmp_path / "weights.json").write_text("torn", encoding="utf-8")
    assert check(monkeypatch, *options) == 0 and stages.run == ["weights"]
    stages.run, stages.code = [], "def"
    assert check(monkeypatch, *options) == 0 and stages.run == [*SECONDS]
    assert len(list(tmp_path.iterdir())) == len(SECONDS)


def test_what_does_not_fit_into_the_budget_is_left_for_the_same_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stages: Stages, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "find_device", lambda _: ("cuda", "cuda (a card)"))
    assert check(monkeypatch, "--records", tmp_path, "--budget-s", 100) == STAGES_LEFT
    assert stages.run == ["device"]  # the tests usually take longer than what is left
    assert "left: tests, learning" in capsys.readouterr().out
    assert check(monkeypatch, "--records", tmp_path) == 0 and stages.run == [*SECONDS]


def test_a_stage_that_is_cut_off_by_the_budget_has_no_record() -> None:
    assert gpu_check.run_stage("device", "cpu", "cpu", "abc", "", limit_s=0.01) is None


@has_no_gpu
def test_a_stage_that_breaks_says_why_and_fails() -> None:
    record = gpu_check.run_stage("device", "cuda", "cuda", "abc", "", limit_s=50.0)
    assert record is not None and not record.passed and "exit code 1" in record.error


def test_the_table_has_a_line_for_each_record(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stages: Stages, capsys: pytest.CaptureFixture[str]
) -> None:
    check(monkeypatch, "--device", "cpu", "--records", tmp_path)
    found: dict[str, Any] = json.loads((tmp_path / "vllm.json").read_text(encoding="utf-8"))
    found["figures"] = {"left_out": "vLLM: none here"}
    (tmp_path / "vllm.json").write_text(json.dumps(found), encoding="utf-8")
    capsys.readouterr()
    assert check(monkeypatch, "--table", "--records", tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(SECONDS) and "| passed | 1 | speed 7 |" in lines[2]
    assert "| left out | 1 | left out: vLLM: none here |" in lines[-1]


def test_an_unknown_stage_or_model_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, stages: Stages, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(monkeypatch, "--device", "cpu", "--records", tmp_path, "--stages", "speed") == NO_DEVICE
    assert "'speed' is none" in capsys.readouterr().err
    assert check(monkeypatch, "--device", "cpu", "--records", tmp_path, "--model", tmp_path) == NO_DEVICE
    assert "no config.json there" in capsys.readouterr().err and stages.run == []
