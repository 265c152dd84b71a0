"""Made-up weights of any size on any torch device, and one optimizer step of them, coded from that device.

Invariant: weights stay on the device; what reaches the host is one piece at a time, and tensors that are hashed.
"""

import math
import time
from typing import Any, Final

import torch

from benchmarks._weights_measure import measure_ours, measure_transfer
from swarm.weights.tensors import TorchWeights

LAYERS: Final = 16
VOCAB_WIDTHS: Final = 62  # rows of the embedding for each unit of width, as in models of 1e9 parameters
HALF_ULP: Final = 2.0**-9  # of a bf16 number, relative


def shapes_of(num_parameters: int) -> dict[str, tuple[int, int]]:
    """Matrices of a decoder with at least so many parameters."""
    width = 8 * math.ceil(math.sqrt(num_parameters / (12 * LAYERS + VOCAB_WIDTHS)) / 8)
    shapes = {"model.embed_tokens.weight": (VOCAB_WIDTHS * width, width)}
    for layer in range(LAYERS):
        for name in "qkvo":
            shapes[f"model.layers.{layer}.self_attn.{name}_proj.weight"] = (width, width)
        for name in ("gate", "up"):
            shapes[f"model.layers.{layer}.mlp.{name}_proj.weight"] = (2 * width, width)
        shapes[f"model.layers.{layer}.mlp.down_proj.weight"] = (width, 4 * width)
    return shapes


def made_step(num_parameters: int, learning_rate: float, device: str) -> tuple[TorchWeights, TorchWeights]:
    """bf16 weights before and after a step.

    Float32 masters lie anywhere between the bf16 numbers, as they do late in a run, and each moves by the learning rate
    times a normal number in [-1, 1], about what AdamW does.
    """
    generator = torch.Generator(device).manual_seed(0)
    before: dict[str, torch.Tensor] = {}
    after: dict[str, torch.Tensor] = {}
    for name, shape in shapes_of(num_parameters).items():
        master = 0.02 * torch.randn(shape, generator=generator, device=device)
        master *= 1 + HALF_ULP * (2 * torch.rand(shape, generator=generator, device=device) - 1)
        before[name] = master.bfloat16()
        master -= learning_rate * torch.randn(shape, generator=generator, device=device).clamp_(-1, 1)
        after[name] = master.bfloat16()
    return TorchWeights(before), TorchWeights(after)


def measure_made(device: str, num_parameters: int, learning_rate: float) -> dict[str, Any]:
    """The codec and a whole sync, by the clock."""
    base, target = made_step(num_parameters, learning_rate, device)
    return {
        "device": device if device == "cpu" else torch.cuda.get_device_name(device),
        "learning_rate": learning_rate,
        "parameters": sum(spec.num_elements for spec in target.specs),
        "ours": measure_ours(base, target, time.perf_counter),
        "transfer": measure_transfer(base, target),
    }
