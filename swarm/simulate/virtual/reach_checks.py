"""Invariants of a swarm in which some nodes cannot be dialled: bounds of relays, adverts, and delivery through relays.

Invariant: the network's own record of open lines decides, never the belief of a node or a relay.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import Final

from swarm.errors import Unavailable
from swarm.interfaces import ExchangeHandler, PeerAddress
from swarm.report.invariants import ADVERTISED, REACHED, RELAY_BUDGET, RESUMED, Invariants
from swarm.simulate.virtual.network import MemoryNetwork
from swarm.simulate.virtual.relay import MemoryRelay
from swarm.simulate.virtual.transport import MemoryTransport
from swarm.types import Advert, Cursor, Digest, NodeId, StreamFilter, short

LOST_FOR_S: Final = 0.1  # a node that lost its reservation may advertise it until its next turn
REACHED_WITHIN_S: Final = 120.0  # after all faults; the pauses between two tries of a relay grow to a minute
DIAL_TIMEOUT_S: Final = 5.0
SNAPSHOT_S: Final = 5.0  # for all groups that a node sends at once
QUIET_S: Final = 1.0  # without an item, after which a stream has sent all groups
MAX_PROBED: Final = 20
PROBE: Final[NodeId] = "0" * 64


class ReachChecks:
    """Checks for honest nodes of a network: relays and streams at every change, adverts and delivery when called."""

    def __init__(self, network: MemoryNetwork, invariants: Invariants, honest: frozenset[NodeId]) -> None:
        self._network, self._invariants, self._honest = network, invariants, honest
        self._read: dict[tuple[NodeId, NodeId, str], int] = {}  # reader, author, epoch -> newest position that came
        network.check_relay, network.check_stream = self._check_relay, self._check_stream

    def _check_relay(self, relay: MemoryRelay) -> None:
        """Checks the bounds of a relay that has one more reservation or connection."""
        limits = relay.table.limits
        ends = {"node": limits.connections_per_node, "caller": limits.connections_per_caller}
        per_end = {"node": Counter(line.server for line in relay.lines)}
        per_end["caller"] = Counter(line.client for line in relay.lines)
        num_held = sum(line.is_open for line in relay.held.values())  # a holder that made room for this one is cut next
        held = [
            ("reservations", num_held, limits.reservations),
            ("connections", len(relay.lines), limits.connections),
        ]
        held += [(f"connections of a {end}", max(per_end[end].values(), default=0), most) for end, most in ends.items()]
        over = [f"{value} {what}, at most {most}" for what, value, most in held if value > most]
        self._invariants.reach(RELAY_BUDGET, f"{short(relay.node_id)}: {over[0]}" if over else "")

    def check_advert(self, advert: Advert) -> None:
        """Checks that an honest node advertises a relay only while it holds the reservation, or has just lost it."""
        if advert.node_id not in self._honest:
            return
        now_s, network = self._network.now_s(), self._network
        for endpoint in advert.endpoints:
            lost_s = network.lost_s.get((advert.node_id, endpoint), -1.0)
            is_due = "/" not in endpoint or network.is_held(advert.node_id, endpoint) or now_s - lost_s <= LOST_FOR_S
            self._invariants.reach(ADVERTISED, "" if is_due else f"{short(advert.node_id)} holds no {endpoint[:40]}")

    def _check_stream(self, reader: NodeId, author: NodeId, at: Cursor, is_begun: bool) -> None:
        """Checks that a stream between honest nodes resumes without a gap, and records the position that it reached."""
        if reader not in self._honest or author not in self._honest:
            return
        key = reader, author, at.epoch
        read = self._read.get(key, 0)
        if not is_begun:
            self._read[key] = max(read, at.sequence)
            return
        is_ahead = at.sequence > read
        self._invariants.reach(
            RESUMED, f"{short(reader)} skips {read} to {at.sequence} of {short(author)}" if is_ahead else ""
        )

    async def probe(
        self, handlers: Mapping[NodeId, ExchangeHandler], endpoints_of: Callable[[NodeId], Sequence[str]]
    ) -> None:
        """Checks after all faults that relays of up to MAX_PROBED nodes deliver each group that a direct call does."""
        chosen = sorted(handlers)[:MAX_PROBED]
        await asyncio.gather(*(self._probe(node_id, handlers[node_id], endpoints_of) for node_id in chosen))

    async def _probe(
        self, node_id: NodeId, handler: ExchangeHandler, endpoints_of: Callable[[NodeId], Sequence[str]]
    ) -> None:
        owed, came, reader = await _groups(handler), set[Digest](), _Reader(self._network, node_id)
        with suppress(TimeoutError):
            async with asyncio.timeout(REACHED_WITHIN_S):
                while not reader.has_connected or owed.keys() - came:
                    last = max(owed.values(), default=0)
                    for endpoint in [each for each in endpoints_of(node_id) if "/" in each]:
                        came |= await reader.read(endpoint, last)
                    await asyncio.sleep(QUIET_S)
                    if owed.keys() - came:  # a group that became too old is owed to nobody
                        still = await _groups(handler)
                        owed = {digest: at for digest, at in owed.items() if digest in still}
        missing = owed.keys() - came
        what = f"{short(node_id)}: {len(missing)} of {len(owed)} groups did not come: {reader.failure}"
        self._invariants.reach(REACHED, "" if reader.has_connected and not missing else what)


class _Reader:
    """Reads the stream of one node through its relays; each read goes on at the position that the last one reached."""

    def __init__(self, network: MemoryNetwork, node_id: NodeId) -> None:
        self._transport, self._node_id, self._cursor = MemoryTransport(network, PROBE), node_id, Cursor()
        self.has_connected, self.failure = False, "no reservation is advertised"

    async def read(self, endpoint: str, last: int) -> set[Digest]:
        """Digests that arrive until position `last`, a break or silence; none if the connection fails."""
        found, address = set[Digest](), PeerAddress(node_id=self._node_id, endpoint=endpoint)
        try:
            client = await self._transport.connect(address, DIAL_TIMEOUT_S)
        except Unavailable as error:
            self.failure = str(error)
            return found
        self.has_connected = True
        try:
            async with aclosing(client.subscribe(self._cursor, StreamFilter())) as items:  # type: ignore[type-var]
                while self._cursor.sequence < last:
                    async with asyncio.timeout(DIAL_TIMEOUT_S):
                        item = await anext(items)
                    found.add(item.digest)
                    self._cursor = item.cursor
        except (Unavailable, TimeoutError) as error:
            self.failure = str(error) or "its stream is quiet"
        finally:
            await client.close()
        return found


async def _groups(handler: ExchangeHandler) -> dict[Digest, int]:
    """Digest -> position of the groups that a node sends to a direct caller within SNAPSHOT_S."""
    found: dict[Digest, int] = {}
    async with aclosing(handler.subscribe(PROBE, Cursor(), StreamFilter())) as items:  # type: ignore[type-var]
        with suppress(TimeoutError):
            async with asyncio.timeout(SNAPSHOT_S):  # a node that goes on making groups is never quiet
                while True:
                    async with asyncio.timeout(QUIET_S):
                        item = await anext(items)
                    found[item.digest] = item.cursor.sequence
    return found
