"""Places and connections of a relay, and who gets one: what decides, without a call or a socket.

Invariant: places and connections are bounded by node, subnet and in all, and who has most of the places makes room for
who has fewer. The relay of a virtual swarm decides by the same.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from swarm.clock import Clock
from swarm.errors import Unavailable
from swarm.fairness import FairTable
from swarm.flow import RateLimiter
from swarm.types import NodeId

DIAL_BACKS_PER_S: Final = 1 / 20  # of one subnet
DIAL_BACKS_BURST: Final = 8.0
MAX_SUBNETS: Final = 4096
WAITING_PER_PLACE: Final = 32  # connections that a node was told of and has not taken


@dataclass(frozen=True, kw_only=True, slots=True)
class RelayLimits:
    """What relaying may cost this node."""

    places: int = 128  # nodes that hold one
    places_per_subnet: int = 32
    connections: int = 512
    connections_per_node: int = 64  # of a node that holds a place
    connections_per_caller: int = 32
    connections_per_subnet: int = 128  # of callers
    bytes_per_s: int = 8 * 2**20  # of all connections together, both directions
    burst_bytes: int = 4 * 2**20
    idle_s: float = 90.0  # a connection without a byte ends; both ends send something every few seconds


class ByteBudget:
    """Bytes that pass in a second: who comes first goes first.

    Example:
        budget = ByteBudget(clock, bytes_per_s=2**20, burst_bytes=2**18)
        await budget.take(len(data))
    """

    def __init__(self, clock: Clock, bytes_per_s: float, burst_bytes: float) -> None:
        self._clock, self._bytes_per_s, self._burst_s = clock, bytes_per_s, burst_bytes / bytes_per_s
        self._due_s = clock.monotonic_s() - self._burst_s  # when all that was taken has passed at this rate
        self.num_bytes = 0

    async def take(self, num_bytes: int) -> None:
        """Waits until there is room for so many bytes."""
        delay_s = self.delay_s(num_bytes)
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    def delay_s(self, num_bytes: int) -> float:
        """Takes so many bytes; returns the seconds until there is room for them."""
        now_s = self._clock.monotonic_s()
        self._due_s = max(self._due_s, now_s - self._burst_s) + num_bytes / self._bytes_per_s
        self.num_bytes += num_bytes
        return max(0.0, self._due_s - now_s)


@dataclass(eq=False, slots=True)
class Place:
    """A place that a node holds."""

    node_id: NodeId
    subnet: str
    end: Callable[[], None]  # called when another node gets it
    tickets: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(WAITING_PER_PLACE))


class PlaceTable:
    """The places and open connections of one relay.

    Args:
        limits: of both.
        standing: of a node; places of those of lower standing make room first.

    Example:
        place = table.add(node_id, subnet, end=lambda: ...)
        with table.connection(node_id, caller, subnet_of_caller):
            ...
        table.remove(place)
    """

    def __init__(self, limits: RelayLimits, standing: Callable[[NodeId], int] = lambda node_id: 0) -> None:
        self.limits, self._standing = limits, standing
        self._places: dict[NodeId, Place] = {}
        self._by_subnet = FairTable[str, Place]()
        self._held = Counter[tuple[str, str]]()  # connections by kind of party and party
        self._dial_backs = RateLimiter[str](DIAL_BACKS_PER_S, DIAL_BACKS_BURST, MAX_SUBNETS)

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_free(self) -> int:
        """Places that nobody holds."""
        return max(0, self.limits.places - len(self))

    @property
    def num_connections(self) -> int:
        """Open ones."""
        return self._held["all", ""]

    def get(self, node_id: NodeId) -> Place | None:
        """The place of a node."""
        return self._places.get(node_id)

    def add(self, node_id: NodeId, subnet: str, end: Callable[[], None]) -> Place:
        """A place for a node, until `remove`; a newer place of the same node ends the older one.

        Raises:
            Unavailable: there is no room for it.
        """
        if node_id in self._places:
            self._end(self._places[node_id])
        elif len(self._by_subnet.of(subnet)) >= self.limits.places_per_subnet:
            raise Unavailable(f"{self.limits.places_per_subnet} nodes of your network hold places here")
        elif len(self) >= self.limits.places:
            self._make_room(node_id, subnet)
        place = self._places[node_id] = Place(node_id, subnet, end)
        self._by_subnet.add(subnet, place)
        return place

    def remove(self, place: Place) -> None:
        """The place is free again; idempotent."""
        if self._by_subnet.remove(place.subnet, place):
            del self._places[place.node_id]

    def _make_room(self, node_id: NodeId, subnet: str) -> None:
        """Ends the newest place of lower standing; else one of the subnet with most of them."""
        standing = self._standing(node_id)
        lower = [place for place in self._places.values() if self._standing(place.node_id) < standing]
        if lower:
            self._end(lower[-1])
            return
        most = self._by_subnet.longest(beside=subnet)
        if most is None:
            raise Unavailable(f"all {self.limits.places} places are taken; try another relay")
        self._end(self._by_subnet.newest(most))

    def _end(self, place: Place) -> None:
        place.end()
        self.remove(place)

    @contextmanager
    def connection(self, node_id: NodeId, caller: NodeId, subnet: str) -> Generator[None]:
        """Counts a connection while it lasts.

        Args:
            node_id: who is connected to.
            caller: who asked for it.
            subnet: of the caller.

        Raises:
            Unavailable: at a bound.
        """
        limits = self.limits
        parties = (
            ("all", "", limits.connections),
            ("node", node_id, limits.connections_per_node),
            ("caller", caller, limits.connections_per_caller),
            ("subnet", subnet, limits.connections_per_subnet),
        )
        for kind, party, most in parties:
            if self._held[kind, party] >= most:
                raise Unavailable(f"{most} relayed connections ({kind}) are open; try another relay")
        keys = [(kind, party) for kind, party, _ in parties]
        self._held.update(keys)
        try:
            yield
        finally:
            self._held.subtract(keys)
            for key in keys:
                if not self._held[key]:
                    del self._held[key]

    def take_dial_back(self, subnet: str, now_s: float) -> None:
        """One dial-back for a caller of a subnet. Raises Unavailable where there were too many."""
        if not self._dial_backs.spend(subnet, now_s):
            raise Unavailable(f"more than {60 * DIAL_BACKS_PER_S:.0f} dial-backs in a minute; ask another node")
