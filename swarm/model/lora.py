"""Low-rank adapters on the linear layers of a network.

Invariant: a fresh adapter changes nothing (its second factor is zero), and the base weights keep their names.

Source: arXiv:2106.09685.
"""

import copy
import math
from collections.abc import Collection, Iterator, Mapping
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import functional

from swarm.errors import ConfigError
from swarm.model.published_dtype import published_dtype

_SUFFIXES = (".lora_a", ".lora_b")


def is_adapter_name(name: str) -> bool:
    """True if `name` is the state name of an adapter factor."""
    return name.endswith(_SUFFIXES)


class LoraLinear(nn.Linear):
    """y = x W^T + b + scale (x A^T) B^T with W and b frozen, A [rank, in], B [out, rank]."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    scale: float

    @classmethod
    def around(
        cls, base: nn.Linear, rank: int, scale: float, seed: torch.Generator, published: torch.dtype
    ) -> "LoraLinear":
        """An adapted layer that shares the base's weight and bias; the factors' values fit the published dtype."""
        layer = cls(base.in_features, base.out_features, bias=False, device="meta")
        layer.weight, layer.bias, layer.scale = base.weight, base.bias, scale
        bound = 1.0 / math.sqrt(base.in_features)
        first = (torch.rand(rank, base.in_features, generator=seed) * 2 - 1) * bound
        layer.lora_a = nn.Parameter(first.to(published).to(base.weight))
        layer.lora_b = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        low = functional.linear(functional.linear(input, self.lora_a), self.lora_b)
        return super().forward(input) + self.scale * low


def add_adapters(
    network: nn.Module, rank: int, scale: float = 2.0, targets: Collection[str] = (), seed: int = 0
) -> None:
    """Freezes the network and puts adapters on its linear layers.

    Args:
        rank: > 0.
        scale: factor of the adapters' output.
        targets: last names of the layers; empty: all; the output head never gets an adapter.
        seed: random seed of the factors `lora_a`; equal seeds give equal adapters on every node.

    Raises:
        ConfigError: the network has no linear layer to adapt, or none with one of the names in `targets`.
    """
    head = getattr(network, "get_output_embeddings", lambda: None)()
    network.requires_grad_(False)
    layers = [(parent, key, child) for parent, key, child in _linear_children(network) if child is not head]
    if not layers:
        raise ConfigError("model.lora_rank: this architecture has no linear layers to adapt; set it to 0")
    names = {key for _, key, _ in layers}
    if missing := sorted(set(targets) - names):
        raise ConfigError(f"model.lora_targets: no linear layer {missing[0]!r}; there are {', '.join(sorted(names))}")
    generator, published = torch.Generator().manual_seed(seed), published_dtype(network)
    for parent, key, child in layers:
        if not targets or key in targets:
            setattr(parent, key, LoraLinear.around(child, rank, scale, generator, published))


def with_shared_weights(network: nn.Module) -> nn.Module:
    """A copy of the network that shares all tensors: adapters added to the copy do not change the original."""
    tensors = chain(network.parameters(), network.buffers())
    return copy.deepcopy(network, {id(tensor): tensor for tensor in tensors})


def linear_names(network: nn.Module, *, attention: bool) -> set[str]:
    """Last names of the linear layers in attention blocks if `attention`, else of all others but the output head."""
    head = getattr(network, "get_output_embeddings", lambda: None)()
    return {
        path.rpartition(".")[2]
        for path, layer in network.named_modules()
        if type(layer) is nn.Linear and layer is not head and ("attn" in path or "attention" in path) is attention
    }


def merge_adapters(network: nn.Module) -> None:
    """Replaces each adapted layer by a plain one with the merged weight, rounded to the published dtype."""
    for path, parent in list(network.named_modules()):
        for key, child in list(parent.named_children()):
            if isinstance(child, LoraLinear):
                merged = nn.Linear(child.in_features, child.out_features, bias=False, device="meta")
                weight = merged_weight(child.weight, child.lora_a, child.lora_b, child.scale)
                published = published_dtype(network, f"{path}.{key}.weight".lstrip("."), child.weight)
                merged.weight = nn.Parameter(weight.to(published).to(child.weight.dtype))
                merged.bias = child.bias
                setattr(parent, key, merged)


def merged_tensors(base: Mapping[str, Tensor], adapters: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    """Published tensors of the base model, with published adapters merged into the weights."""
    merged = dict(base)
    for name, second in adapters.items():
        layer, _, factor = name.rpartition(".")
        if factor == "lora_b":
            weight = f"{layer}.weight"
            merged[weight] = merged_weight(base[weight], adapters[f"{layer}.lora_a"], second, scale)
    return merged


def merged_weight(weight: Tensor, first: Tensor, second: Tensor, scale: float) -> Tensor:
    """W + scale B A, rounded once to the dtype of W."""
    change = scale * (second.detach().float() @ first.detach().float())
    return (weight.detach().float() + change).to(weight.dtype)


def _linear_children(network: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in list(network.modules()):
        for key, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                yield parent, key, child
