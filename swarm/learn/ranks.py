"""Ranks of a data-parallel step: the protocol, and the usual case of one process (`OneProcess`).

`swarm.learn.data_parallel` implements the protocol for several processes, on torch.distributed.

Invariant: every rank calls every method in the same order, and common results are equal on all of them, so that all
decide alike.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from swarm.activity import OnProgress, ignore_progress
from swarm.learn.optimizer import MasterAdamW

Result = TypeVar("Result")


class Ranks(Protocol):
    """Division of a step among processes, the same on all of them; `OneProcess` is the trivial case."""

    on_progress: OnProgress  # called after each micro-batch

    @property
    def index(self) -> int:
        """Number of this rank; 0 leads."""
        ...

    @property
    def count(self) -> int:
        """Number of ranks."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of this rank."""
        ...

    def prepare(self, network: nn.Module) -> None:
        """Moves or shards a network that every rank loaded alike; from then on the network runs only inside `run`."""
        ...

    def optimizer(self, network: nn.Module, betas: tuple[float, float], weight_decay: float) -> MasterAdamW:
        """Returns a new optimizer of a prepared network's trainable parameters."""
        ...

    def run(self, network: nn.Module, work: Callable[[], Result]) -> Result:
        """Runs `work`, one pass with the network's weights gathered; all ranks must make equally many passes."""
        ...

    def assign(self, num_parts: int) -> Sequence[tuple[int, bool]]:
        """(index, True if the result counts) of each micro-batch that this rank computes, of `num_parts` in all.

        If `num_parts` does not divide evenly, some ranks repeat the last one without effect: all make as many passes.
        """
        ...

    def gather_rows(self, values: Tensor, parts: Sequence[Sequence[int]]) -> Tensor:
        """`values` [N, L]: rows `parts[i]` from the rank whose micro-batch i counts, all other rows from rank 0."""
        ...

    def all_sum(self, value: float) -> float:
        """Sum of a value over ranks, with equal bits on every rank."""
        ...

    def broadcast(self, values: Tensor) -> Tensor:
        """Rank 0's values, on every rank."""
        ...

    def gather_whole(self, tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        """Yields (name, whole tensor) of a prepared network's parameters or optimizer state; on rank 0 only."""
        ...


class OneProcess:
    """Implements `Ranks` for a step that one process makes alone."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device, self.on_progress = torch.device(device), ignore_progress

    @property
    def index(self) -> int:
        return 0

    @property
    def count(self) -> int:
        return 1

    @property
    def device(self) -> torch.device:
        return self._device

    def prepare(self, network: nn.Module) -> None:
        network.to(self._device)

    def optimizer(self, network: nn.Module, betas: tuple[float, float], weight_decay: float) -> MasterAdamW:
        return MasterAdamW(network, betas, weight_decay)

    def run(self, network: nn.Module, work: Callable[[], Result]) -> Result:
        return work()

    def assign(self, num_parts: int) -> Sequence[tuple[int, bool]]:
        return [(index, True) for index in range(num_parts)]

    def gather_rows(self, values: Tensor, parts: Sequence[Sequence[int]]) -> Tensor:
        return values

    def all_sum(self, value: float) -> float:
        return value

    def broadcast(self, values: Tensor) -> Tensor:
        return values

    def gather_whole(self, tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        return tensors.items()


def each_assigned(ranks: Ranks, num_parts: int, what: str) -> Iterator[tuple[int, bool]]:
    """Yields the pairs of `Ranks.assign` and reports progress at the beginning and after each micro-batch."""
    assigned = ranks.assign(num_parts)
    ranks.on_progress(what, 0, len(assigned))
    for done, each in enumerate(assigned, 1):
        yield each
        ranks.on_progress(what, done, len(assigned))
