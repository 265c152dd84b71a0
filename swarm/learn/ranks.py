"""The processes that make one optimizer step together, and the usual case that there is only one.

Invariant: every rank calls every method in the same order; what they return in common is the same on all of them,
so that all decide alike.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from swarm.learn.optimizer import MasterAdamW

Result = TypeVar("Result")


class Ranks(Protocol):
    """How a step is divided among processes; one-process code is the case where nothing is."""

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    @property
    def device(self) -> torch.device:
        """Where this one computes."""
        ...

    def adopt(self, network: nn.Module) -> None:
        """Takes a network that every rank has loaded alike; from here on it runs inside `run` only."""
        ...

    def optimizer(self, network: nn.Module, betas: tuple[float, float], weight_decay: float) -> MasterAdamW:
        """Of an adopted network."""
        ...

    def run(self, network: nn.Module, work: Callable[[], Result]) -> Result:
        """What one forward pass through the network gives, with its weights there; all ranks make equally many."""
        ...

    def turns(self, num_parts: int) -> Sequence[tuple[int, bool]]:
        """(place of a part, whether its result counts) for each pass that this rank makes of `num_parts` parts.

        Where the parts do not come out even, a rank repeats one for nothing, so that all make equally many.
        """
        ...

    def rows(self, values: Tensor, parts: Sequence[Sequence[int]]) -> Tensor:
        """`values` [N, L] with each row from the rank whose turn the part was that has it; other rows of the first."""
        ...

    def total(self, value: float) -> float:
        """The sum over ranks."""
        ...

    def agreed(self, values: Tensor) -> Tensor:
        """The first rank's values."""
        ...

    def whole(self, tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        """Parameters or optimizer state of an adopted network, put together one by one; none but on the first rank."""
        ...


class OneProcess:
    """Implements `Ranks` for a step that one process makes alone."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)

    @property
    def count(self) -> int:
        """1."""
        return 1

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._device

    def adopt(self, network: nn.Module) -> None:
        """Moves it to the device."""
        network.to(self._device)

    def optimizer(self, network: nn.Module, betas: tuple[float, float], weight_decay: float) -> MasterAdamW:
        """The plain one."""
        return MasterAdamW(network, betas, weight_decay)

    def run(self, network: nn.Module, work: Callable[[], Result]) -> Result:
        """What it gives."""
        return work()

    def turns(self, num_parts: int) -> Sequence[tuple[int, bool]]:
        """Every part, in order."""
        return [(place, True) for place in range(num_parts)]

    def rows(self, values: Tensor, parts: Sequence[Sequence[int]]) -> Tensor:
        """As they are."""
        return values

    def total(self, value: float) -> float:
        """The value."""
        return value

    def agreed(self, values: Tensor) -> Tensor:
        """As they are."""
        return values

    def whole(self, tensors: Mapping[str, Tensor]) -> Iterable[tuple[str, Tensor]]:
        """As they are."""
        return tensors.items()
