"""Digest of a virtual run's events: equal seeds give equal digests.

Invariant: equal runs have equal digests, bit for bit; an event is hashed when it happens and then forgotten, so that a
run of millions of events needs no memory for them. What is hashed is its `repr`: fields hold plain values only.
"""

import hashlib
from collections import Counter

from swarm.events import Event, GroupRefused


class EventDigest:
    """Counts and hashes events.

    Example:
        log = EventDigest()
        log.add(1.5, "n0", NodeFinished(step=3))
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.num_events = 0
        self.refusals: Counter[str] = Counter()  # by reason, over all nodes

    def add(self, at_s: float, node: str, event: Event) -> None:
        """One event at a virtual second."""
        self._hash.update(repr((at_s, node, event)).encode())
        self.num_events += 1
        if isinstance(event, GroupRefused):
            self.refusals[event.reason] += 1

    @property
    def digest(self) -> str:
        """SHA-256 of everything so far, hex."""
        return self._hash.hexdigest()
