"""Host tensors for the weights codec: name, dtype, shape, and the bits as unsigned integers.

Invariant: bits are never converted to numbers, so NaN payloads and -0.0 survive. torch appears only in `TorchWeights`
(input) and `to_torch` (output).
"""

import hashlib
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import blake3
import numpy as np
from numpy.typing import NDArray

from swarm.types import Digest

if TYPE_CHECKING:
    import torch

Bits = NDArray[Any]  # 1-D, little-endian unsigned integers as wide as the dtype

MAX_NAME_BYTES: Final = 512
MAX_DIMS: Final = 8
MAX_ELEMENTS: Final = 2**40  # of one tensor; a dimension of 0 counts as 1, else its strides exceed any integer

_PIECE: Final = 1 << 20  # elements checked at once
_NAME: Final = re.compile(r"[A-Za-z0-9_.\-/]+")


@dataclass(frozen=True, slots=True)
class DtypeInfo:
    """Properties of a dtype that the codec needs."""

    size: int  # bytes of an element: 1, 2, 4 or 8
    mantissa_bits: int | None  # None: an integer or bool
    is_signed: bool
    safetensors: str  # name in a safetensors header

    @property
    def bits_dtype(self) -> np.dtype[Any]:
        """Unsigned integer of the same width."""
        return np.dtype(f"<u{self.size}")


