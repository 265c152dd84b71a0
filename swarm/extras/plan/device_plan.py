"""GPU memory that a node takes, by use, and the settings that would fit (`swarm plan --gpu`).

Invariant: arithmetic alone (`node.run_estimate`); no GPU is looked for, and none has confirmed the figures yet.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from swarm.errors import ConfigError

if TYPE_CHECKING:
    from swarm.config import NodeConfig

GIB = 2**30
PROMPT_TOKENS = 256  # of the longest prompt: no task is built here
# What usually makes room, cheapest first. What a run agrees on (model.dtype) is left as it is.
CHANGES: dict[str, dict[str, dict[str, Any]]] = {
    "as configured": {},
    "grad. checkpointing": {"learner": {"gradient_checkpointing": True}},
    "token_budget = 1024": {"learner": {"token_budget": 1024}},
    "max_rows = 16": {"engine": {"max_rows": 16}},
    "lora_rank = 16": {"model": {"lora_rank": 16}},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class DevicePlan:
    """One way to configure a node, and the memory that it takes."""

    name: str
    uses: dict[str, int]  # bytes by use
    peak: int  # bytes, with what a GPU takes beside tensors
    fits: bool


def device_plans(config: "NodeConfig", gpu_bytes: int) -> list[DevicePlan]:
    """Plans of the configuration as it is, with each change alone, and with all of them.

    Raises:
        ConfigError: memory cannot be estimated for the architecture of the model.
    """
    from node.run_estimate import CONTEXT_BYTES, LIKE_LLAMA, estimate_memory, lengths_of, read_shape

    shape = read_shape(config.model)
    if shape is None:
        raise ConfigError(f"--gpu: {config.model.source!r} is not estimated; known: {', '.join(LIKE_LLAMA)}")
    every: dict[str, dict[str, Any]] = {}
    for change in CHANGES.values():
        for section, values in change.items():
            every.setdefault(section, {}).update(values)
    plans: list[DevicePlan] = []
    for name, change in {**CHANGES, "all of these": every}.items():
        changed = config.model_copy(
            update={section: getattr(config, section).model_copy(update=values) for section, values in change.items()}
        )
        lengths = lengths_of(changed, PROMPT_TOKENS, config.may_have_turns)
        memory = estimate_memory(changed, shape, lengths)
        peak = memory.device_peak + CONTEXT_BYTES
        uses = {
            "weights": memory.weights + memory.published + memory.reference,
            "engine": 2 * memory.engine_weights + memory.kv_cache,
            "AdamW": memory.masters + memory.moments,
            "grads": memory.gradients,
            "activ.": memory.activations,
        }
        plans.append(DevicePlan(name=name, uses=uses, peak=peak, fits=peak <= gpu_bytes))
    return plans


def _computed_in(config: "NodeConfig") -> str:
    if config.compute_dtype != "auto":
        return config.compute_dtype
    return "it" if config.model.dtype == "float32" else "bfloat16 where the card has it"


def print_device_plans(console: Console, config: "NodeConfig", gpu_gib: float, path: Path | None) -> bool:
    """Prints a table of the plans; returns True if one of them fits."""
    plans = device_plans(config, int(gpu_gib * GIB))
    console.print(
        f"{config.model.source} in {config.model.dtype}, computed in {_computed_in(config)}, {path or 'defaults'}, "
        f"on a GPU of {gpu_gib:g} GiB "
        f"(by arithmetic; prompts of {PROMPT_TOKENS} tokens):",
        soft_wrap=True,
    )
    table = Table(box=None, header_style="bold")
    for name in ("GiB", *plans[0].uses, "at most", "fits"):
        table.add_column(name, justify="left" if name == "GiB" else "right", no_wrap=True)
    for plan in plans:
        mark = "[green]yes[/green]" if plan.fits else "[red]no[/red]"
        table.add_row(plan.name, *(f"{size / GIB:.2f}" for size in plan.uses.values()), f"{plan.peak / GIB:.2f}", mark)
    console.print(table)
    console.print(
        "Not all of it is held at once: gradients and activations in the backward pass, the optimizer's scratch after "
        'it. With engine.kind = "vllm" the engine has what gpu_memory_utilization says, beside this.',
        soft_wrap=True,
    )
    return any(plan.fits for plan in plans)
