"""Means over seeds with Student's t intervals, and how a table writes them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over n values and the half-width of its 95 % interval; None where n is 1."""

    mean: float
    half_width: float | None
    n: int

    @property
    def is_nonzero(self) -> bool:
        """The interval exists and excludes 0."""
        return self.half_width is not None and abs(self.mean) > self.half_width


def t_quantile(degrees: int) -> float:
    """97.5 % quantile of Student's t; above 30 degrees of freedom by its expansion around the normal one."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    z = NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * degrees) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and interval of at least one value."""
    n = len(values)
    half_width = t_quantile(n - 1) * stdev(values) / math.sqrt(n) if n > 1 else None
    return Estimate(mean=fmean(values), half_width=half_width, n=n)


def plain(value: Estimate, digits: int = 3) -> str:
    """`0.123 ± 0.004`."""
    width = "" if value.half_width is None else f" ± {value.half_width:.{digits}f}"
    return f"{value.mean:.{digits}f}{width}"


def signed(value: Estimate | None) -> str:
    """`+0.123 ± 0.004`, bold where the interval excludes 0; `-` for nothing."""
    if value is None:
        return "-"
    text = f"{value.mean:+.3f}" if value.half_width is None else f"{value.mean:+.3f} ± {value.half_width:.3f}"
    return f"**{text}**" if value.is_nonzero else text
