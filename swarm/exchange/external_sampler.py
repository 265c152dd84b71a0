"""Sampler of external groups for a step: first a party, then one of its groups.

Each place of a step goes to the party with the fewest places in this step, in random order; within the party the
sampler decides: any group, the youngest first, or weighted by how much each source helps. So a party gains no draws by
more groups or more keys. All newcomers count as one party, and share its places in the same way.

Invariant: the order depends only on the candidates, the places before it, the source weights, the seed and the step,
never on the order of arrival or on the number of attempts at a draw.
"""

import hashlib
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, Literal, TypeVar

from swarm.exchange.draw_shares import DrawPlaces
from swarm.types import Digest, NodeId, TaskName

SamplerName = Literal["uniform", "fresh", "effective"]


@dataclass(eq=False, kw_only=True, slots=True)
class Candidate:
    """One external group as a sampler sees it."""

    digest: Digest  # decides ties
    source: NodeId  # its producer
    age_steps: int  # at this draw
    first_seen_s: float  # wall clock
    task: TaskName = ("", 0)


Group = TypeVar("Group", bound=Candidate)


@dataclass(slots=True)
class _Line(Generic[Group]):
    """The groups of one party that waits for places."""

    is_newcomer: bool
    groups: list[Group] = field(default_factory=list["Group"])
    is_ordered: bool = False  # as the sampler would draw them
    turn: float = 0.0  # the lowest comes first
    num_taken: int = 0

    def place_in_turn(self, num_newcomers: int) -> tuple[int, int, float]:
        """Sort key of turns, the lowest first; newcomers, with `num_newcomers` places so far, wait as one party."""
        return num_newcomers if self.is_newcomer else self.num_taken, self.num_taken, self.turn

    def order(self, sampler: SamplerName, seed: int, step: int, source_weights: Mapping[NodeId, float]) -> None:
        """Puts the groups in the order in which the sampler draws them; groups that it never draws are dropped."""
        count = len(self.groups)
        self.groups = sample(sampler, self.groups, count, seed=seed, step=step, source_weights=source_weights)
        self.is_ordered = True


def choose(
    sampler: SamplerName,
    candidates: Iterable[tuple[str, bool, Group]],
    count: int,
    places: DrawPlaces,
    *,
    seed: int,
    step: int,
    source_weights: Mapping[NodeId, float],
) -> list[Group]:
    """Chooses up to `count` candidates for the next `count` places of one step; other places are left free.

    Args:
        sampler, seed, step, source_weights: see `sample`.
        candidates: (party, True for a newcomer's, group), in any order.
        count: number of places, >= 0.
        places: bounds of each party; the places are taken there.
    """
    if count <= 0:
        return []
    lines: dict[tuple[bool, str], _Line[Group]] = {}
    for party, is_newcomer, group in candidates:
        lines.setdefault((is_newcomer, party), _Line(is_newcomer)).groups.append(group)
    _set_turns(sampler, lines, seed, step, source_weights)
    chosen: list[Group] = []
    num_newcomers = 0
    for _ in range(count):
        found = None
        for line in sorted(lines.values(), key=lambda line: line.place_in_turn(num_newcomers)):
            if line.is_newcomer and not places.may_take_newcomer:
                continue
            if not line.is_ordered:
                line.order(sampler, seed, step, source_weights)
            found = _next_of(line, places)
            if found is not None:
                line.groups.remove(found)
                line.num_taken += 1
                num_newcomers += line.is_newcomer
                places.take(found.source, found.task, line.is_newcomer)
                chosen.append(found)
                break
        if found is None:
            places.leave_free(1)
    return chosen


def _next_of(line: _Line[Group], places: DrawPlaces) -> Group | None:
    """The party's next group that may take the next place; None if there is none."""
    may_take, is_newcomer = places.may_take, line.is_newcomer
    return next((group for group in line.groups if may_take(group.source, group.task, is_newcomer)), None)


def _set_turns(
    sampler: SamplerName,
    lines: Mapping[tuple[bool, str], _Line[Group]],
    seed: int,
    step: int,
    source_weights: Mapping[NodeId, float],
) -> None:
    """Sets a random order of the parties; `effective` weighs each party by the largest weight of its sources."""
    names = sorted(lines)
    for name, number in zip(names, _numbers(seed, step, len(names)), strict=True):
        line = lines[name]
        if sampler == "effective":
            weights = (source_weights.get(source, 1.0) for source in {group.source for group in line.groups})
            weight = max((weight for weight in weights if weight > 0), default=0.0)
            line.turn = -math.log(number) / weight if weight > 0 else math.inf  # its sample is empty
        else:
            line.turn = number


def sample(
    sampler: SamplerName,
    candidates: Sequence[Group],
    count: int,
    *,
    seed: int,
    step: int,
    source_weights: Mapping[NodeId, float],
) -> list[Group]:
    """Up to `count` candidates without repetition, in the order of drawing.

    Args:
        sampler: `uniform`: all orders are equally likely; `fresh`: lowest age first, then largest `first_seen_s`;
            `effective`: each group with probability proportional to its source's weight, never one of weight 0.
        candidates: any order.
        count: most to take, >= 0.
        seed: seed of the node.
        step: step of the draw.
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
    """`count` pseudo-random numbers, uniform in (0, 1]; for so few, a hash costs less than seeding a generator."""
    data = hashlib.shake_256(f"draw {seed} {step}".encode()).digest(8 * count)
    return [(number + 0.5) / 2**53 for number in (word >> 11 for word in struct.unpack(f"<{count}Q", data))]


def _weighted_order(weights: Sequence[float], numbers: Sequence[float]) -> list[int]:
    """Indices in the order of weighted sampling without replacement; only weights above 0 take part.

    Source: Efraimidis and Spirakis 2006, doi:10.1016/j.ipl.2005.11.003 (keys u ** (1 / w), in logs).
    """
    usable = [index for index, weight in enumerate(weights) if weight > 0]  # numbers are for all: no weight shifts them
    return sorted(usable, key=lambda index: -math.log(numbers[index]) / weights[index])
