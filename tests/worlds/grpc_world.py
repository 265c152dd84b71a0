"""Nodes over real sockets, and servers that lie. The fixtures of tests/integration close whatever is opened here."""

import hashlib
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
import pytest

from swarm.clock import Clock, SystemClock
from swarm.config import ExchangeConfig
from swarm.exchange.grpc_transport import GrpcTransport
from swarm.identity import DOMAIN_GROUP, Identity
from swarm.interfaces import ExchangeHandler, PeerAddress, PeerClient
from swarm.types import SealedGroup
from swarm.wire.server import Sessions, start_server
from swarm.wire.session import AuthenticatedChannel, open_channel
from swarm.wire.v1 import exchange_service_pb2_grpc as pb_grpc

RUN = "test-run"
Handler = TypeVar("Handler", bound=ExchangeHandler)
ServerClock = TypeVar("ServerClock", bound=Clock)


def sealed_of(identity: Identity, body: bytes) -> SealedGroup:
    """A signed body that no transport looks into."""
    digest = hashlib.sha256(body).digest()
    return SealedGroup(
        digest=digest,
        producer=identity.node_id,
        public_key=identity.public_key,
        signature=identity.sign(DOMAIN_GROUP, b"\1" + digest),
        is_compressed=False,
        body=body,
    )


def transport_of(
    identity: Identity | None = None, run_id: str = RUN, clock: Clock | None = None, **options: Any
) -> GrpcTransport:
    """A transport with a configuration of defaults."""
    return GrpcTransport(identity or Identity.create(), run_id, ExchangeConfig(), clock or SystemClock(), **options)


@dataclass
class ServedNode(Generic[Handler, ServerClock]):
    """A node that serves, and sessions of others at it."""

    identity: Identity
    handler: Handler
    endpoint: str
    clock: ServerClock

    async def open(self, identity: Identity | None = None, run_id: str = RUN) -> AuthenticatedChannel:
        return await open_channel(self.endpoint, self.identity.node_id, identity or Identity.create(), run_id, 5.0)


async def serving(
    identity: Identity, handler: Handler, clock: ServerClock, **options: Any
) -> ServedNode[Handler, ServerClock]:
    """A node that serves with a handler."""
    (endpoint,) = await transport_of(identity, clock=clock, **options).serve(handler)
    return ServedNode(identity, handler, endpoint, clock)


async def client_of(servicer: pb_grpc.ExchangeServiceServicer) -> PeerClient:
    """An honest client of a server that answers as it likes, after an honest handshake."""
    sessions = Sessions(Identity.create(), RUN, SystemClock())
    add: Any = pb_grpc.add_ExchangeServiceServicer_to_server
    _, port = await start_server("127.0.0.1:0", sessions, [lambda server: add(servicer, server)])
    address = PeerAddress(node_id=sessions.identity.node_id, endpoint=f"127.0.0.1:{port}")
    return await transport_of().connect(address, 5.0)


async def status_of(call: Any) -> grpc.StatusCode:
    """The status with which a call fails, a stream without an item."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__await__") or hasattr(call, "send"):
            await call
        else:
            async for _ in call:
                raise AssertionError("an item came through")
    return caught.value.code()
