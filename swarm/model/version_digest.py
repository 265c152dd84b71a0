"""Digest of a policy version, over its published tensors: the tensors that engines load.

Invariant: published tensors have checkpoint names in sorted order, tied weights once; with adapters, they are the
adapters alone. Dtype and values are those that the run publishes, whatever dtype the network computes in.
"""

import hashlib
import struct
from collections.abc import Mapping

import torch

from swarm.errors import ConfigError
from swarm.model.lora import is_adapter_name
from swarm.model.published_dtype import published_dtype
from swarm.types import Digest

PublishedTensors = dict[str, torch.Tensor]


def live_state(network: torch.nn.Module) -> PublishedTensors:
    """The network's own tensors under their published names, sorted, in the network's compute dtype."""
    named = network.state_dict(keep_vars=True)
    adapters = {name: tensor for name, tensor in named.items() if is_adapter_name(name)}
    first_names: dict[int, str] = {}
    for name, tensor in (adapters or named).items():
        first_names.setdefault(id(tensor), name)  # tied: the embedding comes first, as in a saved checkpoint
    return {name: named[name].detach() for name in sorted(first_names.values())}


def published_state(network: torch.nn.Module) -> PublishedTensors:
    """The published tensors by name, sorted; a tensor shares the network's memory if its dtype is the published one."""
    return {name: tensor.to(published_dtype(network, name, tensor)) for name, tensor in live_state(network).items()}


def snapshot(network: torch.nn.Module) -> PublishedTensors:
    """A copy of the published tensors that later steps do not change."""
    live = live_state(network)
    return {name: tensor.to(published_dtype(network, name, tensor), copy=True) for name, tensor in live.items()}


def weights_digest(state: Mapping[str, torch.Tensor]) -> Digest:
    """SHA-256 over name, dtype, shape and little-endian bytes of each tensor, in order of name."""
    digest = hashlib.sha256(b"swarm published tensors 1\0")
    for name in sorted(state):
        tensor = state[name].detach().cpu().contiguous()
        for text in (name, str(tensor.dtype).removeprefix("torch.")):
            encoded = text.encode()
            digest.update(struct.pack("<I", len(encoded)) + encoded)
        digest.update(struct.pack(f"<I{tensor.dim()}Q", tensor.dim(), *tensor.shape))
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.digest()


def load_published(network: torch.nn.Module, state: Mapping[str, torch.Tensor]) -> None:
    """Copies published tensors into a network: all of them, or none.

    Raises:
        ConfigError: a name, shape or dtype differs; the network is unchanged.
    """
    own = live_state(network)
    different = sorted(own.keys() ^ state.keys())
    if different:
        side = "missing" if different[0] in own else "unknown"
        raise ConfigError(f"published tensors do not fit this model: {different[0]!r} is {side}")
    for name, target in own.items():
        given, dtype = state[name], published_dtype(network, name, target)
        if given.shape != target.shape or given.dtype != dtype:
            raise ConfigError(
                f"published tensor {name!r}: got {given.dtype} {tuple(given.shape)}, "
                f"this model has {dtype} {tuple(target.shape)}"
            )
    with torch.no_grad():
        for name, target in own.items():
            target.copy_(state[name])
