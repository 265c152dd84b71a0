"""Adapters as a folder that PEFT, vLLM and transformers read: adapter_model.safetensors and adapter_config.json.

Invariant: a written folder holds every adapter of the network and no other tensor.
"""

import json
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from swarm.errors import ConfigError
from swarm.model.lora import LoraLinear
from swarm.model.network import save_tensors
from swarm.model.published_dtype import published_dtype
from swarm.model.version_digest import PublishedTensors, live_state, published_state

_TENSORS: Final = "adapter_model.safetensors"
_FACTORS: Final = {"lora_a": "lora_A.weight", "lora_b": "lora_B.weight"}  # ours -> PEFT's


def write_adapter(network: nn.Module, folder: Path, base_name: str) -> None:
    """Writes the adapters of a network to a folder. Raises OSError if the disk refuses.

    Args:
        network: has at least one adapter; all share rank and scale.
        folder: an existing folder.
        base_name: path or hub id of the initial model, for PEFT; "" for none.
    """
    (scale,) = {layer.scale for layer in network.modules() if isinstance(layer, LoraLinear)}
    write_published_adapter(published_state(network), scale, folder, base_name)


def write_published_adapter(adapters: PublishedTensors, scale: float, folder: Path, base_name: str = "") -> None:
    """Writes published adapters, all of one rank, to an existing folder; `base_name` as in `write_adapter`.

    Raises:
        OSError: the disk refuses.
    """
    named = {_peft_name(name): tensor for name, tensor in adapters.items()}
    save_tensors(named, folder / _TENSORS, metadata={"format": "pt"})
    (rank,) = {tensor.shape[0] for name, tensor in adapters.items() if name.endswith(".lora_a")}
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name or None,
        "r": rank,
        "lora_alpha": scale * rank,  # PEFT scales by alpha / r
        "lora_dropout": 0.0,
        "target_modules": sorted({name.split(".")[-2] for name in adapters}),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def read_adapter(network: nn.Module, folder: Path) -> None:
    """Loads the adapters in a folder into a network that has adapters of the same shapes.

    Raises:
        ConfigError: the folder is damaged, or was written from another network.
    """
    own = {_peft_name(name): tensor for name, tensor in live_state(network).items()}
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


def _peft_name(name: str) -> str:
    layer, _, factor = name.rpartition(".")
    return f"base_model.model.{layer}.{_FACTORS[factor]}"
