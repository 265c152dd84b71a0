"""Fair sharing of places by parties: a table in which the party with most entries makes room, and turns in rotation.

Invariant: the demand of one party neither delays nor displaces a party that asks for less.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Hashable, KeysView
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarm.errors import Unavailable

Party = TypeVar("Party", bound=Hashable)
Entry = TypeVar("Entry", bound=Hashable)


class FairTable(Generic[Party, Entry]):
    """Entries by party, in order of arrival, for longest queue drop.

    If all places are taken, the party with most entries loses one to a party that has at least two entries fewer.

    The caller enforces the number of places and chooses the entry to drop.

    Example:
        if len(calls) >= MAX_CALLS:
            most = calls.longest(beside=subnet)
            if most is None:
                raise Unavailable("try again later")
            calls.remove(most, calls.newest(most))
        calls.add(subnet, call)
    """

    def __init__(self) -> None:
        self._of: dict[Party, dict[Entry, None]] = {}
        self._num_entries = 0

    def __len__(self) -> int:
        return self._num_entries

    @property
    def parties(self) -> KeysView[Party]:
        """Parties with entries, in order of their turns."""
        return self._of.keys()

    def of(self, party: Party) -> KeysView[Entry]:
        """Entries of a party, oldest first."""
        return self._of.get(party, {}).keys()

    def oldest(self, party: Party) -> Entry:
        """The oldest entry of a party. Raises KeyError if the party has none."""
        return next(iter(self._of[party]))

    def newest(self, party: Party) -> Entry:
        """The newest entry of a party. Raises KeyError if the party has none."""
        return next(reversed(self._of[party]))

    def add(self, party: Party, entry: Entry) -> None:
        """Adds an entry of a party, which must not have it yet."""
        own = self._of.setdefault(party, {})
        assert entry not in own, entry
        own[entry] = None
        self._num_entries += 1

    def remove(self, party: Party, entry: Entry) -> bool:
        """Removes an entry of a party; returns False if the party does not have it."""
        own = self._of.get(party)
        if own is None or entry not in own:
            return False
        del own[entry]
        self._num_entries -= 1
        if not own:
            del self._of[party]
        return True

    def pop_oldest(self, party: Party) -> Entry:
        """Removes and returns a party's oldest entry, and puts the party last in turn. Raises KeyError if none."""
        entry = self.oldest(party)
        own = self._of.pop(party)
        del own[entry]
        self._num_entries -= 1
        if own:
            self._of[party] = own
        return entry

    def longest(self, *, beside: Party) -> Party | None:
        """The party with most entries; None if it has fewer than two more than `beside`. Not for an empty table."""
        most = self._longest()
        return most if len(self.of(most)) > len(self.of(beside)) + 1 else None

    def oldest_of_longest(self) -> Entry:
        """The oldest entry of the party with most entries. Not for an empty table."""
        return self.oldest(self._longest())

    def _longest(self) -> Party:
        return max(self._of, key=lambda party: len(self._of[party]))


