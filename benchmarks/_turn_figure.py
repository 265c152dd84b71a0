"""A figure of a recipe over turns, and what it gave with one seed.

Invariant: plain data, so that jobs cross processes and outcomes stand in a file.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One figure with one seed."""

    figure: str
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a job gave."""

    job: Job
    method: float
    baseline: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """A quantity of a recipe."""

    recipe: str
    quantity: str
    where: str
    is_more: bool  # what the method claims
    measure: Callable[[int], tuple[float, float]]  # of a seed: for the method, for the trajectory-level one
    suffix: str = ""

    @property
    def name(self) -> str:
        """Unique."""
        return f"{self.recipe}{self.suffix}"
