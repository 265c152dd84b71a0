"""What GPU this machine has and what torch can do with it, for `swarm doctor`.

Invariant: nothing here opens a GPU in the calling process; torch is asked in a child of its own, and every answer is
bounded in time.
"""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

HANG_S: Final = 300.0  # torch and its driver take seconds to start; how long beside other work was not measured
COPIED_BYTES: Final = 256 * 2**20
CARDS: Final = ("/dev/nvidia0", "/dev/kfd")  # NVIDIA, AMD


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """The first GPU of this machine."""

    name: str
    driver: str = ""  # its version; empty: not known
    torch: str = ""  # its version; empty: torch is not installed
    build: str = ""  # "CUDA 13.0" or "ROCm 6.4"; empty: torch was built for the CPU alone
    count: int = 0  # GPUs that torch can use
    error: str = ""  # why it can use none
    total_bytes: int = 0
    free_bytes: int = 0
    has_bfloat16: bool = False
    to_device_gb_s: float = 0.0  # from pageable memory, as a node copies
    on_device_gb_s: float = 0.0  # read and written


def has_card() -> bool:
    """True where a card is, whether torch can use it or not."""
    return any(Path(card).exists() for card in CARDS)


def look_for_gpu(device: str) -> GpuFacts | None:
    """The GPU that `device` of a configuration means (blocking, seconds); None: there is no card at all."""
    card = _card()
    if card is None:
        return None
    name, driver = card
    asked = "cuda" if device in ("auto", "cpu") else device
    command = [sys.executable, "-m", "node.gpu_facts", asked]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
        found: dict[str, Any] = json.loads(done.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        return GpuFacts(name=name, driver=driver, error=f"no answer within {HANG_S:.0f} s")
    except ValueError:
        return GpuFacts(name=name, driver=driver, error="torch could not be asked")
    known: dict[str, Any] = {"name": name, **found, "driver": driver}
    return GpuFacts(**known)


def _card() -> tuple[str, str] | None:
    """(name, version of the driver) of the first card."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=HANG_S)
        except (OSError, subprocess.TimeoutExpired):
            done = None
        if done is not None and done.returncode == 0 and "," in done.stdout:
            name, _, driver = done.stdout.splitlines()[0].rpartition(",")
            return name.strip(), driver.strip()
    return ("a card whose driver does not answer", "") if any(Path(path).exists() for path in CARDS) else None


def ask_torch(device: str) -> dict[str, Any]:
    """What torch says of a GPU, and how fast it copies (blocking)."""
    try:
        import torch
    except ImportError:
        return {"error": "torch is not installed"}
    build = (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" if torch.version.hip else ""
    )
    found: dict[str, Any] = {"torch": torch.__version__, "build": build}
    if not torch.cuda.is_available():
        return {**found, "error": "its driver is older than this build needs" if build else "a build for the CPU alone"}
    try:
        index = torch.device(device).index or 0
        free, total = torch.cuda.mem_get_info(index)
        found |= {"count": torch.cuda.device_count(), "name": torch.cuda.get_device_name(index)}
        found |= {"total_bytes": total, "free_bytes": free}
        found["has_bfloat16"] = torch.cuda.is_bf16_supported(including_emulation=False)
        host = torch.zeros(min(COPIED_BYTES, free // 4), dtype=torch.uint8)
        there = host.to(f"cuda:{index}")
        found["to_device_gb_s"] = _gb_per_s(lambda: there.copy_(host), host.numel(), index)
        found["on_device_gb_s"] = _gb_per_s(lambda: there.clone(), 2 * host.numel(), index)
    except (RuntimeError, AssertionError) as error:
        return {**found, "count": 0, "error": str(error).splitlines()[0]}
    return found


def _gb_per_s(copy: Any, num_bytes: int, index: int, times: int = 5) -> float:
    import torch

    copy()
    torch.cuda.synchronize(index)
    began_s = time.perf_counter()
    for _ in range(times):
        copy()
    torch.cuda.synchronize(index)
    return round(times * num_bytes / (time.perf_counter() - began_s) / 1e9, 1)


if __name__ == "__main__":
    print(json.dumps(ask_torch(sys.argv[1])))
