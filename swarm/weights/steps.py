"""A change of a value as a signed count of steps between neighbouring values (ulps), and back.

Invariant: a bijection on bit patterns: every pattern, NaN payloads and both zeros included, has its own place in one
order, and a step wraps around, so base plus step is the target bit for bit.

Floating-point patterns are ordered by value (sign-magnitude to offset binary). A step is counted away from zero, so
that its sign is the same for a weight that grows and for its mirror image: small weights keep growing, which codes
better than the plain sign.
"""

import numpy as np

from swarm.weights.tensors import Bits, DtypeInfo


def steps(base: Bits, target: Bits, info: DtypeInfo) -> Bits:
    """Changes as small unsigned numbers: 0 for one step towards zero, 1 for one away, 2 for two towards, ...

    Args:
        base, target: [n] patterns that differ everywhere.
    """
    top = _top(info)
    difference = _ordered(target, info) - _ordered(base, info)
    away = np.where(base >= top, -difference, difference) if info.is_signed else difference
    bits = info.bits_dtype.type
    # Zigzag: 2 s for s > 0, -2 s - 1 for s < 0; 0 does not occur, so everything moves down by one.
    return np.where(away >= top, ~(away << bits(1)), away << bits(1)) - bits(1)


def stepped(base: Bits, changes: Bits, info: DtypeInfo) -> Bits:
    """The targets of `steps`."""
    top, bits = _top(info), info.bits_dtype.type
    raised = changes + bits(1)
    half = raised >> bits(1)
    away = np.where(raised & bits(1), ~half, half)
    difference = np.where(base >= top, -away, away) if info.is_signed else away
    return _pattern(_ordered(base, info) + difference, info)


def magnitudes(bits: Bits, info: DtypeInfo, out: Bits) -> Bits:
    """Patterns without their sign, into `out`: for floating-point numbers in order of absolute value."""
    return np.bitwise_and(bits, info.bits_dtype.type((1 << (8 * info.size - 1)) - 1), out=out)


def _top(info: DtypeInfo) -> np.unsignedinteger:
    return info.bits_dtype.type(1 << (8 * info.size - 1))


def _ordered(bits: Bits, info: DtypeInfo) -> Bits:
    top = _top(info)
    if info.mantissa_bits is not None:
        return np.where(bits >= top, ~bits, bits | top)
    return bits ^ top if info.is_signed else bits


def _pattern(ordered: Bits, info: DtypeInfo) -> Bits:
    top = _top(info)
    if info.mantissa_bits is not None:
        return np.where(ordered >= top, ordered ^ top, ~ordered)
    return ordered ^ top if info.is_signed else ordered
