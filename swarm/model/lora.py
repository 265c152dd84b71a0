"""Low-rank adapters on the linear layers of a network.

Invariant: a fresh adapter changes nothing (its second factor is zero), and the base weights keep their names.

Source: arXiv:2106.09685.
"""

import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from swarm.errors import ConfigError

# alpha / rank, fixed so that the learning rate does not depend on the rank.
SCALE = 2.0
_SUFFIXES = (".lora_a", ".lora_b")


def is_adapter_name(name: str) -> bool:
    """True for the state name of an adapter factor."""
    return name.endswith(_SUFFIXES)


class LoraLinear(nn.Linear):
    """y = x W^T + b + SCALE (x A^T) B^T with W and b frozen, A [rank, in], B [out, rank]."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter

    @classmethod
    def around(cls, base: nn.Linear, rank: int, seed: torch.Generator) -> "LoraLinear":
        """An adapted layer that shares the base's weight and bias."""
        layer = cls(base.in_features, base.out_features, bias=False, device="meta")
        layer.weight, layer.bias = base.weight, base.bias
        bound = 1.0 / math.sqrt(base.in_features)
        first = (torch.rand(rank, base.in_features, generator=seed) * 2 - 1) * bound
        layer.lora_a = nn.Parameter(first.to(base.weight))
        layer.lora_b = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        return layer

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """[..., in] -> [..., out]."""
        low = functional.linear(functional.linear(input, self.lora_a), self.lora_b)
        return super().forward(input) + SCALE * low


def add_adapters(network: nn.Module, rank: int, seed: int = 0) -> None:
    """Freezes the network and puts an adapter on each linear layer except the output head.

    Args:
        rank: > 0.
        seed: of the first factors; equal seeds give equal adapters on every node.

    Raises:
        ConfigError: the network has no linear layer to adapt.
    """
    head = getattr(network, "get_output_embeddings", lambda: None)()
    network.requires_grad_(False)
    targets = [(parent, key, child) for parent, key, child in _linear_children(network) if child is not head]
    if not targets:
        raise ConfigError("model.lora_rank: this architecture has no linear layers to adapt; set it to 0")
    generator = torch.Generator().manual_seed(seed)
    for parent, key, child in targets:
        setattr(parent, key, LoraLinear.around(child, rank, generator))


def merge_adapters(network: nn.Module) -> None:
    """Puts a plain layer with weight W + SCALE B A in the place of each adapted one, rounded once to the dtype of W."""
    for parent in list(network.modules()):
        for key, child in list(parent.named_children()):
            if isinstance(child, LoraLinear):
                merged = nn.Linear(child.in_features, child.out_features, bias=False, device="meta")
                change = SCALE * (child.lora_b.detach().float() @ child.lora_a.detach().float())
                merged.weight = nn.Parameter((child.weight.detach().float() + change).to(child.weight.dtype))
                merged.bias = child.bias
                setattr(parent, key, merged)


def _linear_children(network: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in list(network.modules()):
        for key, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                yield parent, key, child
