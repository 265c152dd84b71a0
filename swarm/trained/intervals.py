"""Intervals of shares and of differences, as every command, page and benchmark shows them.

Invariant: `z` is the normal quantile of one side, Z_95 for a single interval of 95 %; larger where several are to hold
at once.

Sources: paired shares: Wald's interval with the adjustment of Bonett and Price, as Fagerland, Lydersen and Laake
recommend it (2014, doi:10.1002/sim.6148); one share: Wilson 1927; two independent shares: Newcombe 1998, method 10.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, stdev
from typing import Final

Z_95: Final = NormalDist().inv_cdf(0.975)
Interval = tuple[float, float]
# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom.
_T_95: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def paired_interval(differences: Sequence[float], z: float) -> Interval:
    """Interval of the mean of differences in [-1, 1] of the same problems, one for each problem.

    Two more differences, 1 and -1, are counted: so it is never empty, and a few problems that all rose prove nothing.
    """
    count = len(differences) + 2
    center = math.fsum(differences) / count
    spread = (math.fsum(each * each for each in differences) + 2) / count - center * center
    half = z * math.sqrt(spread / count)
    return max(-1.0, center - half), min(1.0, center + half)


def t_quantile(degrees: int, z: float = Z_95) -> float:
    """Quantile of Student's t that goes with the normal quantile `z`, for at least one degree of freedom.

    Tabulated for Z_95 and up to 30 degrees, else expanded around `z` (Abramowitz and Stegun 26.7.5).
    """
    if degrees <= len(_T_95) and z == Z_95:
        return _T_95[degrees - 1]
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def graded_interval(differences: Sequence[float], z: float = Z_95) -> Interval:
    """Student's interval of the mean of at least two graded differences, such as of the same problems or seeds."""
    center = fmean(differences)
    half = t_quantile(len(differences) - 1, z) * stdev(differences) / math.sqrt(len(differences))
    return center - half, center + half


def wilson_interval(share: float, count: int, z: float) -> Interval:
    """Interval of a share of `count` problems; (0, 1) without problems."""
    if not count:
        return 0.0, 1.0
    center = share + z * z / (2 * count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return (center - half) / (1 + z * z / count), (center + half) / (1 + z * z / count)


def independent_interval(before: float, num_before: int, after: float, num_after: int, z: float) -> Interval:
    """Interval of after - before for shares of different problems."""
    (low_before, high_before), (low, high) = (
        wilson_interval(before, num_before, z),
        wilson_interval(after, num_after, z),
    )
    return (
        after - before - math.hypot(after - low, high_before - before),
        after - before + math.hypot(high - after, before - low_before),
    )
