"""Compute dtype of a model on this machine: as configured, or the one that was measured to be faster here.

Invariant: the compute dtype holds every published value, so it decides the speed and exactness of passes, never the
version. bfloat16 is several times slower without hardware support (docs/measurements/compute_dtype.md).
"""

import json
import logging
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from swarm.model.compute_choice import ComputeChoice
from swarm.model.device import pick_device
from swarm.model.published_dtype import network_dtype, widen
from swarm.model.source import default_cache_dir
from swarm.process import file_lock
from swarm.read_files import read_json

logger = logging.getLogger(__name__)

Products = Mapping[tuple[int, int], int]
"""(inputs, outputs) of a linear layer -> number of a model's layers of this size."""

BUDGET_S: Final = 1.0  # of all probes, on an idle machine
WORTH_IT: Final = 1.1  # bfloat16 must be this many times faster, or the more exact float32 is used
_ROUNDS: Final = 5
_SIDE: Final = 512  # of a probed slice; speed hardly depends on the size from here on (docs/measurements)
_ROWS: Final = 64  # tokens of a learner's pass, which has more: enough for full speed
_SEQUENCES: Final = 8  # that decode together
_COLD_BYTES: Final = 48 * 2**20  # of weights that decoding walks through in turn: more than most cores' caches hold
_MOST_REMEMBERED: Final = 64
_MOST_BYTES: Final = 2**20
_LEAST, _MOST = 1e-2, 1e6  # plausible GFLOP/s; an entry outside, such as 0 (not measured), is ignored
_LOCK_S: Final = 60.0  # longest wait for another process that measures; after it, both measure
_DTYPES: Final = ("float32", "bfloat16")
_CAPABILITIES: Final = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")


def place(network: nn.Module, device: str | torch.device, setting: str = "auto") -> None:
    """Moves a loaded network to a device and widens it to its compute dtype (blocking, a second on first use).

    Args:
        network: as loaded, in the published dtype.
        device: a device's name as in a configuration, or a torch device.
        setting: `compute_dtype` of a configuration.
    """
    where = pick_device(device) if isinstance(device, str) else device
    choice = choose(setting, str(network_dtype(network)).removeprefix("torch."), where, products_of(network))
    if setting == "auto":
        logger.info("passes are computed in %s", choice.words)
    widen(network, getattr(torch, choice.dtype))
    network.to(where)


def choose(setting: str, published: str, device: torch.device, products: Products, saved: str = "") -> ComputeChoice:
    """The compute dtype for a model whose tensors are published in `published` (blocking, a second on first use).

    Args:
        setting: `compute_dtype` of a configuration, which checks it against the published dtype.
        published: dtype of the run's tensors.
        device: the model's device.
        products: linear layers of the model.
        saved: compute dtype of the checkpoint that a run resumes from, which `auto` keeps; "": none.
    """
    if published == "float32":
        return ComputeChoice(dtype="float32", reason="the run publishes it")
    if setting == "float32":
        return ComputeChoice(dtype="float32", reason="compute_dtype asks for it")
    saved = saved if saved in _DTYPES else ""
    asked, reason = (setting, "compute_dtype asks for it") if setting != "auto" else (saved, "as in the checkpoint")
    if device.type != "cpu":
        with torch.cuda.device(device):
            has_it = torch.cuda.is_bf16_supported(including_emulation=False)
        fastest, speeds = "bfloat16" if has_it else "float32", dict.fromkeys(_DTYPES, 0.0)
    else:
        speeds = remembered_speeds(products)
        fastest = "bfloat16" if speeds["bfloat16"] > WORTH_IT * speeds["float32"] else "float32"
    return ComputeChoice(
        dtype=asked or fastest,
        reason=reason if asked else "measured" if device.type == "cpu" else "as the GPU has it",
        fastest=fastest,
        float32_gflops=speeds["float32"],
        bfloat16_gflops=speeds["bfloat16"],
    )


def products_of(network: nn.Module) -> Products:
    """Sizes of a network's linear layers."""
    layers = (module for module in network.modules() if isinstance(module, nn.Linear))
    return Counter((layer.in_features, layer.out_features) for layer in layers)


def remembered_speeds(products: Products, path: Path | None = None) -> dict[str, float]:
    """GFLOP/s by dtype of these products on this CPU, measured if no earlier result is on file (blocking).

    One process of the machine measures at a time, and others wait up to _LOCK_S for the result. If the file cannot
    be locked or written, this process measures and keeps nothing.

    Args:
        products: linear layers of the model.
        path: file of the results; None: in the cache of converted models.
    """
    path = path or default_cache_dir() / "compute_speeds.json"
    key = _key(products)
    if (found := _read(path).get(key)) is not None:
        return found
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(path.with_suffix(".lock"), _LOCK_S):
            known = _read(path)
            if key not in known:
                known[key] = measure_speeds(products)
                _replace(path, dict(list(known.items())[-_MOST_REMEMBERED:]))
            return known[key]
    except OSError as error:  # a home that cannot be written, or a process that holds the lock and does not go on
        logger.debug("speeds are not remembered", extra={"error": str(error)})
        return measure_speeds(products)


