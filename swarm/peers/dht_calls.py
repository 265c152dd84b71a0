"""Calls between DHT peers as hivemind makes and answers them, within bounds.

Invariant: a call asks for one thing; no call of another peer ends, stalls or fills this process, or takes a place in
the routing table that is another's. All of it is about hivemind 1.1.12.
"""

import asyncio
from typing import Any, cast

from hivemind.dht.node import DHTNode
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2PContext, PeerID

from swarm.clock import Clock
from swarm.errors import TooLarge, Unavailable
from swarm.flow import RateLimiter

READS_PER_S = 8.0
"""Of shards, by one peer: a generator that relays reads 5.3, four each time. A full one is 36 KB for 60 bytes."""

_READS_BURST, _MAX_READERS = 32.0, 4096


class BoundedCalls:
    """Calls of other peers, restricted to requests as our nodes make them.

    hivemind answers as many keys as a request names, all records with each, and reads a table of records before anybody
    checks it: msgpack in msgpack, of which a kilobyte ends the process.
    """

    def __init__(self, node: DHTNode, clock: Clock) -> None:
        self._protocol: Any = node.protocol
        self._clock = clock
        self._reads = RateLimiter[str](READS_PER_S, _READS_BURST, _MAX_READERS)

    async def rpc_ping(self, request: Any, context: P2PContext) -> Any:
        """hivemind's."""
        _check_peer(request)
        return await self._protocol.rpc_ping(request, context)

    async def rpc_find(self, request: Any, context: P2PContext) -> Any:
        """hivemind's, for one key."""
        _check_peer(request)
        _check_one(request.keys)
        is_read = request.keys[0] in self._protocol.storage.shard_by_key
        if is_read and not self._reads.spend(str(context.remote_id), self._clock.monotonic_s()):
            raise Unavailable(f"over {READS_PER_S:.0f} reads in a second")
        return await self._protocol.rpc_find(request, context)

    async def rpc_store(self, request: Any, context: P2PContext) -> Any:
        """hivemind's, for one record."""
        _check_peer(request)
        _check_one(request.keys)
        if self._protocol.IS_DICTIONARY in request.subkeys:
            raise TooLarge("a table of records, expected one record")
        return await self._protocol.rpc_store(request, context)


def _check_peer(request: Any) -> None:
    if len(request.peer.node_id) > DHTID.HASH_NBYTES:
        raise TooLarge(f"an id has {DHTID.HASH_NBYTES} bytes")


def _check_one(keys: Any) -> None:
    if len(keys) != 1:
        raise TooLarge(f"{len(keys)} keys, expected one")


def bound_calls(node: DHTNode) -> None:
    """Puts bounds to what hivemind itself does with calls. The node must not answer any yet."""
    forget_late_answers(node)
    forget_handled(node)
    keep_places(node)
    split_at_the_middle(node)
    take_no_ids_that_are_none(node)


def forget_late_answers(node: DHTNode) -> None:
    """Lets a node live on when an answer comes just after its call was given up.

    hivemind reads all answers in one task, which sets the result of whatever call is in its table; a call that
    timed out stays there, cancelled, until p2pd has confirmed. An answer in between ended the task with
    InvalidStateError, and nothing was ever answered again.
    """
    control = inside(node).p2p._client.control
    control._pending_calls = OpenCalls(control._pending_calls)  # with what the node asked while it started


class OpenCalls(dict[Any, asyncio.Future[bytes]]):
    """Calls by their ids; those that are done are in it for who made them, and not for answers."""

    def __contains__(self, call_id: object) -> bool:
        future = self.get(call_id)
        return future is not None and not future.done()


def forget_handled(node: DHTNode) -> None:
    """Forgets calls of others that they gave up; hivemind keeps them for good where they had not begun."""
    inside(node).p2p._client.control._handler_tasks = HandledCalls()


class HandledCalls(dict[Any, asyncio.Task[None]]):
    """Calls of others by their ids, for as long as they are under way."""

    def __setitem__(self, call_id: Any, task: asyncio.Task[None]) -> None:
        super().__setitem__(call_id, task)
        task.add_done_callback(lambda _: self._forget(call_id, task))

    def _forget(self, call_id: Any, task: asyncio.Task[None]) -> None:
        self.pop(call_id, None)
        if not task.cancelled():
            task.exception()  # else asyncio logs a traceback of whatever a caller broke


def keep_places(node: DHTNode) -> None:
    """Leaves each id in the routing table to the peer that showed it first, for as long as that answers, and each peer
    one id.

    hivemind believes whoever says an id: one peer took the places of all others with a message each, or had them
    dropped by saying an id that it then denied. Peers prove their peer ids, not these.
    """
    protocol: Any = node.protocol
    table: Any = protocol.routing_table
    update = protocol.update_routing_table

    async def update_own(node_id: Any, peer_id: PeerID, responded: bool = True) -> None:
        if node_id is not None and table.get(node_id=node_id) not in (None, peer_id):
            return
        before = table.get(peer_id=peer_id)
        if responded and node_id is not None and before not in (None, node_id) and before in table:
            del table[before]
        await update(node_id, peer_id, responded)

    protocol.update_routing_table = update_own


def split_at_the_middle(node: DHTNode) -> None:
    """Has an id in the middle of a bucket in the upper half, where it is looked for.

    hivemind puts it into the lower one: whoever said such an id could not be dropped any more, and each search raised
    KeyError once it did not answer.
    """
    table: Any = node.protocol.routing_table
    split = table.split_bucket

    def split_bucket(index: int) -> None:
        split(index)
        lower, upper = table.buckets[index : index + 2]
        middle = DHTID(upper.lower)
        for peers in (lower.nodes_to_peer_id, lower.replacement_nodes):
            if middle in peers:
                upper.add_or_update_node(middle, peers.pop(middle))

    table.split_bucket = split_bucket


def take_no_ids_that_are_none(node: DHTNode) -> None:
    """A peer that answers a ping with more bytes than an id has did not answer; hivemind raised, to whoever asked."""
    protocol: Any = node.protocol
    call_ping = protocol.call_ping

    async def ping(peer: PeerID, validate: bool = False, strict: bool = True) -> Any:
        try:
            return await call_ping(peer, validate, strict)
        except (AssertionError, ValueError):  # Python writes no number of over 4,300 digits into the message
            await protocol.update_routing_table(None, peer, responded=False)
            return None

    protocol.call_ping = ping


def inside(node: DHTNode) -> Any:
    """hivemind's node untyped, for parts of its P2P that have no public way to them: child, client, socket paths."""
    return cast(Any, node)
