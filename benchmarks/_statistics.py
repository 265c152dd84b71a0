"""Means over seeds with Student's t intervals, and how a table writes them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from swarm.trained.intervals import t_quantile


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
