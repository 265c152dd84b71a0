"""A relay under attack over real sockets, and callers of it who do as they like. Each subnet is an address of 127/8."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any, cast

import grpc
from waits import hold

from swarm.clock import SystemClock
from swarm.config import ExchangeConfig
from swarm.errors import Unavailable
from swarm.identity import Identity
from swarm.interfaces import PeerAddress
from swarm.relay.relaying_transport import RelayingTransport
from swarm.relay.reservation_table import RelayLimits
from swarm.testing.builders import HoldsNothing, make_identity
from swarm.wire.server import ServerLimits
from swarm.wire.session import AuthenticatedChannel, open_channel
from swarm.wire.v1 import relay_service_pb2 as pb
from swarm.wire.v1.relay_service_pb2_grpc import RelayServiceStub
from tests.attacks.call_flood import forwarding
from tests.attacks.connection_flood import loopback_addresses

RUN = "relay-floods"
RELAY, NODE = make_identity(1), make_identity(2)
HERE = "127.0.0.1"
ADDRESSES = loopback_addresses(64)
CODES = grpc.StatusCode
EOF: Any = cast(Any, grpc.aio).EOF


class Caller:
    """Somebody with a session at the relay, who calls as it likes."""

    def __init__(self, channel: AuthenticatedChannel, metadata: Any, identity: Identity) -> None:
        self.channel, self.metadata, self.identity = channel, metadata, identity
        self.stub: Any = RelayServiceStub(channel.channel)
        self.tickets = asyncio.Queue[bytes]()

    async def connect(self, node: Identity = NODE, first: Any = None) -> Any:
        """A connection that was asked for."""
        call = self.stub.Connect(metadata=self.metadata)
        await call.write(first or pb.ConnectRequest(node_id=node.node_id))
        return call

    async def accept(self, ticket: bytes) -> Any:
        call = self.stub.Accept(metadata=self.metadata)
        await call.write(pb.AcceptRequest(ticket=ticket))
        return call

    async def reserve(self) -> Any:
        """A reservation, whose tickets are put aside; None where there is none."""
        call = self.stub.Reserve(pb.ReserveRequest(), metadata=self.metadata)
        try:
            if (await call.read()) is EOF:
                return None
        except grpc.aio.AioRpcError as error:
            assert error.code() is CODES.UNAVAILABLE
            return None

        async def read() -> None:
            with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
                while (response := await call.read()) is not EOF:
                    self.tickets.put_nowait(response.ticket)

        call.reading = asyncio.ensure_future(read())
        return call


class Relay:
    """A relay under attack."""

    def __init__(self, transport: RelayingTransport, stack: AsyncExitStack) -> None:
        self.transport, self.servicer, self._stack = transport, transport.relay, stack
        self.address = PeerAddress(node_id=RELAY.node_id, endpoint=transport.endpoint)

    async def caller(self, source: str = HERE, identity: Identity | None = None) -> Caller:
        """One with a fresh key, from an address."""
        identity = identity or Identity.create()
        endpoint = await self._stack.enter_async_context(forwarding(source, self.address.endpoint))
        channel = await open_channel(endpoint, RELAY.node_id, identity, RUN, 5.0)
        self._stack.push_async_callback(channel.close)
        return Caller(channel, await channel.metadata(5.0), identity)

    async def node(self, limits: ServerLimits | None = None) -> RelayingTransport:
        """A node that holds a reservation here."""
        transport = RelayingTransport(NODE, RUN, ExchangeConfig(), SystemClock(), limits)
        self._stack.push_async_callback(transport.stop)
        await transport.serve(HoldsNothing())
        reservation = transport.reservation_at(self.address)
        holding = await hold(reservation)

        async def end() -> None:
            holding.cancel()
            await asyncio.gather(holding, return_exceptions=True)

        self._stack.push_async_callback(end)
        return transport

    async def reaches(self, source: str, timeout_s: float = 5.0) -> str:
        """Why nobody from there reaches the node with a session of its own; empty where somebody does."""
        endpoint = await self._stack.enter_async_context(forwarding(source, self.address.endpoint))
        transport = RelayingTransport(Identity.create(), RUN, ExchangeConfig(), SystemClock())
        try:
            through = PeerAddress(node_id=NODE.node_id, endpoint=f"{endpoint}/{RELAY.node_id}")
            client = await transport.connect(through, timeout_s)
            await client.close()
        except Unavailable as error:
            return str(error)
        finally:
            await transport.stop()
        return ""

    async def asked_for(self) -> tuple[Caller, Caller, Any, bytes]:
        """A node with a reservation, a caller that asks for it, the call, and the ticket that the node got."""
        node, caller = await self.caller(), await self.caller()
        await node.reserve()
        asking = await caller.connect(node.identity)
        return node, caller, asking, await node.tickets.get()

    @property
    def port(self) -> int:
        """The port of tickets, where the relay says that it is."""
        return self.servicer._port.number

    @port.setter
    def port(self, number: int) -> None:
        self.servicer._port.number = number

    @property
    def num_connections(self) -> int:
        return int(self.servicer.status()["connections"])  # type: ignore[arg-type]


@asynccontextmanager
async def relaying(**limits: Any) -> AsyncGenerator[Relay]:
    async with AsyncExitStack() as stack:
        bounds = RelayLimits(**limits)
        transport = RelayingTransport(RELAY, RUN, ExchangeConfig(), SystemClock(), relay_limits=bounds)
        stack.push_async_callback(transport.stop)
        await transport.serve(HoldsNothing())
        yield Relay(transport, stack)


async def code_of(call: Any) -> grpc.StatusCode:
    return await call.code()