class FairTurns(Generic[Party]):
    """Places that parties take in turns, some of them reserved for known parties.

    Invariant: unknown parties together never hold the last `num_reserved` places. Among the waiting parties of a class,
    known or unknown, turns rotate, however much each party asks for. If waiting is bounded, a full queue drops the
    newest call of the party with most calls, or refuses the arriving call.

    Example:
        turns = FairTurns[NodeId](num_places=8, num_reserved=4, max_per_party=4)
        async with turns.turn(sender, is_known=reputation.score(sender) > 0): ...
    """

    def __init__(
        self,
        num_places: int,
        num_reserved: int,
        max_per_party: int,
        *,
        max_waiting: float = math.inf,
        max_waiting_per_party: float = math.inf,
    ) -> None:
        """Limits a party to `max_per_party` places at a time; the two bounds of waiting calls apply to each class."""
        assert 0 <= num_reserved < num_places and max_per_party > 0
        self._max_waiting, self._max_waiting_per_party = max_waiting, max_waiting_per_party
        self._most = {True: num_places, False: num_places - num_reserved}  # by is_known
        self._num_reserved = num_reserved
        self._max_per_party = max_per_party
        self._num_held = {True: 0, False: 0}  # by is_known
        self._held_by = Counter[Party]()
        self._waiting = {is_known: FairTable[Party, asyncio.Future[None]]() for is_known in (True, False)}

    def turn(self, party: Party, *, is_known: bool) -> "Turn[Party]":
        """Context manager that waits for a place on entry and holds it until exit. Entry raises as `enter`."""
        return Turn(self, party, is_known)

    async def enter(self, party: Party, is_known: bool) -> None:
        """Waits for a place and takes it; the caller gives it back with `leave`.

        Raises:
            Unavailable: `max_waiting_per_party` calls of the party wait; or `max_waiting` calls of its class do, and
                this call does not displace another one; or another party's call displaced this one.
        """
        has_room = is_known or self._num_held[False] < self._most[False]
        has_room = has_room and self._held_by.get(party, 0) < self._max_per_party
        if has_room and sum(self._num_held.values()) < self._most[True] and not any(self._waiting.values()):
            self._hold(party, is_known)  # nobody waits, and most come alone
            return
        self._require_room(party, self._waiting[is_known])
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[is_known].add(party, place)
        self._grant()
        try:
            await place
        except asyncio.CancelledError:
            if place.cancelled():
                self._waiting[is_known].remove(party, place)
            elif place.exception() is None:  # it was given, and nobody takes it
                self.leave(party, is_known)
            raise

    def leave(self, party: Party, is_known: bool) -> None:
        """Gives a place back and grants it to the next waiting party, if any."""
        self._num_held[is_known] -= 1
        self._held_by[party] -= 1
        if not self._held_by[party]:
            del self._held_by[party]
        self._grant()

    def _require_room(self, party: Party, waiting: "FairTable[Party, asyncio.Future[None]]") -> None:
        num_own = len(waiting.of(party))
        if num_own >= self._max_waiting_per_party:
            raise Unavailable(f"{num_own} calls of {party} wait already; try again later")
        if len(waiting) < self._max_waiting:
            return
        most = waiting.longest(beside=party)
        if most is None:
            raise Unavailable(f"{len(waiting)} calls wait already; try again later")
        place = waiting.newest(most)
        waiting.remove(most, place)
        if not place.done():  # else its task was cancelled but has not run yet
            place.set_exception(Unavailable("others have fewer calls waiting; try again later"))

    def _hold(self, party: Party, is_known: bool) -> None:
        self._num_held[is_known] += 1
        self._held_by[party] = self._held_by.get(party, 0) + 1

    def _grant(self) -> None:
        if not (self._waiting[True] or self._waiting[False]):
            return
        while sum(self._num_held.values()) < self._most[True]:
            known, unknown = self._first(is_known=True), self._first(is_known=False)
            if self._num_held[False] >= self._most[False]:
                unknown = None
            # Each class is guaranteed its share, and may use what the other class leaves.
            is_known = known is not None and (unknown is None or self._num_held[True] < max(1, self._num_reserved))
            party = known if is_known else unknown
            if party is None:
                return
            place = self._waiting[is_known].pop_oldest(party)
            if place.done():
                continue
            self._hold(party, is_known)
            place.set_result(None)

    def _first(self, *, is_known: bool) -> Party | None:
        parties = self._waiting[is_known].parties
        return next((party for party in parties if self._held_by[party] < self._max_per_party), None)


@dataclass(eq=False, slots=True)
class Turn(Generic[Party]):
    """Context manager that holds a place; a class, since a generator-based one would take three times as long."""

    turns: FairTurns[Party]
    party: Party
    is_known: bool
    is_held: bool = False

    async def __aenter__(self) -> "Turn[Party]":
        await self.turns.enter(self.party, self.is_known)
        self.is_held = True
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Gives the place back, before the `async with` ends or at its end; later calls do nothing."""
        if self.is_held:
            self.is_held = False
            self.turns.leave(self.party, self.is_known)
