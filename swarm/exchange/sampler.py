"""Which external groups a step takes first: any, the youngest, or those of sources that help most.

Invariant: the order depends on the candidates, the seed and the step alone, never on when they arrived
or how often a draw was asked for.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, Protocol, TypeVar

import numpy as np

from swarm.types import Digest, NodeId

SamplerName = Literal["uniform", "fresh", "effective"]


class Eligible(Protocol):
    """One external group as a sampler sees it."""

    @property
    def digest(self) -> Digest:
        """Of the group; decides ties."""
        ...

    @property
    def source(self) -> NodeId:
        """Its producer."""
        ...

    @property
    def age_steps(self) -> int:
        """At this draw."""
        ...

    @property
    def first_seen_s(self) -> float:
        """Wall clock."""
        ...


Group = TypeVar("Group", bound=Eligible)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """An `Eligible` on its own, without a buffer around it."""

    digest: Digest
    source: NodeId  # its producer
    age_steps: int
    first_seen_s: float


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
    rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, step])))
    if sampler == "uniform":
        return [ordered[index] for index in rng.permutation(len(ordered))[:count]]
    weights = np.array([source_weights.get(candidate.source, 1.0) for candidate in ordered])
    return [ordered[index] for index in _weighted_order(weights, rng)[:count]]


def _weighted_order(weights: np.ndarray, rng: np.random.Generator) -> list[int]:
    """Indices in the order of weighted sampling without replacement; weights of 0 or NaN are left out.

    Source: Efraimidis and Spirakis 2006, doi:10.1016/j.ipl.2005.11.003 (keys u ** (1 / w), in logs).
    """
    keys = np.log(rng.random(len(weights)))  # drawn for all, so that one weight does not shift the others
    usable = np.flatnonzero(weights > 0)
    order = usable[np.argsort(-(keys[usable] / weights[usable]), kind="stable")]
    return [int(index) for index in order]
