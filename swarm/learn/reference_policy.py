"""Reference policy: the initial weights, frozen, for KL terms and reference ratios.

Invariant: it never changes while the learner trains, and after a restart it is the same policy, checked by digest.
"""

import copy
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn

from swarm.learn.gradient import score_batch
from swarm.learn.packing import PackedRows
from swarm.learn.ranks import OneProcess, Ranks
from swarm.model.lora import LoraLinear, is_adapter_name
from swarm.model.published_dtype import published_dtype
from swarm.model.version_digest import weights_digest
from swarm.objectives.batch import Batch


class ReferencePolicy:
    """Scores with the weights that the network has now, whatever it learns later.

    A network with low-rank adapters is its own reference with the adapters off; any other is copied, which
    costs its size in memory once more.
    """

    def __init__(self, network: nn.Module, ranks: Ranks | None = None) -> None:
        """Takes a network with the initial weights, before `Ranks.prepare`."""
        self._ranks = ranks or OneProcess()
        self._digest = _digest(network)
        if any(isinstance(module, LoraLinear) for module in network.modules()):
            self._network = network
        else:
            self._network = copy.deepcopy(network).requires_grad_(False).eval()
            self._ranks.prepare(self._network)

    def logprobs(self, batch: Batch, plan: Sequence[PackedRows]) -> Tensor:
        """Log-probs [N, L] of every trained token, 0 off the mask, without gradient."""
        with _adapters_off(self._network):
            return score_batch(self._network, batch, plan, ranks=self._ranks).logprobs

    def digest(self) -> str:
        """SHA-256 (hex) of its weights."""
        return self._digest


def _digest(network: nn.Module) -> str:
    state = cast("dict[str, Tensor]", network.state_dict())
    base = {name: tensor for name, tensor in state.items() if not is_adapter_name(name)}
    return weights_digest(
        {name: tensor.to(published_dtype(network, name, tensor)) for name, tensor in base.items()}
    ).hex()


@contextmanager
def _adapters_off(network: nn.Module) -> Generator[None]:
    adapters = [module.lora_b for module in network.modules() if isinstance(module, LoraLinear)]
    learned = [factor.detach().clone() for factor in adapters]
    try:
        with torch.no_grad():
            for factor in adapters:
                factor.zero_()  # what a fresh adapter has: exactly the base layer
        yield
    finally:
        with torch.no_grad():
            for factor, values in zip(adapters, learned, strict=True):
                factor.copy_(values)