def measure_speeds(products: Products) -> dict[str, float]:
    """GFLOP/s by dtype for a token that is decoded once and learned from once; 0 without products (blocking).

    Every kind of product is timed on a slice of the layer: decoding a few sequences, the forward pass of the learner,
    and the gradients by inputs and by weights. This takes about BUDGET_S on idle cores: a slow probe is not repeated.
    """
    if not products:
        return dict.fromkeys(_DTYPES, 0.0)
    slices = Counter[tuple[int, int]]()
    for (inputs, outputs), count in products.items():
        slices[min(inputs, _SIDE), min(outputs, _SIDE)] += count * inputs * outputs  # multiply-adds of a token
    cold_bytes = _COLD_BYTES // len(slices)
    probes = {(size, dtype): _Probe.of(size, dtype, cold_bytes) for size in slices for dtype in _DTYPES}
    share_s = BUDGET_S / max(1, len(probes)) / len(_KINDS)
    end_cpu_s = time.process_time() + torch.get_num_threads() * BUDGET_S / 2
    with torch.inference_mode():
        for _ in range(_ROUNDS):
            for probe in probes.values():  # one dtype beside the other, so that neither has the quieter machine
                probe.run(share_s)
            if time.process_time() > end_cpu_s:  # CPU time, so that other processes do not count
                break
    flops = 2 * len(_KINDS) * sum(slices.values())
    return {
        dtype: round(flops / 1e9 / sum(count * probes[size, dtype].seconds for size, count in slices.items()), 2)
        for dtype in _DTYPES
    }


class _Probe:
    """The products of one slice of a layer in one dtype."""

    def __init__(self, weights: torch.Tensor) -> None:
        _, outputs, inputs = weights.shape
        self.weights = weights
        self.few, self.many = weights.new_ones((_SEQUENCES, inputs)), weights.new_ones((_ROWS, inputs))
        self.upstream = weights.new_ones((_ROWS, outputs))
        self._best_s: dict[str, float] = {}  # of a multiply-add of each kind
        self._is_slow = False

    @classmethod
    def of(cls, size: tuple[int, int], dtype: str, cold_bytes: int) -> "_Probe":
        inputs, outputs = size
        count = max(1, cold_bytes // (4 * inputs * outputs))
        return cls(torch.ones((count, outputs, inputs), dtype=getattr(torch, dtype)))

    @property
    def seconds(self) -> float:
        """Best seconds of a multiply-add, summed over the kinds of products."""
        return sum(self._best_s.values())

    def run(self, share_s: float) -> None:
        """Times each kind once more, unless one took longer than `share_s` in an earlier run."""
        if self._is_slow:
            return
        for kind in _KINDS:
            began_s, began_cpu_s = time.perf_counter(), time.process_time()
            num_multiplied = kind(self, began_s + share_s)
            elapsed_s = time.perf_counter() - began_s
            best_s = self._best_s.get(kind.__name__, float("inf"))
            self._best_s[kind.__name__] = min(best_s, elapsed_s / num_multiplied)
            # time that other processes took is no sign of a slow product
            self._is_slow |= min(elapsed_s, time.process_time() - began_cpu_s) > share_s


def _decode(probe: _Probe, until_s: float) -> int:
    """Multiplies a few sequences by more weights than a cache holds, as decoding does; returns its multiply-adds."""
    done = 0
    for weight in probe.weights:
        nn.functional.linear(probe.few, weight)
        done += probe.few.shape[0] * weight.numel()
        if time.perf_counter() > until_s:
            break
    return done


def _forward(probe: _Probe, until_s: float) -> int:
    nn.functional.linear(probe.many, probe.weights[0])
    return _ROWS * probe.weights[0].numel()


def _by_input(probe: _Probe, until_s: float) -> int:
    torch.mm(probe.upstream, probe.weights[0])
    return _ROWS * probe.weights[0].numel()


def _by_weight(probe: _Probe, until_s: float) -> int:
    torch.mm(probe.upstream.T, probe.many)
    return _ROWS * probe.weights[0].numel()


_KINDS: Final = (_decode, _forward, _by_input, _by_weight)


def _key(products: Products) -> str:
    """Key of all that speeds depend on: the usable parts of the processor, threads, torch, and the model's shape."""
    capability = " ".join(f"{name}={os.environ[name]}" for name in _CAPABILITIES if name in os.environ)
    shape = ",".join(f"{inputs}x{outputs}*{count}" for (inputs, outputs), count in sorted(products.items()))
    level = torch.backends.cpu.get_cpu_capability()
    parts = (_processor(), level, capability, f"{torch.get_num_threads()} threads", torch.__version__, shape)
    return "; ".join(parts)


def _processor() -> str:
    """Model of the processor, and a digest of the flags that Linux lists."""
    facts: dict[str, str] = {}
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            facts.setdefault(name.strip(), value.strip())
    flags = facts.get("flags") or facts.get("Features") or ""
    model = facts.get("model name") or platform.processor() or platform.machine()
    return f"{model} {facts.get('model', '')} {sha256(flags.encode()).hexdigest()[:8]}"


def _read(path: Path) -> dict[str, dict[str, float]]:
    """Remembered speeds by key; empty if the file is missing or damaged, without entries out of bounds."""
    try:
        known: Any = read_json(path, _MOST_BYTES) if path.is_file() else {}  # not a pipe: reading one could block
        found = {str(key): {dtype: float(speeds[dtype]) for dtype in _DTYPES} for key, speeds in known.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return {}
    return {key: speeds for key, speeds in found.items() if all(_LEAST <= each <= _MOST for each in speeds.values())}


def _replace(path: Path, known: dict[str, dict[str, float]]) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, delete=False) as draft:
        try:
            json.dump(known, draft, indent=1)
            draft.close()
            Path(draft.name).replace(path)
        finally:
            Path(draft.name).unlink(missing_ok=True)


if __name__ == "__main__":  # asked by commands that do not open torch: SETTING PUBLISHED THREADS PRODUCTS SAVED
    torch.set_num_threads(int(sys.argv[3]))
    sizes = {(inputs, outputs): count for inputs, outputs, count in json.loads(sys.argv[4])}
    print(json.dumps(asdict(choose(sys.argv[1], sys.argv[2], torch.device("cpu"), sizes, sys.argv[5]))))
