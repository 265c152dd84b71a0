"""Fairness among parties that share places: a table in which who holds most makes room.

Invariant: how much a party asks for delays or displaces nobody who asks for less.
"""

from collections.abc import Hashable, KeysView
from typing import Generic, TypeVar

Party = TypeVar("Party", bound=Hashable)
Entry = TypeVar("Entry", bound=Hashable)


class FairTable(Generic[Party, Entry]):
    """Entries by party, each party's in order of arrival; where all places are taken, the party with most loses one to
    a party that has fewer even with it (longest queue drop).

    The caller knows how many places there are, and which entry of that party goes.

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
        """Parties with entries, whose turn is next first."""
        return self._of.keys()

    def of(self, party: Party) -> KeysView[Entry]:
        """Entries of a party, oldest first."""
        return self._of.get(party, {}).keys()

    def oldest(self, party: Party) -> Entry:
        """The entry that a party has had for longest. Raises KeyError where it has none."""
        return next(iter(self._of[party]))

    def newest(self, party: Party) -> Entry:
        """The entry that came last. Raises KeyError where the party has none."""
        return next(reversed(self._of[party]))

    def add(self, party: Party, entry: Entry) -> None:
        """Adds an entry that is not there."""
        own = self._of.setdefault(party, {})
        assert entry not in own, entry
        own[entry] = None
        self._num_entries += 1

    def remove(self, party: Party, entry: Entry) -> bool:
        """Removes an entry; False where it was not there."""
        own = self._of.get(party)
        if own is None or entry not in own:
            return False
        del own[entry]
        self._num_entries -= 1
        if not own:
            del self._of[party]
        return True

    def pop_oldest(self, party: Party) -> Entry:
        """Removes the oldest entry of a party, whose next turn comes after those of all others."""
        entry = self.oldest(party)
        own = self._of.pop(party)
        del own[entry]
        self._num_entries -= 1
        if own:
            self._of[party] = own
        return entry

    def longest(self, *, beside: Party) -> Party | None:
        """The party with most entries; None where none has at least two more than `beside`."""
        most = self._longest()
        return most if len(self.of(most)) > len(self.of(beside)) + 1 else None

    def oldest_of_longest(self) -> Entry:
        """The oldest entry of the party with most. The table is not empty."""
        return self.oldest(self._longest())

    def _longest(self) -> Party:
        return max(self._of, key=lambda party: len(self._of[party]))
