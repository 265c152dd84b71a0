"""The three ways a version travels: in full, as a lossless patch of another version, or as adapters alone.

Invariant: what decodes is the target bit for bit, or decoding raises; `base` is never changed.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import StrEnum

from swarm.weights.delta import decode_delta, encode_delta
from swarm.weights.full import decode_full, encode_full
from swarm.weights.tensors import HostTensor, TensorSpec, Weights, specs_of


class Codec(StrEnum):
    """How a payload is to be read."""

    FULL = "full"  # a safetensors file
    DELTA = "delta"  # a patch of the base
    LORA = "lora"  # adapter factors and nothing else: a patch where there is a base, else a safetensors file


def encode(codec: Codec, target: Weights, base: Weights | None) -> Iterator[bytes | memoryview]:
    """The payload in parts of any size.

    Args:
        base: None for FULL; for LORA either.

    Raises:
        ValueError: a base is missing or too much, layouts differ, or LORA was given what is no adapter.
    """
    if (codec is Codec.FULL and base is not None) or (codec is Codec.DELTA and base is None):
        raise ValueError(f"codec {codec} {'without' if base is None else 'with'} a base")
    if codec is Codec.LORA and not is_adapter(specs_of(target)):
        raise ValueError("codec lora carries adapter factors and nothing else")
    return encode_full(target) if base is None else encode_delta(base, target)


def decode(
    specs: Sequence[TensorSpec], buffers: Iterable[bytes | memoryview], base: Weights | None
) -> Iterator[HostTensor]:
    """The target's tensors; none shares memory with `base`.

    Args:
        specs: of the target, in order of name.
        base: None where the payload is a safetensors file.

    Raises:
        Malformed: the payload is not one for these specs.
    """
    return decode_full(specs, buffers) if base is None else decode_delta(base, buffers)


def is_adapter(specs: Sequence[TensorSpec]) -> bool:
    """True where every tensor is a factor of an adapter."""
    from swarm.model.lora import is_adapter_name  # brings torch

    return bool(specs) and all(is_adapter_name(spec.name) for spec in specs)
