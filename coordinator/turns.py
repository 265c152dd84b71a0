"""Turns of callers: a party with many calls waits for itself, one with few waits for at most one call of each other.

Invariant: waiters are bounded per subnet and in all; where all places are taken, the subnet with most loses one. An
established node never waits for a turn of a stranger, however many there are.
"""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from swarm.fairness import FairTurns
from swarm.flow import BoundedTable
from swarm.peers.parties import Parties
from swarm.types import NodeId
from swarm.wire.connection_limits import MAX_KNOWN_SUBNETS, peer_subnet

WAITING_PER_SUBNET: Final = 128  # the nodes behind one address report together after a pause
WAITING: Final = 1024
# gRPC takes calls in the order in which they come, and one in two or three rounds of the event loop. They have to come
# in faster than they are answered: or they wait there, where nobody goes first.
ROUNDS: Final = 16  # of the event loop between two turns
# Strangers together have at most half of the time, and 500 turns a second: 2,500 that report every 5 s.
REST_S: Final = 0.002


class SubnetTurns:
    """Lets one caller at a time through, the subnets in turn. Single event loop, no threads.

    Example:
        async with turns.of("1.2.3.0/24"):
            ...  # nobody else is in here
    """

    def __init__(
        self, per_subnet: int = WAITING_PER_SUBNET, total: int = WAITING, rounds: int = 0, rest_s: float = 0.0
    ) -> None:
        """Between two turns lie rounds of the event loop, then a rest, which is no shorter than the turn was.

        Args:
            per_subnet: how many callers of one subnet may wait.
            total: how many may wait in all.
            rounds: of the event loop.
            rest_s: the shortest rest; 0: none.
        """
        self._turns = FairTurns[str](1, 0, 1, max_waiting=total, max_waiting_per_party=per_subnet)
        self._rounds = rounds
        self._rest_s = rest_s

    @asynccontextmanager
    async def of(self, subnet: str) -> AsyncGenerator[None]:
        """Waits for a turn of this subnet. Raises Unavailable at the bounds, or when it has to make room."""
        await self._turns.enter(subnet, is_known=True)
        begun_s = time.monotonic()
        try:
            yield
        finally:
            self._rest(subnet, self._rounds, time.monotonic() - begun_s)

    def _rest(self, subnet: str, num_rounds: int, taken_s: float) -> None:
        """Keeps the place for a while, so that others go on before the next turn."""
        if num_rounds:
            asyncio.get_running_loop().call_soon(self._rest, subnet, num_rounds - 1, taken_s)
        elif self._rest_s:
            rest_s = max(self._rest_s, taken_s)
            asyncio.get_running_loop().call_later(rest_s, self._turns.leave, subnet, True)
        else:
            self._turns.leave(subnet, is_known=True)


class CallerTurns:
    """Two queues: established nodes, whose parties take turns, and strangers, whose subnets take turns.

    Where every node is established a key says nothing: all nodes take turns by subnet, and those who have proved
    nothing yet in the other queue. Elsewhere a subnet from which an established node called is known: calls from there
    without a session go with the nodes.

    Example:
        async with turns.of_node(node_id, context.peer()):
            ...
    """

    def __init__(self, parties: Parties | None = None) -> None:
        """`parties`: decides which nodes are established; None: all are."""
        self._parties = parties or Parties()
        self._known = SubnetTurns(rounds=ROUNDS)
        self._strange = SubnetTurns(rounds=ROUNDS, rest_s=REST_S)
        self._known_subnets = BoundedTable[str, None](MAX_KNOWN_SUBNETS)

    def is_stranger(self, node_id: NodeId) -> bool:
        """True for a node that takes turns with strangers."""
        return not self._parties.is_established(node_id)

    def of_node(self, node_id: NodeId, peer: str) -> AbstractAsyncContextManager[None]:
        """A turn of a node that proved itself. `peer`: of its connection, as gRPC writes it."""
        subnet = peer_subnet(peer)
        if self._parties.is_private:
            return self._known.of(subnet)
        if self.is_stranger(node_id):
            return self._strange.of(subnet)
        self.know(subnet)
        return self._known.of(self._parties.party_of(node_id))

    def of_peer(self, peer: str) -> AbstractAsyncContextManager[None]:
        """A turn of a caller that has proved nothing yet."""
        return (self._known if self.is_known(peer) else self._strange).of(peer_subnet(peer))

    def is_known(self, peer: str) -> bool:
        """True where established nodes call from the subnet of a peer; always false in a private run."""
        return peer_subnet(peer) in self._known_subnets

    def know(self, subnet: str) -> None:
        """Takes a subnet for one from which an established node calls."""
        self._known_subnets[subnet] = None
