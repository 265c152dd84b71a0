"""A change of a value as a signed count of steps between neighbouring values (ulps), and back.

Invariant: a bijection on bit patterns: every pattern, NaN payloads and both zeros included, has its own place in one
order, and a step wraps around, so base plus step is the target bit for bit.

Floating-point patterns are ordered by value: seen as signed integers, negative ones with their magnitude flipped. A
step is counted away from zero, so that its sign is the same for a weight that grows and for its mirror image: small
weights keep growing, which codes better than the plain sign.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarm.weights.tensors import Bits, DtypeInfo

Signed = NDArray[Any]  # 1-D signed integers as wide as the dtype


def steps(base: Bits, target: Bits, info: DtypeInfo) -> Bits:
    """Changes as small unsigned numbers: 0 for one step towards zero, 1 for one away, 2 for two towards, ...

    Args:
        base, target: [n] patterns that differ everywhere.
    """
    signed, top_bit = _signed(base, info), 8 * info.size - 1
    difference = _ordered(_signed(target, info), info)
    difference -= _ordered(signed, info)
    _turn(difference, signed, info)
    # Zigzag: 2 s for s > 0, -2 s - 1 for s < 0; 0 does not occur, so everything moves down by one.
    numbers = difference << 1
    numbers ^= difference >> top_bit
    numbers -= 1
    return numbers.view(info.bits_dtype)


def stepped(base: Bits, changes: Bits, info: DtypeInfo) -> Bits:
    """The targets of `steps`."""
    signed = _signed(base, info)
    raised = changes + info.bits_dtype.type(1)
    difference = _signed(raised >> 1, info)
    difference ^= -_signed(raised & 1, info)
    _turn(difference, signed, info)
    difference += _ordered(signed, info)
    return _ordered(difference, info).view(info.bits_dtype)


def magnitudes(bits: Bits, info: DtypeInfo, out: Bits) -> Bits:
    """Patterns without their sign, into `out`: for floating-point numbers in order of absolute value."""
    return np.bitwise_and(bits, info.bits_dtype.type((1 << (8 * info.size - 1)) - 1), out=out)


def _signed(bits: Bits, info: DtypeInfo) -> Signed:
    return bits.view(np.dtype(f"<i{info.size}"))


def _ordered(patterns: Signed, info: DtypeInfo) -> Signed:
    """A new array of places in the order; its own inverse."""
    if info.mantissa_bits is None:
        return patterns.copy()
    flips = patterns >> (8 * info.size - 1)
    flips &= patterns.dtype.type((1 << (8 * info.size - 1)) - 1)
    flips ^= patterns
    return flips


def _turn(difference: Signed, base: Signed, info: DtypeInfo) -> None:
    """Negates in place where the base is negative."""
    if info.is_signed:
        sign = base >> (8 * info.size - 1)
        difference ^= sign
        difference -= sign
