"""The compute dtype that a node would have on this machine, for commands that load no model.

Invariant: torch is asked in a child of its own, which measures once for a machine and a model (a second).
"""

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass

from node.expectations import read_shape
from node.run_estimate import ModelShape
from swarm.config import NodeConfig
from swarm.process import thread_limits


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineChoice:
    """What `swarm.model.compute_dtype.choose` says on the CPU."""

    dtype: str
    fastest: str
    words: str


def machine_choice(config: NodeConfig) -> MachineChoice | None:
    """The dtype of a node's passes on this CPU (blocking, seconds); None where it cannot be asked.

    Raises:
        ConfigError: there is no such model.
    """
    shape = read_shape(config.model)
    if shape is None:
        return None
    threads = str(config.num_threads)
    sizes = [(*size, count) for size, count in _products(shape).items()]
    asked = [config.compute_dtype, config.model.dtype, threads, json.dumps(sizes)]
    command = [sys.executable, "-m", "swarm.model.compute_dtype", *asked]
    limits = thread_limits(config.num_threads)
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | limits, check=False)
    try:
        said = json.loads(done.stdout)
        return MachineChoice(dtype=said["dtype"], fastest=said["fastest"], words=said["words"])
    except (ValueError, KeyError):  # without torch
        return None


def with_choice(config: NodeConfig, choice: MachineChoice | None) -> NodeConfig:
    """The configuration with what `auto` means on this CPU; unchanged where that is not known."""
    return config if choice is None else config.model_copy(update={"compute_dtype": choice.dtype})


def _products(shape: ModelShape) -> Counter[tuple[int, int]]:
    """As `swarm.model.compute_dtype.products_of` counts them in a loaded network."""
    layers = Counter[tuple[int, int]]()
    for size in shape.linear_layers.values():
        layers[size] += shape.num_layers
    layers[shape.hidden_size, shape.vocab_size] += 1
    return layers
