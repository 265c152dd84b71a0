"""Device of a model: choice from the configuration, synchronisation, and memory figures.

Invariant: nothing here opens a device that the configuration did not ask for.
"""

from dataclasses import dataclass

import torch

from swarm.errors import ConfigError


def pick_device(name: str) -> torch.device:
    """The torch device for the key `device` of a configuration; `auto` takes a GPU if there is one.

    Raises:
        ConfigError: torch cannot use the GPU.
    """
    # is_available asks the driver, device_count alone counts cards that a driver too old for this torch cannot use
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "auto":
        return torch.device("cuda" if num_gpus else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise ConfigError(
            f"device: {name!r}, but torch {torch.__version__} can use {num_gpus} GPUs; set it to auto or cpu"
        )
    return device


def wait_for(device: torch.device) -> None:
    """Waits until a GPU has finished all submitted work, so that a clock measures the work; no effect on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMemory:
    """Bytes of a GPU's memory."""

    total: int
    free: int  # not used by any process
    peak: int  # most that tensors of this process took since `forget_peak`


def forget_peak(device: torch.device) -> None:
    """Resets the peak of memory use on a GPU."""
    if device.type == "cuda":
        torch.cuda.init()  # torch refuses to reset the peak of a GPU that was not used yet
        torch.cuda.reset_peak_memory_stats(device)


def device_memory(device: torch.device) -> DeviceMemory | None:
    """Memory figures of a GPU; None for the CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    return DeviceMemory(total=total, free=free, peak=torch.cuda.max_memory_allocated(device))
