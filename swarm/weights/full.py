"""A whole version as one safetensors file.

Invariant: the header follows from the specs alone, so a reader compares it instead of parsing what a peer sent.
"""

import json
import struct
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from swarm.weights.refuse import malformed
from swarm.weights.streams import StreamReader
from swarm.weights.tensors import HostTensor, TensorSpec, Weights, specs_of

_SLICE_BYTES = 1 << 20


def full_bytes(specs: Sequence[TensorSpec]) -> int:
    """Size of the file, exactly."""
    return len(_header(specs)) + sum(spec.num_bytes for spec in specs)


def encode_full(target: Weights) -> Iterator[memoryview]:
    """The file in parts; content is not copied."""
    specs = specs_of(target)
    yield memoryview(_header(specs))
    for spec in specs:
        content = target[spec.name].bytes
        for start in range(0, len(content), _SLICE_BYTES):
            yield content[start : start + _SLICE_BYTES]


def decode_full(specs: Sequence[TensorSpec], buffers: Iterable[bytes | memoryview]) -> Iterator[HostTensor]:
    """The tensors in order of name.

    Args:
        specs: in order of name, of a total size that the caller accepts.

    Raises:
        Malformed: the bytes are not the safetensors file of these specs.
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
