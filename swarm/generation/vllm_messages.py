"""Messages between a worker and its vLLM engine process: JSON, one object per line, over the process's own pipes.

    worker -> engine   EngineSettings, then {"id", "call": "generate" | "score" | "load" | "cancel", "body"}
    engine -> worker   {"ready": name, "compute_dtype"} or {"missing" | "error": reason}, then {"tokens": total} as a
                       sign of life, and in the order in which calls end {"id", "result"} or {"id", "error", "message"}

JSON, as the engine's environment may have another Python, numpy and torch. Invariant: numbers cross bit for bit.
"""

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np

from swarm.errors import ConfigError
from swarm.types import (
    Canary,
    Digest,
    FinishReason,
    FloatArray,
    IntArray,
    LoadReport,
    PolicyVersion,
    Sampling,
    VersionSpan,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Settings of a new engine process.

    Example:
        EngineSettings(model="/models/smollm2", dtype="bfloat16", compute_dtype="auto", cpu_dtype="float32",
            max_rows=64, eos_ids=[2], version=base, options={}, stall_s=600)
    """

    model: str  # a Hugging Face directory
    dtype: str  # of the published tensors, as torch names it
    compute_dtype: str  # as configured
    cpu_dtype: str  # that "auto" means on this machine's CPU; on a GPU it is the published one
    max_rows: int
    eos_ids: list[int]
    version: PolicyVersion  # of that model
    options: dict[str, Any]  # of vLLM's EngineArgs
    stall_s: float  # a step, or a change of weights, that takes longer ends the process


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """Prompts to continue, `num_samples` times each; answered with a list of Continuations, prompt by prompt."""

    prompts: Sequence[Sequence[int]]
    num_samples: int
    sampling: Sampling  # if greedy, only max_new_tokens counts
    seeds: Sequence[int] = ()  # one per prompt and sample, in that order; ignored if greedy
    greedy: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """One generated sequence that has ended."""

    token_ids: IntArray  # [T]
    logprobs: FloatArray | None  # [T] at the sampling temperature; None where they are not known
    spans: Sequence[VersionSpan]
    finish: FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class NewWeights:
    """A version for the engine to load; answered with a LoadReport."""

    version: PolicyVersion
    path: Path  # safetensors, on this machine
    digest: Digest  # of the published tensors in it
    canaries: Sequence[Canary]
    tolerance_nats: float
    in_flight: bool


_TYPES: Final = {
    kind.__name__: kind
    for kind in (
        *(EngineSettings, GenerateRequest, Continuation, NewWeights),
        *(PolicyVersion, Sampling, VersionSpan, Canary, LoadReport),
    )
}
_TYPE: Final = "$type"  # key of an object that is more than a mapping


def encode_line(message: object) -> bytes:
    """A message as a line of JSON, the line feed included."""
    return json.dumps(message, default=_to_plain).encode() + b"\n"


def decode_line(line: bytes) -> Any:
    """The message in a line. Raises ConfigError if another release wrote it, ValueError if it is no JSON."""
    try:
        return json.loads(line, object_hook=_from_plain)
    except (KeyError, TypeError) as error:
        raise ConfigError(
            f"engine.python has another release of swarm-trainer ({error}); make vllm installs this one there"
        ) from error


def _to_plain(value: object) -> object:
    if isinstance(value, np.integer):  # a token id out of an array
        return int(value)
    if is_dataclass(value):
        return {_TYPE: type(value).__name__, **{each.name: getattr(value, each.name) for each in fields(value)}}
    if isinstance(value, np.ndarray):
        array = cast("np.ndarray[Any, Any]", value)
        return {_TYPE: "array", "dtype": array.dtype.str, "data": base64.b64encode(array.tobytes()).decode("ascii")}
    if isinstance(value, bytes):
        return {_TYPE: "bytes", "hex": value.hex()}
    if isinstance(value, Path):
        return {_TYPE: "path", "path": str(value)}
    raise AssertionError(f"{type(value).__name__} is part of no message")


def _from_plain(plain: dict[str, Any]) -> object:
    kind = plain.pop(_TYPE, None)
    if kind is None:
        return plain
    if kind == "array":
        return np.frombuffer(base64.b64decode(plain["data"]), plain["dtype"]).copy()
    if kind == "bytes":
        return bytes.fromhex(plain["hex"])
    if kind == "path":
        return Path(plain["path"])
    if kind == Continuation.__name__:
        plain["finish"] = FinishReason(plain["finish"])
    return _TYPES[kind](**plain)
