"""Expectations of a run before it starts: memory, bytes of groups and versions, and seconds if they are measured.

Invariant: without a measurement no seconds are claimed; a measurement runs a real node alone, in a directory that is
deleted afterwards.
"""

import resource
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from node.run_estimate import (
    LIKE_LLAMA,
    MemoryEstimate,
    estimate_memory,
    group_bytes,
    lengths_of,
    patch_bytes,
    read_shape,
    version_bytes,
)
from node.sampled_tasks import SampledEnvironment
from swarm.config import NodeConfig, parse_config
from swarm.errors import ConfigError
from swarm.events import Event, StepMade
from swarm.types import Role

_MIB: Final = 2**20
_NUM_STEPS: Final = 2  # the first one also warms up


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredStep:
    """The second step of a node alone, one phase after the other."""

    generate_s: float  # of the groups that a step takes
    learn_s: float
    num_groups: int
    num_tokens: int  # trained
    num_with_signal: int  # of these groups, whose rewards differ: only these teach
    peak_bytes: int  # of the largest child process; 0 where the worker is none


def expectation_lines(config: NodeConfig, sampled: Sequence[SampledEnvironment], has_reference: bool) -> list[str]:
    """Lines for people on memory, a group and a version (blocking: reads the model's config.json)."""
    shape = read_shape(config.model)
    if shape is None:
        return [f"memory: not estimated for this architecture; known: {', '.join(LIKE_LLAMA)}"]
    prompt = max((len(task.prompt_ids) for each in sampled for task in each.tasks), default=0)
    lengths = lengths_of(config, prompt, config.learns_from_agents or any(each.max_turns > 1 for each in sampled))
    memory = estimate_memory(config, shape, lengths, has_reference)
    lines = [_memory_line(memory)]
    answers = f"{config.generator.group_size} answers of {lengths.response} tokens"
    lines.append(f"a group: {_bytes(group_bytes(config, lengths, shape.vocab_size))} at most, {answers}")
    if Role.TRAINER in config.roles:
        patch = patch_bytes(config, shape)
        small = "; a patch was not measured for this dtype or adapters" if patch is None else ""
        small = small or f", as a patch about {_bytes(patch or 0)}"
        lines.append(f"a version: {_bytes(version_bytes(config, shape))} in full before compression{small}")
    return lines


async def measure(config: NodeConfig) -> MeasuredStep:
    """Generates and learns two steps with the real model, alone, on this machine; returns the second step.

    Raises:
        ConfigError: the node cannot start, or a step was not made.
    """
    from node.daemon import Daemon

    steps: list[StepMade] = []

    def see(event: Event) -> None:
        if isinstance(event, StepMade):
            steps.append(event)

    with tempfile.TemporaryDirectory(prefix="swarm-check-") as folder:
        async with Daemon(_alone(config, Path(folder)), see) as daemon:
            await daemon.run()
    if len(steps) < _NUM_STEPS:
        raise ConfigError(f"--measure: {len(steps)} of {_NUM_STEPS} steps were made")
    last = steps[-1]
    return MeasuredStep(
        generate_s=last.seconds.get("generate", 0.0),
        learn_s=last.seconds.get("learn", 0.0),
        num_groups=last.num_local,
        num_tokens=last.num_tokens,
        num_with_signal=round(last.num_local * (1 - last.diagnostics.get("zero_variance_share", 0.0))),
        peak_bytes=_peak_bytes_of_children() if config.worker == "process" else 0,
    )


def _peak_bytes_of_children() -> int:
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2) counts bytes there, elsewhere kilobytes
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit


def measured_lines(measured: MeasuredStep) -> list[str]:
    """Lines for people on seconds and memory."""
    speed = measured.num_tokens / max(measured.generate_s, 1e-9)
    lines = [
        f"measured: {measured.generate_s:.1f} s to generate {measured.num_groups} groups ({speed:,.0f} tokens/s), "
        f"{measured.learn_s:.1f} s for the step",
        f"measured: rewards differ in {measured.num_with_signal} of these groups, and only such groups teach",
    ]
    return lines + (
        [f"measured: {measured.peak_bytes // _MIB:,} MiB at most in the worker"] if measured.peak_bytes else []
    )


def _alone(config: NodeConfig, folder: Path) -> NodeConfig:
    """Configuration of the same work without other nodes: phases one by one; groups of equal rewards count, too."""
    data = config.model_dump(mode="json")
    data |= {"dir": str(folder), "roles": ["trainer", "generator"], "directory": {"kind": "none"}}
    data |= {
        "warm_up": {},
        "coordinator": {},
        "entry": {},
        "weights": {},
        "follow": {},
        "telemetry": {"log_level": "WARNING"},
    }
    data["exchange"] |= {"listen": "127.0.0.1:0", "advertise": "", "anchors": []}
    groups = config.replay.local_groups + config.replay.external_groups
    data["replay"] |= {"local_groups": groups, "external_groups": 0, "keep_zero_variance": True, "barrier": False}
    data["learner"] |= {"num_steps": _NUM_STEPS, "checkpoint_every": 0, "at_end": "stop", "deterministic": True}
    data["evaluation"] = {"num_problems": 1}
    return parse_config(NodeConfig, data, "--measure")


def _memory_line(memory: MemoryEstimate) -> str:
    parts = {
        "process": memory.process,
        "weights": memory.weights + memory.engine_weights + memory.published + memory.reference,
        "masters and moments": memory.masters + memory.moments,
        "KV cache": memory.kv_cache,
        "gradients": memory.gradients,
        "activations": memory.activations,
        "checkpoint": memory.checkpoint,
    }
    shown = ", ".join(f"{name} {size // _MIB:,}" for name, size in parts.items() if size >= _MIB)
    return f"memory of the worker: about {memory.peak // _MIB:,} MiB at most, {memory.held // _MIB:,} always ({shown})"


def _bytes(size: int) -> str:
    return f"{size / 1e6:,.1f} MB" if size >= 1e6 else f"{size / 1e3:,.1f} kB"