# By torch's name without "torch.".
DTYPES: Final[Mapping[str, DtypeInfo]] = {
    "bfloat16": DtypeInfo(2, 7, True, "BF16"),
    "float16": DtypeInfo(2, 10, True, "F16"),
    "float32": DtypeInfo(4, 23, True, "F32"),
    "float64": DtypeInfo(8, 52, True, "F64"),
    "float8_e4m3fn": DtypeInfo(1, 3, True, "F8_E4M3"),
    "float8_e5m2": DtypeInfo(1, 2, True, "F8_E5M2"),
    "int8": DtypeInfo(1, None, True, "I8"),
    "int16": DtypeInfo(2, None, True, "I16"),
    "int32": DtypeInfo(4, None, True, "I32"),
    "int64": DtypeInfo(8, None, True, "I64"),
    "uint8": DtypeInfo(1, None, False, "U8"),
    "bool": DtypeInfo(1, None, False, "BOOL"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of a tensor.

    Example:
        TensorSpec(name="model.norm.weight", dtype="bfloat16", shape=(576,))
    """

    name: str
    dtype: str  # a key of DTYPES
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises ValueError for a name, dtype or shape out of bounds, so an existing spec can be trusted."""
        if not _NAME.fullmatch(self.name) or len(self.name) > MAX_NAME_BYTES:
            raise ValueError(f"tensor name {self.name[:40]!r}: expected 1 to {MAX_NAME_BYTES} of A-Z a-z 0-9 _ . / -")
        if self.dtype not in DTYPES:
            raise ValueError(f"tensor {self.name}: dtype {self.dtype[:20]!r} is unknown")
        if len(self.shape) > MAX_DIMS or any(size < 0 for size in self.shape):
            raise ValueError(f"tensor {self.name}: shape has {len(self.shape)} dimensions or a negative one")
        if math.prod(max(1, size) for size in self.shape) > MAX_ELEMENTS:
            raise ValueError(f"tensor {self.name}: over {MAX_ELEMENTS} elements")

    @property
    def info(self) -> DtypeInfo:
        return DTYPES[self.dtype]

    @property
    def num_elements(self) -> int:
        """Product of the shape; 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.info.size


@dataclass(frozen=True, kw_only=True, slots=True)
class HostTensor:
    """A tensor in the memory of this process."""

    spec: TensorSpec
    bits: Bits  # [num_elements]

    def __post_init__(self) -> None:
        assert self.bits.shape == (self.spec.num_elements,), (self.spec, self.bits.shape)
        assert self.bits.dtype == self.spec.info.bits_dtype, (self.spec, self.bits.dtype)

    @property
    def bytes(self) -> memoryview:
        """The content, little-endian, not copied."""
        return np.ascontiguousarray(self.bits).view(np.uint8).data

    @property
    def is_finite(self) -> bool:
        """True if no element is an infinity or NaN; always true for integers."""
        info = self.spec.info
        if info.mantissa_bits is None:
            return True
        numbers = (1 << (8 * info.size - 1)) - 1  # all bits but the sign
        mask = numbers if self.spec.dtype == "float8_e4m3fn" else numbers >> info.mantissa_bits << info.mantissa_bits
        pieces = (self.bits[start : start + _PIECE] for start in range(0, len(self.bits), _PIECE))
        return not any(bool(((piece & mask) == mask).any()) for piece in pieces)

    def blake3(self) -> Digest:
        """BLAKE3 of the content, 32 bytes."""
        return blake3.blake3(self.bytes).digest()


Weights = Mapping[str, HostTensor]  # by name; iterated in sorted order


def specs_of(weights: Weights) -> tuple[TensorSpec, ...]:
    """Specs in order of name; copies no content of a TorchWeights from a device."""
    if isinstance(weights, TorchWeights):
        return weights.specs
    return tuple(weights[name].spec for name in sorted(weights))


def part_of(weights: Weights, name: str, part: slice) -> Bits:
    """A slice of a tensor's bit patterns; copies only this slice from a device."""
    if isinstance(weights, TorchWeights):
        return weights.part(name, part)
    return weights[name].bits[part]


class PublishedDigest:
    """SHA-256 as `swarm.model.version_digest` defines it, updated tensor by tensor in order of name."""

    def __init__(self) -> None:
        self._sha256 = hashlib.sha256(b"swarm published tensors 1\0")

    def update(self, tensor: HostTensor) -> None:
        """Hashes the next tensor."""
        spec = tensor.spec
        for text in (spec.name, spec.dtype):
            encoded = text.encode()
            self._sha256.update(struct.pack("<I", len(encoded)) + encoded)
        self._sha256.update(struct.pack(f"<I{len(spec.shape)}Q", len(spec.shape), *spec.shape))
        self._sha256.update(tensor.bytes)

    def digest(self) -> Digest:
        """Digest of the tensors so far."""
        return self._sha256.digest()


def published_digest(weights: Weights) -> Digest:
    """`PolicyVersion.digest` of these weights."""
    digest = PublishedDigest()
    for name in sorted(weights):
        digest.update(weights[name])
    return digest.digest()


class TorchWeights(Mapping[str, HostTensor]):
    """Published torch tensors on any device, copied to the host on access unless contiguous there."""

    def __init__(self, state: "Mapping[str, torch.Tensor]") -> None:
        """Raises ValueError for a name, dtype or shape that cannot be published."""
        self._state = state
        self.specs = tuple(
            TensorSpec(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
            for name, tensor in sorted(state.items())
        )
        self._specs = {spec.name: spec for spec in self.specs}
        self._on_host: dict[str, Bits] = {}  # views

    def __getitem__(self, name: str) -> HostTensor:
        return HostTensor(spec=self._specs[name], bits=self.part(name, slice(None)))

    def part(self, name: str, part: slice) -> Bits:
        """A slice of a tensor's bit patterns, sharing memory with a contiguous CPU tensor."""
        import torch

        host = self._on_host.get(name)
        if host is None:
            tensor, dtype = self._state[name].detach(), self._specs[name].info.bits_dtype
            flat = tensor.reshape(-1)
            if tensor.device.type != "cpu" or not tensor.is_contiguous():
                return flat[part].cpu().view(torch.uint8).numpy().view(dtype)
            host = self._on_host[name] = flat.view(torch.uint8).numpy().view(dtype)
        return host[part]

    def __iter__(self) -> Iterator[str]:
        return (spec.name for spec in self.specs)

    def __len__(self) -> int:
        return len(self.specs)


def to_torch(tensor: HostTensor) -> "torch.Tensor":
    """The tensor as a torch tensor that shares memory with `tensor.bits`."""
    import torch

    dtype = cast("torch.dtype", getattr(torch, tensor.spec.dtype))
    plain = torch.from_numpy(tensor.bits.view(np.uint8))  # pyright: ignore[reportUnknownMemberType]
    if not tensor.spec.num_elements:
        return torch.empty(tensor.spec.shape, dtype=dtype)
    return plain.view(dtype).reshape(tensor.spec.shape)
