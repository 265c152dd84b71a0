"""Turns for scoring the answers of peers: the account that used the least time lately goes first.

Time counts against the key that signed the answers and against its origin; the peer that relayed the answers is the
origin only of a key whose own origin is unknown. Invariant: known producers, newcomers and slow answers get turns, and
newcomers and slow answers never hold all places together. No account holds two places of a lane. Among known producers
the established ones go first, but every SHARE-th turn goes to the others, since one admitted group makes a key known.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from swarm.environments.sandbox.time_accounts import ESTABLISHED, HALF_LIFE_S, MAX_ACCOUNTS, account_of
from swarm.fairness import FairTable
from swarm.flow import BoundedTable, DecayingSums
from swarm.interfaces import Producer
from swarm.trust_policy import SHARE

NUM_PLACES: Final = 3  # of scoring processes for answers of peers
SLOW_FOR_S: Final = 60.0  # after an answer that took too long


class Lane(IntEnum):
    """Kind of place. Lanes that hold no place are served first, in this order."""

    KNOWN = 0
    NEW = 1
    SLOW = 2  # answers that exceeded a first try, and later ones of the same producer


@dataclass(eq=False, slots=True)
class _Waiter:
    account: str  # a newcomer's time counts against its origin: keys are free
    producer: str
    lane: Lane
    place: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class ScoringTurns:
    """Queue of producers for the places of one verifier. Single event loop, no threads.

    Example:
        turns = ScoringTurns(loop.time)
        async with turns.of(producer, turns.lane_of(producer, env)):
            ...  # a scoring process is free
        turns.charge(producer, seconds)
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._used_s = DecayingSums[str](HALF_LIFE_S, MAX_ACCOUNTS)
        self._overran_s = BoundedTable[tuple[str, str], float](MAX_ACCOUNTS)  # by key and environment: newest overrun
        self._holding: list[set[str]] = [set() for _ in Lane]  # accounts
        # By account and, in it, by producer: a flood lengthens the queues, but hardly slows the choice.
        self._waiting: list[dict[str, FairTable[str, _Waiter]]] = [{} for _ in Lane]
        self._num_waiting = 0
        self._num_first = 0  # consecutive turns of established accounts

    def lane_of(self, producer: Producer, env: str) -> Lane:
        """Lane in which a producer's answers are tried first; slow answers in other environments have no effect."""
        keys = [(key, env) for key in _blamed(producer)]
        if any(self._now_s() - self._overran_s.get(key, -SLOW_FOR_S) < SLOW_FOR_S for key in keys):
            return Lane.SLOW
        return Lane.KNOWN if producer.is_known else Lane.NEW

    def of(self, producer: Producer, lane: Lane) -> "_Place":
        """Asynchronous context manager that waits for a place of the lane, then holds it."""
        account = _slow_account_of(producer) if lane is Lane.SLOW else account_of(producer)
        return _Place(self, account, producer.node_id, lane)

    def is_unused(self, producer: Producer) -> bool:
        """True for an unknown producer if neither its key nor its account used any time lately."""
        now_s = self._now_s()
        keys = (account_of(producer), producer.node_id)
        return not producer.is_known and not any(self._used_s.of(key, now_s) for key in keys)

    def is_crowded(self, lane: Lane) -> bool:
        """True if anybody waits for a place of the lane."""
        return bool(self._waiting[lane])

    def charge(self, producer: Producer, seconds: float, *, is_slow: bool = False) -> None:
        """Charges a producer's key and account with the time of a process; if `is_slow`, its slow account, too."""
        keys = {account_of(producer), producer.node_id}
        for key in keys | {_slow_account_of(producer)} if is_slow else keys:
            self._used_s.add(key, seconds, self._now_s())

    def note_overrun(self, producer: Producer, env: str) -> None:
        """Records an overrun of a first try: for SLOW_FOR_S, the producer's answers in `env` go to the slow lane."""
        for key in _blamed(producer):
            self._overran_s[key, env] = self._now_s()

    async def enter(self, account: str, producer: str, lane: Lane) -> None:
        """Waits for a place, which the caller has to give back with `leave`."""
        if not self._num_waiting and self._has_room(lane) and account not in self._holding[lane]:
            self._holding[lane].add(account)
            return
        waiter = _Waiter(account, producer, lane)
        self._waiting[lane].setdefault(account, FairTable()).add(producer, waiter)
        self._num_waiting += 1
        self._grant()
        try:
            await waiter.place
        except asyncio.CancelledError:
            if not self._remove(waiter):  # it had its place already
                self.leave(account, lane)
            raise

    def leave(self, account: str, lane: Lane) -> None:
        """Gives a place back, and grants it to the next waiter."""
        self._holding[lane].discard(account)
        self._grant()

    def _remove(self, waiter: _Waiter) -> bool:
        of_account = self._waiting[waiter.lane].get(waiter.account)
        if of_account is None or not of_account.remove(waiter.producer, waiter):
            return False
        if not of_account:
            del self._waiting[waiter.lane][waiter.account]
        self._num_waiting -= 1
        return True

    def _has_room(self, lane: Lane) -> bool:
        num_known, num_new, num_slow = map(len, self._holding)
        if num_known + num_new + num_slow >= NUM_PLACES:
            return False
        return lane is Lane.KNOWN or (num_new + num_slow < NUM_PLACES - 1 and (lane is Lane.NEW or not num_slow))

    def _grant(self) -> None:
        while self._num_waiting:
            waiter = self._next()
            if waiter is None:
                return
            self._remove(waiter)
            self._holding[waiter.lane].add(waiter.account)
            if waiter.lane is Lane.KNOWN:
                self._num_first = self._num_first + 1 if waiter.account.startswith(ESTABLISHED) else 0
            waiter.place.set_result(None)

    def _next(self) -> _Waiter | None:
        """Next waiter that a place is free for, or None; lanes without a place come first, the known lane last."""
        lanes = [lane for lane in Lane if self._waiting[lane] and self._has_room(lane)]
        for lane in sorted(lanes, key=lambda lane: bool(self._holding[lane]) * (1 + (lane is Lane.KNOWN))):
            waiter = self._next_in(lane)
            if waiter is not None:
                return waiter
        return None

    def _next_in(self, lane: Lane) -> _Waiter | None:
        """Next waiter of a lane, or None: from the account without a place there that used the least time lately.

        Within the account, the producer that used the least time is next; ties go by order of arrival. Established
        accounts come first, but last in every SHARE-th turn.
        """
        now_s, used_s, holding = self._now_s(), self._used_s, self._holding[lane]
        accounts = [account for account in self._waiting[lane] if account not in holding]
        are_last = self._num_first >= SHARE - 1

        def order(account: str) -> tuple[bool, float]:
            return account.startswith(ESTABLISHED) is are_last, used_s.of(account, now_s)

        for account in sorted(accounts, key=order):
            queue = self._waiting[lane][account]
            for producer in sorted(queue.parties, key=lambda producer: used_s.of(producer, now_s)):
                # one that was cancelled just now has not left yet
                waiter = next((each for each in queue.of(producer) if not each.place.done()), None)
                if waiter is not None:
                    return waiter
        return None


def _blamed(producer: Producer) -> set[str]:
    """Keys whose next answers go to the slow lane: the producer's, and its account's while the producer is unknown.

    A neighbour that relayed the answers is never among these keys, since it relays the answers of others, too.
    """
    is_alone = producer.is_known or producer.is_relayed
    return {producer.node_id} if is_alone else {account_of(producer), producer.node_id}


def _slow_account_of(producer: Producer) -> str:
    """Slow account of a producer: its origin, known or not, since one admitted group makes a free key known."""
    return f"slow from {producer.origin or producer.node_id}"


@dataclass(eq=False, slots=True)
class _Place:
    """Asynchronous context manager that waits for a place and holds it."""

    turns: ScoringTurns
    account: str
    producer: str
    lane: Lane

    async def __aenter__(self) -> None:
        await self.turns.enter(self.account, self.producer, self.lane)

    async def __aexit__(self, *_: object) -> None:
        self.turns.leave(self.account, self.lane)
