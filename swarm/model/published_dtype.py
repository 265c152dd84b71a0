"""Published dtype of a version's tensors, and compute dtype of a network's passes.

Invariant: a network computes with exactly the published values. Widening changes no value, so a version has the same
digest on every node, whatever dtype the node computes in.
"""

from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import nn

_ATTRIBUTE: Final = "_swarm_published"


@dataclass(frozen=True, slots=True)
class _Widened:
    published: torch.dtype
    computed: torch.dtype
    kept: frozenset[str]  # names of tensors that had the compute dtype before: they are published in it, too


def widen(network: nn.Module, dtype: torch.dtype) -> None:
    """Converts a network's parameters and buffers of the published dtype to `dtype`, the compute dtype, in place.

    Args:
        network: as loaded, in the dtype that the run publishes; trained adapters are on it already, or are created
            with the dtype `published_dtype(network)`.
        dtype: holds every value of the network's dtype; the network's own dtype changes nothing.
    """
    own = network_dtype(network)
    if own == dtype:
        return
    assert torch.promote_types(own, dtype) == dtype, f"{dtype} does not hold every value of {own}"
    named = network.state_dict(keep_vars=True)
    kept = frozenset(name for name, tensor in named.items() if tensor.dtype == dtype)
    for param in network.parameters():
        if param.dtype == own:
            param.data = param.data.to(dtype)
    for module in network.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype == own:
                module._buffers[name] = buffer.to(dtype)  # pyright: ignore[reportPrivateUsage]
    setattr(network, _ATTRIBUTE, _Widened(own, dtype, kept))


def network_dtype(network: nn.Module) -> torch.dtype:
    """The dtype of a network's passes: that of its output layer, or else of its first parameter."""
    head = getattr(network, "get_output_embeddings", lambda: None)()
    return next(network.parameters()).dtype if head is None else cast("nn.Linear", head).weight.dtype


def published_dtype(network: nn.Module, name: str = "", tensor: torch.Tensor | None = None) -> torch.dtype:
    """The dtype that a network's tensor `name` is published in; without a tensor, that of a new parameter."""
    widened = cast("_Widened | None", getattr(network, _ATTRIBUTE, None))
    own = network_dtype(network) if tensor is None else tensor.dtype
    if widened is None or own != widened.computed or name in widened.kept:
        return own
    return widened.published
