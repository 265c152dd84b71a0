"""Sampler of external groups for a step: uniform, youngest first, or weighted by how much each source helps.

Invariant: the order depends on the candidates, the seed and the step alone, never on when they arrived
or how often a draw was asked for.
"""

import hashlib
import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, TypeVar

from swarm.types import Digest, NodeId

SamplerName = Literal["uniform", "fresh", "effective"]


@dataclass(eq=False, kw_only=True, slots=True)
class Candidate:
    """One external group as a sampler sees it."""

    digest: Digest  # decides ties
    source: NodeId  # its producer
    age_steps: int  # at this draw
    first_seen_s: float  # wall clock


Group = TypeVar("Group", bound=Candidate)


def sample(
    sampler: SamplerName,
    candidates: Sequence[Group],
    count: int,
    *,
    seed: int,
    step: int,
    source_weights: Mapping[NodeId, float],
) -> list[Group]:
    """Up to `count` candidates without repetition.

    Args:
        sampler: `uniform`: any; `fresh`: lowest age, then seen last; `effective`: with probability in
            proportion to the source's weight, and never from a source of weight 0.
        candidates: any order.
        count: most to take, >= 0.
        seed: of the node.
        step: of the draw.
        source_weights: weight >= 0 per source; a source that is not in it weighs 1.
    """
    if count <= 0 or not candidates:
        return []
    ordered = sorted(candidates, key=attrgetter("digest"))
    if sampler == "fresh":
        return sorted(ordered, key=lambda candidate: (candidate.age_steps, -candidate.first_seen_s))[:count]
    numbers = _numbers(seed, step, len(ordered))
    if sampler == "uniform":
        order = sorted(range(len(ordered)), key=numbers.__getitem__)
    else:
        order = _weighted_order([source_weights.get(candidate.source, 1.0) for candidate in ordered], numbers)
    return [ordered[index] for index in order[:count]]


def _numbers(seed: int, step: int, count: int) -> list[float]:
    """Uniform in (0, 1), as many as asked for; hashed, which for a draw's few costs less than seeding a generator."""
    data = hashlib.shake_256(f"draw {seed} {step}".encode()).digest(8 * count)
    return [(number + 0.5) / 2**53 for number in (word >> 11 for word in struct.unpack(f"<{count}Q", data))]


def _weighted_order(weights: Sequence[float], numbers: Sequence[float]) -> list[int]:
    """Indices in the order of weighted sampling without replacement; weights of 0 or NaN are left out.

    Source: Efraimidis and Spirakis 2006, doi:10.1016/j.ipl.2005.11.003 (keys u ** (1 / w), in logs).
    """
    usable = [index for index, weight in enumerate(weights) if weight > 0]  # numbers are for all: no weight shifts them
    return sorted(usable, key=lambda index: -math.log(numbers[index]) / weights[index])
