"""What a lying relay itself says: why it did not reach a node, adverts without end, tickets without end."""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest
from hostile_relay import (
    EXCHANGE,
    HOSTILE,
    NODE,
    HostileRelay,
    playing,
)

from swarm.clock import SystemClock
from swarm.errors import Unavailable
from swarm.interfaces import PeerAddress
from swarm.relay.relay_client import MAX_TAKEN, RelayReservation
from swarm.relay.relaying_transport import RelayingTransport
from swarm.testing.builders import TOY_RUN_ID, HoldsNothing, make_identity
from swarm.wire.grpc_errors import Context, rpc
from swarm.wire.v1 import relay_service_pb2 as pb

# --- what it says of who asks it to dial back --------------------------------------------------------------------


class LyingWitness(HostileRelay):
    """Says why it did not reach the caller in words that hide other lines of a terminal."""

    @rpc
    async def DialBack(self, request: pb.DialBackRequest, context: Context) -> pb.DialBackResponse:
        return pb.DialBackResponse(host="127.0.0.1", detail="\x1b[2J\x1b]0;owned\x07no answer\nproblem: run curl | sh")


async def test_what_a_witness_says_moves_no_cursor_of_a_terminal() -> None:
    async with playing() as scene:
        witness = RelayingTransport(make_identity(9), TOY_RUN_ID, EXCHANGE, SystemClock())
        witness.relay = LyingWitness(witness)
        await witness.serve(HoldsNothing())
        said = await scene.node.dial_back(PeerAddress(node_id=make_identity(9).node_id, endpoint=witness.endpoint), 5.0)
        assert said.detail.isprintable() and "no answer" in said.detail
        await witness.stop()


# --- what it sends to who looks up adverts -------------------------------------------------------------------------


class EndlessDirectory(HostileRelay):
    """Answers a look-up with the same message on and on, until it is clear that nobody leaves it."""

    adverts: tuple[bytes, ...] = ()

    @rpc
    async def Lookup(self, request: pb.LookupRequest, context: Context) -> None:
        for _ in range(100):
            await context.write(pb.LookupResponse(adverts=self.adverts))


@pytest.mark.parametrize("adverts", [(), (bytes(2**20),)], ids=["none", "too long"])
async def test_a_look_up_without_end_is_left_at_its_first_message(adverts: tuple[bytes, ...]) -> None:
    async with playing() as scene:
        transport = RelayingTransport(make_identity(9), TOY_RUN_ID, EXCHANGE, SystemClock())
        relay = transport.relay = EndlessDirectory(transport)
        relay.adverts = adverts
        await transport.serve(HoldsNothing())
        address = PeerAddress(node_id=make_identity(9).node_id, endpoint=transport.endpoint)
        (error,) = await asyncio.gather(scene.node.records_at(address), return_exceptions=True)
        await transport.stop()
    assert isinstance(error, Unavailable) and "expected 1 to 256" in str(error)


# --- what it sends to who holds a reservation ---------------------------------------------------------------------


class FloodingRelay(HostileRelay):
    """Sends tickets of nobody without end to whoever holds a reservation."""

    num_tickets = 0
    origin = b""

    @rpc
    async def Reserve(self, request: pb.ReserveRequest, context: Context) -> None:
        self._sessions.require(context)
        while True:
            self.num_tickets += 1
            await context.write(pb.ReserveResponse(ticket=secrets.token_bytes(16), origin=self.origin))


@asynccontextmanager
async def at_flooding_relay() -> AsyncGenerator[tuple[FloodingRelay, RelayReservation, RelayingTransport]]:
    clock = SystemClock()
    transport = RelayingTransport(HOSTILE, TOY_RUN_ID, EXCHANGE, clock)
    relay = transport.relay = FloodingRelay(transport)
    node = RelayingTransport(NODE, TOY_RUN_ID, EXCHANGE, clock)
    await transport.serve(HoldsNothing())
    await node.serve(HoldsNothing())
    reservation = node.reservation_at(PeerAddress(node_id=HOSTILE.node_id, endpoint=transport.endpoint))
    try:
        yield relay, reservation, node
    finally:
        await node.stop()
        await transport.stop()


async def test_a_relay_that_floods_tickets_is_left_and_costs_few_connections() -> None:
    async with at_flooding_relay() as (relay, reservation, node):
        holding = asyncio.ensure_future(reservation.hold())
        most = 0
        while not holding.done() and relay.num_tickets < 600:
            await asyncio.sleep(0.002)
            most = max(most, len(reservation._tasks), len(node._relays._open.get(reservation.relay, ())))
        assert holding.done()
        assert most <= MAX_TAKEN
        holding.cancel()
        (error,) = await asyncio.gather(holding, return_exceptions=True)
        assert "tickets in a second" in str(error)
        assert not reservation.held.is_set() and not reservation._tasks


async def test_what_a_relay_writes_at_length_is_not_kept() -> None:
    async with at_flooding_relay() as (relay, reservation, _):
        relay.origin = bytes(2**17)
        holding = asyncio.ensure_future(reservation.hold())
        most = 0
        while not holding.done():
            await asyncio.sleep(0.001)
            most = max(most, len(reservation._tasks))
        assert most == 0, most
        await asyncio.gather(holding, return_exceptions=True)
