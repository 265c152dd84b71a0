"""Bounds on the calls between DHT peers that hivemind 1.1.12 makes and answers.

Invariant: a call names one key; no call of another peer ends, stalls or fills this process, or takes a place in the
routing table that belongs to a third peer.
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
"""Reads of shards allowed to one peer: a generator that relays makes 5.3. A full shard is 36 KB for 60 bytes."""

_READS_BURST, _MAX_READERS = 32.0, 4096


class BoundedCalls:
    """Calls of other peers, restricted to requests as our nodes make them.

    hivemind itself answers every key that a request names, each with all its records, and parses a table of records
    before the validator sees it: nested msgpack, of which a kilobyte ends the process.
    """

    def __init__(self, node: DHTNode, clock: Clock) -> None:
        self._protocol: Any = node.protocol
        self._clock = clock
        self._reads = RateLimiter[str](READS_PER_S, _READS_BURST, _MAX_READERS)

    async def rpc_ping(self, request: Any, context: P2PContext) -> Any:
        """Answers a ping as hivemind does. Raises TooLarge for an id that is too long."""
        _check_peer(request)
        return await self._protocol.rpc_ping(request, context)

    async def rpc_find(self, request: Any, context: P2PContext) -> Any:
        """Answers a search for one key as hivemind does.

        Raises:
            TooLarge: the request names several keys or none, or an id that is too long.
            Unavailable: the peer reads more shards than READS_PER_S allows.
        """
        _check_peer(request)
        _check_one(request.keys)
        is_read = request.keys[0] in self._protocol.storage.shard_by_key
        if is_read and not self._reads.spend(str(context.remote_id), self._clock.monotonic_s()):
            raise Unavailable(f"over {READS_PER_S:.0f} reads in a second")
        return await self._protocol.rpc_find(request, context)

    async def rpc_store(self, request: Any, context: P2PContext) -> Any:
        """Stores one record as hivemind does. Raises TooLarge for a table, for several records, or a long id."""
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
    """Bounds hivemind's own handling of calls. The node must not answer calls yet."""
    forget_late_answers(node)
    forget_handled(node)
    keep_places(node)
    split_at_the_middle(node)
    take_no_ids_that_are_none(node)


def forget_late_answers(node: DHTNode) -> None:
    """Keeps a node alive when an answer arrives just after its call was given up.

    hivemind reads all answers in one task, which sets the result of any call that is in its table; a call that timed
    out stays there, cancelled, until p2pd has confirmed. An answer in between would end the task with
    InvalidStateError, and no later call would get its answer.
    """
    control = inside(node).p2p._client.control
    control._pending_calls = OpenCalls(control._pending_calls)  # with what the node asked while it started


class OpenCalls(dict[Any, asyncio.Future[bytes]]):
    """Our calls by id; `in` is False for a call that is done, so that its late answer is ignored."""

    def __contains__(self, call_id: object) -> bool:
        future = self.get(call_id)
        return future is not None and not future.done()


def forget_handled(node: DHTNode) -> None:
    """Forgets calls of other peers once they end; hivemind keeps those that were cancelled before they began."""
    inside(node).p2p._client.control._handler_tasks = HandledCalls()


class HandledCalls(dict[Any, asyncio.Task[None]]):
    """Tasks that handle calls of other peers, by call id; each is removed when it ends."""

    def __setitem__(self, call_id: Any, task: asyncio.Task[None]) -> None:
        super().__setitem__(call_id, task)
        task.add_done_callback(lambda _: self._forget(call_id, task))

    def _forget(self, call_id: Any, task: asyncio.Task[None]) -> None:
        self.pop(call_id, None)
        if not task.cancelled():
            task.exception()  # else asyncio logs a traceback of whatever a caller broke


def keep_places(node: DHTNode) -> None:
    """Keeps each id in the routing table for the first peer that showed it, while that peer answers; one id per peer.

    hivemind believes any id that a peer states: one peer could take the places of all others with one message each, or
    have them dropped by stating an id and then denying it. Peers prove their peer ids, not these ids.
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
    """Moves an id in the middle of a split bucket to the upper half, where hivemind searches for it.

    hivemind itself puts it into the lower half: a peer that stated this id could not be dropped any more, and each
    search raised KeyError once the peer did not answer.
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
    """Counts a peer that answers a ping with an invalid id as not responding; hivemind itself raises in the caller."""
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
    """The node untyped, for private parts of hivemind's P2P: child process, client, socket paths."""
    return cast(Any, node)
