"""Adapters as a folder that PEFT, vLLM and transformers read: adapter_model.safetensors and adapter_config.json.

Invariant: what is written holds every adapter of the network and no other tensor.
"""

import json
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from swarm.errors import ConfigError
from swarm.model.lora import LoraLinear
from swarm.model.published_dtype import published_dtype

_TENSORS: Final = "adapter_model.safetensors"


def write_adapter(network: nn.Module, folder: Path, base_name: str) -> None:
    """Writes the adapters of a network that has some.

    Args:
        network: its adapters share rank and scale.
        folder: that is there.
        base_name: of the initial model, as PEFT looks for it.
    """
    published = published_dtype(network)
    tensors = {name: tensor.to(published) for name, tensor in _named(network).items()}
    save_file(tensors, folder / _TENSORS, metadata={"format": "pt"})
    adapted = {name: layer for name, layer in network.named_modules() if isinstance(layer, LoraLinear)}
    ((rank, scale),) = {(layer.lora_a.shape[0], layer.scale) for layer in adapted.values()}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "target_modules": sorted({name.rpartition(".")[2] for name in adapted}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def read_adapter(network: nn.Module, folder: Path) -> None:
    """Puts written adapters into a network that has adapters of the same shapes.

    Raises:
        ConfigError: the folder is damaged, or was written from another network.
    """
    own = _named(network)
    try:
        tensors = load_file(folder / _TENSORS)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{folder / _TENSORS}: cannot be read: {error}") from None
    if {name: tensor.shape for name, tensor in tensors.items()} != {name: tensor.shape for name, tensor in own.items()}:
        raise ConfigError(f"{folder}: adapters of another model, or of another rank")
    published = published_dtype(network)
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name].to(published))


def _named(network: nn.Module) -> dict[str, torch.Tensor]:
    """Adapter factors under PEFT's names; they share memory with the network."""
    return {
        f"base_model.model.{name}.lora_{which}.weight": factor.detach().contiguous()
        for name, layer in network.named_modules()
        if isinstance(layer, LoraLinear)
        for which, factor in (("A", layer.lora_a), ("B", layer.lora_b))
    }
