"""Weights codec: a version as a full safetensors file, as a lossless patch of another version, or as adapters alone.

Invariant: decoding gives the target bit for bit or raises, and never changes `base`. The header of a full file follows
from the specs alone, so a reader compares it and never parses a peer's header.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Final

import numpy as np

from swarm.weights.payload import StreamReader, malformed
from swarm.weights.tensors import HostTensor, TensorSpec, Weights, specs_of

_SLICE_BYTES: Final = 1 << 20


class Codec(StrEnum):
    """Encoding of a payload; the manifest holds it as a number."""

    FULL = "full"  # a safetensors file
    DELTA = "delta"  # a patch of the base
    LORA = "lora"  # adapter factors only: a patch where there is a base, else a safetensors file


def encode(codec: Codec, target: Weights, base: Weights | None) -> Iterator[bytes | memoryview]:
    """The payload of a version, in parts of any size.

    Args:
        base: start of a patch; None for FULL, required for DELTA, either for LORA.

    Raises:
        ValueError: a missing or superfluous base, different layouts, or, for LORA, a tensor that is no adapter factor.
    """
    if (codec is Codec.FULL and base is not None) or (codec is Codec.DELTA and base is None):
        raise ValueError(f"codec {codec} {'without' if base is None else 'with'} a base")
    if codec is Codec.LORA and not is_adapter(specs_of(target)):
        raise ValueError("codec lora carries adapter factors and nothing else")
    if base is None:
        return encode_full(target)
    from swarm.weights.delta import encode_delta  # here, because every agent imports this module for its manifests

    return encode_delta(base, target)


def decode(
    specs: Sequence[TensorSpec], buffers: Iterable[bytes | memoryview], base: Weights | None
) -> Iterator[HostTensor]:
    """Yields the tensors of a payload, in new memory. Raises MalformedPayload if the payload does not fit.

    Args:
        specs: the target's, in order of name; unused with a base, which has the same specs.
        base: start of the patch; None if the payload is a safetensors file.
    """
    if base is None:
        return decode_full(specs, buffers)
    from swarm.weights.delta import decode_delta  # here, as in `encode`

    return decode_delta(base, buffers)


def is_adapter(specs: Sequence[TensorSpec]) -> bool:
    """True if there are tensors and each is a factor of an adapter."""
    from swarm.model.lora import is_adapter_name  # here, because it imports torch

    return bool(specs) and all(is_adapter_name(spec.name) for spec in specs)


# --- a full file -------------------------------------------------------------------------------


def full_bytes(specs: Sequence[TensorSpec]) -> int:
    """Exact size of the safetensors file of these tensors, bytes."""
    return len(_header(specs)) + sum(spec.num_bytes for spec in specs)


def encode_full(target: Weights) -> Iterator[memoryview]:
    """The safetensors file in parts, without copying tensor content."""
    specs = specs_of(target)
    yield memoryview(_header(specs))
    for spec in specs:
        content = target[spec.name].bytes
        for start in range(0, len(content), _SLICE_BYTES):
            yield content[start : start + _SLICE_BYTES]


def decode_full(specs: Sequence[TensorSpec], buffers: Iterable[bytes | memoryview]) -> Iterator[HostTensor]:
    """Yields the tensors of a safetensors file. Raises MalformedPayload if the bytes do not fit `specs`.

    Args:
        specs: in order of name; the caller has bounded their total size.
    """
    reader = StreamReader(buffers)
    header = _header(specs)
    if reader.take(len(header)) != header:
        raise malformed("safetensors header does not fit the manifest")
    for spec in specs:
        bits = np.empty(spec.num_elements, spec.info.bits_dtype)
        reader.into(bits.view(np.uint8).data)
        yield HostTensor(spec=spec, bits=bits)
    reader.end()


def _header(specs: Sequence[TensorSpec]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for spec in specs:
        stop = start + spec.num_bytes
        entries[spec.name] = {
            "dtype": spec.info.safetensors,
            "shape": list(spec.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text
