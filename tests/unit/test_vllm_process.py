"""What a vLLM engine that cannot be started says, without vLLM."""

import json
import sys
from pathlib import Path

import pytest

from swarm.config import EngineConfig, ModelConfig, NodeConfig
from swarm.errors import ConfigError, Unavailable
from swarm.generation.tolerances import TOLERANCE_NATS, tolerance_nats
from swarm.generation.vllm_engine import VllmGenerator
from swarm.generation.vllm_process import EngineProcess, has_vllm, vllm_python
from swarm.generation.vllm_settings import EngineSettings
from swarm.model import CharTokenizer
from swarm.types import PolicyVersion


def started(python: str, directory: Path) -> EngineProcess:
    return EngineProcess(python, _settings(directory), directory, 1)


def _settings(directory: Path) -> EngineSettings:
    return EngineSettings(
        model=str(directory),
        dtype="float32",
        max_rows=1,
        eos_ids=[1],
        version=PolicyVersion(policy_id="a", step=3, digest=bytes(range(32))),
        options={"max_model_len": 64},
        stall_s=60.0,
    )


def test_a_missing_interpreter_is_told_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"engine.python.*make vllm"):
        started(str(tmp_path / "python"), tmp_path)


def test_settings_are_read_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    _settings(tmp_path).write(path)
    assert EngineSettings.read(path) == _settings(tmp_path)


@pytest.mark.parametrize("change", [{"gone": 1}, {"stall_s": None}])
def test_settings_of_another_release_are_told_with_the_fix(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "settings.json"
    _settings(tmp_path).write(path)
    plain = {**json.loads(path.read_text(encoding="utf-8")), **change}
    kept = {name: value for name, value in plain.items() if value is not None}
    path.write_text(json.dumps(kept), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"another release.*make vllm"):
        EngineSettings.read(path)


@pytest.mark.timeout(60)
def test_an_environment_without_vllm_is_told_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No module named 'vllm'.*make vllm"):
        started(sys.executable, tmp_path)


def test_a_process_that_ends_while_it_starts_may_be_tried_again(tmp_path: Path) -> None:
    zero_variance = tmp_path / "python"
    zero_variance.write_text("#!/bin/sh\necho it broke >&2\nexit 3\n", encoding="utf-8")
    zero_variance.chmod(0o755)
    with pytest.raises(Unavailable, match="it broke"):
        started(str(zero_variance), tmp_path)
    assert not list(tmp_path.glob("*.sock"))


def test_a_directory_too_long_for_a_socket_is_told_before_anything_starts(tmp_path: Path) -> None:
    directory = tmp_path / ("x" * 100)
    directory.mkdir()
    with pytest.raises(ConfigError, match="too long"):
        started("/bin/false", directory)


@pytest.mark.parametrize(
    ("model", "word"), [(ModelConfig(source="tiny"), "tiny"), (ModelConfig(lora_rank=4), "lora_rank")]
)
def test_models_that_it_cannot_run_are_refused_at_once(tmp_path: Path, model: ModelConfig, word: str) -> None:
    config = NodeConfig(dir=tmp_path, model=model, engine=EngineConfig(kind="vllm"))
    with pytest.raises(ConfigError, match=word):
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
