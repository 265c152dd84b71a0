"""Turns in which answers of peers are scored: who used least time lately goes first, and what takes long goes aside.

Invariant: known producers, newcomers and slow answers have one place each for certain, and newcomers and slow answers
never hold all places together. Nobody holds two places of one kind.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from swarm.flow import BoundedTable, DecayingSums
from swarm.interfaces import Producer

NUM_PLACES: Final = 3  # of scoring processes for answers of peers
HALF_LIFE_S: Final = 30.0  # of the time that counts as used
SLOW_FOR_S: Final = 60.0  # after an answer that took too long
MAX_ACCOUNTS: Final = 4096


class Lane(Enum):
    """Kinds of places, in the order in which they are filled."""

    KNOWN = "known"
    NEW = "new"
    SLOW = "slow"  # answers that took longer than a first try may, and those of who sent such before


@dataclass(eq=False, slots=True)
class _Waiter:
    account: str  # what a newcomer uses counts against its origin: keys are free
    producer: str
    place: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ScoringTurns:
    """The places of one verifier, and who has them next. Single event loop, no threads.

    Example:
        turns = ScoringTurns(loop.time)
        async with turns.of(producer, turns.lane_of(producer)):
            ...  # a scoring process is free
        turns.charge(producer, seconds)
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._used_s = DecayingSums[str](HALF_LIFE_S, MAX_ACCOUNTS)
        self._overran_s = BoundedTable[str, float](MAX_ACCOUNTS)  # when an answer took too long
        self._holding: dict[Lane, set[str]] = {lane: set() for lane in Lane}  # accounts
        self._waiting: dict[Lane, list[_Waiter]] = {lane: [] for lane in Lane}  # in order of arrival

    def lane_of(self, producer: Producer) -> Lane:
        """Where the answers of a producer are tried first."""
        keys = {_account_of(producer), producer.node_id}
        if any(self._now_s() - self._overran_s.get(key, -SLOW_FOR_S) < SLOW_FOR_S for key in keys):
            return Lane.SLOW
        return Lane.KNOWN if producer.is_known else Lane.NEW

    def of(self, producer: Producer, lane: Lane) -> "_Place":
        """A context that waits for a place and holds it."""
        account = _slow_account_of(producer) if lane is Lane.SLOW else _account_of(producer)
        return _Place(self, account, producer.node_id, lane)

    def charge(self, producer: Producer, seconds: float, *, is_slow: bool = False) -> None:
        """Counts the time that a process spent on a producer's answers; `is_slow`: among the slow ones."""
        keys = {_account_of(producer), producer.node_id}
        for key in keys | {_slow_account_of(producer)} if is_slow else keys:
            self._used_s.add(key, seconds, self._now_s())

    def note_overrun(self, producer: Producer) -> None:
        """Answers of a producer took longer than a first try may: the next ones go aside at once."""
        for key in {_account_of(producer), producer.node_id}:
            self._overran_s[key] = self._now_s()

    async def enter(self, account: str, producer: str, lane: Lane) -> None:
        """Waits for a place; every place that was given is left again by `leave`."""
        if not any(self._waiting.values()) and self._has_room(lane) and account not in self._holding[lane]:
            self._holding[lane].add(account)
            return
        waiter = _Waiter(account, producer)
        self._waiting[lane].append(waiter)
        self._grant()
        try:
            await waiter.place
        except asyncio.CancelledError:
            if waiter in self._waiting[lane]:
                self._waiting[lane].remove(waiter)
            else:  # its turn had come
                self.leave(account, lane)
            raise

    def leave(self, account: str, lane: Lane) -> None:
        """Gives a place back, to who is next."""
        self._holding[lane].discard(account)
        self._grant()

    def _has_room(self, lane: Lane) -> bool:
        num_known, num_new, num_slow = (len(self._holding[each]) for each in Lane)
        if num_known + num_new + num_slow >= NUM_PLACES:
            return False
        return lane is Lane.KNOWN or (num_new + num_slow < NUM_PLACES - 1 and (lane is Lane.NEW or not num_slow))

    def _grant(self) -> None:
        while any(self._waiting.values()):
            lane = next(iter(self._next_lanes()), None)
            waiter = None if lane is None else self._next_in(lane)
            if lane is None or waiter is None:
                return
            self._waiting[lane].remove(waiter)
            self._holding[lane].add(waiter.account)
            waiter.place.set_result(None)

    def _next_lanes(self) -> list[Lane]:
        """Lanes in which somebody can have a place now: first those that hold none."""
        lanes = [lane for lane in Lane if self._has_room(lane) and self._next_in(lane) is not None]
        without = [lane for lane in lanes if not self._holding[lane]]
        return without or sorted(lanes, key=lambda lane: lane is Lane.KNOWN)

    def _next_in(self, lane: Lane) -> _Waiter | None:
        """Who used least lately, of those that hold no place; among equals who came first."""
        now_s, used_s = self._now_s(), self._used_s
        holding = self._holding[lane]
        free = (waiter for waiter in self._waiting[lane] if waiter.account not in holding and not waiter.place.done())
        return min(
            free,
            key=lambda waiter: (used_s.of(waiter.account, now_s), used_s.of(waiter.producer, now_s)),
            default=None,
        )


def _account_of(producer: Producer) -> str:
    """A known key answers for itself, a free one for where it comes from."""
    return producer.node_id if producer.is_known else producer.origin or producer.node_id


def _slow_account_of(producer: Producer) -> str:
    """Among slow answers where a key comes from counts, known or not: one admitted group makes a free key known."""
    return f"slow from {producer.origin or producer.node_id}"


@dataclass(eq=False, slots=True)
class _Place:
    """A place for the time of a `with`."""

    turns: ScoringTurns
    account: str
    producer: str
    lane: Lane

    async def __aenter__(self) -> None:
        await self.turns.enter(self.account, self.producer, self.lane)

    async def __aexit__(self, *_: object) -> None:
        self.turns.leave(self.account, self.lane)
