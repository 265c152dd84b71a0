"""Turns of callers: parties take turns, so that a party with many calls delays itself and not a party with few.

Invariant: waiters are bounded per party and in all. When all places are taken, the party with most waiters loses one to
a party with at least two fewer. An established node never waits for a turn of a stranger, however many there are.
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
# gRPC hands over calls in the order of arrival, one in two or three rounds of the event loop. Calls have to be handed
# over faster than they are answered, or they wait inside gRPC, where no caller goes first.
ROUNDS: Final = 16  # of the event loop between two turns
# Strangers together have at most half of the time, and 500 turns a second: 2,500 that report every 5 s.
REST_S: Final = 0.002


class SubnetTurns:
    """Lets one caller at a time through, the subnets in turn. Single event loop, no threads.

    Example:
        async with turns.of("1.2.3.0/24"):
            ...  # no other caller is in here
    """

    def __init__(
        self, per_subnet: int = WAITING_PER_SUBNET, total: int = WAITING, rounds: int = 0, rest_s: float = 0.0
    ) -> None:
        """Bounds the waiters and sets the pause after each turn.

        Args:
            per_subnet: most callers of one subnet that may wait.
            total: most callers that may wait in all.
            rounds: rounds of the event loop after each turn.
            rest_s: shortest rest after those rounds; a rest lasts at least as long as the turn did. 0 means no rest.
        """
        self._turns = FairTurns[str](1, 0, 1, max_waiting=total, max_waiting_per_party=per_subnet)
        self._rounds = rounds
        self._rest_s = rest_s

    @asynccontextmanager
    async def of(self, subnet: str) -> AsyncGenerator[None]:
        """Waits for a turn of this subnet and holds it.

        Raises:
            Unavailable: too many callers wait, or this one had to make room for another subnet.
        """
        await self._turns.enter(subnet, is_known=True)
        begun_s = time.monotonic()
        try:
            yield
        finally:
            self._rest(subnet, self._rounds, time.monotonic() - begun_s)

    def _rest(self, subnet: str, num_rounds: int, taken_s: float) -> None:
        """Gives the place back after the rounds and the rest, so that other tasks run before the next turn."""
        if num_rounds:
            asyncio.get_running_loop().call_soon(self._rest, subnet, num_rounds - 1, taken_s)
        elif self._rest_s:
            rest_s = max(self._rest_s, taken_s)
            asyncio.get_running_loop().call_later(rest_s, self._turns.leave, subnet, True)
        else:
            self._turns.leave(subnet, is_known=True)


class CallerTurns:
    """Two queues: established nodes, whose parties take turns, and strangers, whose subnets take turns.

    In a private run every node is established, and a key proves nothing: nodes that proved a key take turns by subnet
    in the first queue, all other callers in the second. In any other run, a subnet from which an established node
    called is known, and callers from there without a session wait in the first queue.

    Example:
        async with turns.of_node(node_id, context.peer()):
            ...
    """

    def __init__(self, parties: Parties | None = None) -> None:
        """`parties`: decides which nodes are established; with None every node is."""
        self._parties = parties or Parties()
        self._known = SubnetTurns(rounds=ROUNDS)
        self._strange = SubnetTurns(rounds=ROUNDS, rest_s=REST_S)
        self._known_subnets = BoundedTable[str, None](MAX_KNOWN_SUBNETS)

    def is_stranger(self, node_id: NodeId) -> bool:
        """True if a node is not established, so that it takes turns with strangers."""
        return not self._parties.is_established(node_id)

    def of_node(self, node_id: NodeId, peer: str) -> AbstractAsyncContextManager[None]:
        """Context manager for a turn of a node that proved itself. `peer`: address of its connection, from gRPC."""
        subnet = peer_subnet(peer)
        if self._parties.is_private:
            return self._known.of(subnet)
        if self.is_stranger(node_id):
            return self._strange.of(subnet)
        self.know(subnet)
        return self._known.of(self._parties.party_of(node_id))

    def of_peer(self, peer: str) -> AbstractAsyncContextManager[None]:
        """Context manager for a turn of a caller that has proved nothing yet. `peer`: as in `of_node`."""
        return (self._known if self.is_known(peer) else self._strange).of(peer_subnet(peer))

    def is_known(self, peer: str) -> bool:
        """True if the subnet of a peer is known (`know`); always false in a private run."""
        return peer_subnet(peer) in self._known_subnets

    def know(self, subnet: str) -> None:
        """Remembers that an established node calls from this subnet."""
        self._known_subnets[subnet] = None
