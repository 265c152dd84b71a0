"""Errors of a vLLM engine that cannot be started, without vLLM."""

import sys
from pathlib import Path

import pytest

from swarm.config import EngineConfig, ModelConfig, NodeConfig
from swarm.errors import ConfigError, Unavailable
from swarm.generation.canaries import TOLERANCE_NATS, tolerance_nats
from swarm.generation.vllm_engine import VllmGenerator
from swarm.generation.vllm_messages import EngineSettings
from swarm.generation.vllm_process import EngineProcess, has_vllm, vllm_python
from swarm.model.tokenizer import CharTokenizer
from swarm.types import PolicyVersion


def started(python: str, directory: Path) -> EngineProcess:
    return EngineProcess(python, _settings(directory), directory, 1)


def _settings(directory: Path) -> EngineSettings:
    return EngineSettings(
        model=str(directory),
        dtype="float32",
        compute_dtype="auto",
        cpu_dtype="float32",
        max_rows=1,
        eos_ids=[1],
        version=PolicyVersion(policy_id="a", step=3, digest=bytes(range(32))),
        options={"max_model_len": 64},
        stall_s=60.0,
    )


def test_a_missing_interpreter_is_told_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.python.*make vllm"):
        started(str(tmp_path / "python"), tmp_path)


def test_an_environment_without_vllm_is_told_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No module named 'vllm'.*make vllm"):
        started(sys.executable, tmp_path)


def test_a_process_that_ends_while_it_starts_may_be_tried_again(tmp_path: Path) -> None:
    silent_python = tmp_path / "python"
    silent_python.write_text("#!/bin/sh\necho it broke >&2\nexit 3\n", encoding="utf-8")
    silent_python.chmod(0o755)
    with pytest.raises(Unavailable, match="it broke"):
        started(str(silent_python), tmp_path)


@pytest.mark.parametrize("says_more", [True, False])
def test_a_process_that_starts_is_waited_for_while_it_prints(
    says_more: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.generation.vllm_process.PROGRESS_S", 0.1)
    monkeypatch.setattr("swarm.generation.vllm_process.SILENCE_S", 1.5)
    script = tmp_path / "python"
    line = "echo shard $N >&2" if says_more else "true"
    script.write_text(f"#!/bin/sh\nfor N in 1 2 3 4 5 6 7 8; do {line}; sleep 0.25; done\necho it broke >&2\n")
    script.chmod(0o755)
    ending = "it broke" if says_more else r"process \d+ is not ready, and printed nothing for \d+ s"
    with pytest.raises(Unavailable, match=ending):
        started(str(script), tmp_path)


def test_a_model_that_it_cannot_run_is_refused_at_once(tmp_path: Path) -> None:
    config = NodeConfig(dir=tmp_path, model=ModelConfig(source="tiny"), engine=EngineConfig(kind="vllm"))
    with pytest.raises(ConfigError, match="tiny"):
        VllmGenerator.from_config(config, CharTokenizer(), PolicyVersion(policy_id="a", step=0))


def test_the_interpreter_is_the_named_one_then_that_of_the_environment_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert vllm_python(EngineConfig(python="/opt/python")) == "/opt/python"
    assert vllm_python(EngineConfig()) == sys.executable
    own = tmp_path / ".venv-vllm" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch()
    assert vllm_python(EngineConfig()) == str(own)


def test_only_an_interpreter_that_finds_vllm_has_it(tmp_path: Path) -> None:
    assert not has_vllm(EngineConfig(python=str(tmp_path / "python")))
    assert not has_vllm(EngineConfig(python=sys.executable))


def test_a_configured_tolerance_comes_before_the_measured_one() -> None:
    assert tolerance_nats("vllm", "bfloat16", 0.3) == 0.3
    for engine, by_dtype in TOLERANCE_NATS.items():
        assert 0 < tolerance_nats(engine, "float32") < tolerance_nats(engine, "bfloat16") == by_dtype["bfloat16"]
