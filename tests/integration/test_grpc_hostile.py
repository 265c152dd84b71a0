"""Hostile clients and servers on real connections: each is refused, and the honest ones go on."""

import asyncio
import secrets
import ssl
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from waits import PROMPT_S, until

from swarm.clock import ManualClock, SystemClock
from swarm.errors import NotHeld, TooLarge, Unauthenticated, Unavailable
from swarm.exchange.exchange_servicer import STREAMS_PER_PEER
from swarm.exchange.grpc_transport import PeerHooks
from swarm.identity import DOMAIN_HELLO, Identity
from swarm.interfaces import StreamItem
from swarm.testing.builders import HoldsNothing
from swarm.types import Cursor, Digest, NodeId, SealedGroup, StreamFilter
from swarm.wire import session
from swarm.wire.envelopes import sealed_to_bytes
from swarm.wire.server import ServerLimits, Sessions, start_server
from swarm.wire.session import PROTOCOL_VERSION, SESSION_KEY, AuthenticatedChannel, hello_message, open_channel
from swarm.wire.v1 import exchange_service_pb2 as pb
from swarm.wire.v1 import exchange_service_pb2_grpc as pb_grpc
from swarm.wire.v1 import session_service_pb2 as session_pb
from swarm.wire.v1 import session_service_pb2_grpc as session_grpc
from tests.worlds.grpc_world import RUN, ServedNode, client_of, sealed_of, serving, status_of


class Endless(HoldsNothing):
    """A handler that streams one group for ever."""

    def __init__(self, sealed: SealedGroup) -> None:
        self.sealed = sealed
        self.num_open = 0
        self.num_sent = 0

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        self.num_open += 1
        try:
            while True:
                self.num_sent += 1
                yield StreamItem(
                    cursor=Cursor(epoch="e", sequence=self.num_sent),
                    digest=self.sealed.digest,
                    size_bytes=self.sealed.size_bytes,
                    sealed=self.sealed,
                )
        finally:
            self.num_open -= 1

    async def fetch(self, peer: NodeId, digest: Digest) -> SealedGroup:
        if digest != self.sealed.digest:
            raise NotHeld(f"digest {digest.hex()[:8]}")
        return self.sealed


Node = ServedNode[Endless, ManualClock]


@pytest.fixture
async def node() -> Node:
    identity = Identity.create()
    limits = ServerLimits(handshake_timeout_s=0.5, idle_timeout_s=0.5)
    handler = Endless(sealed_of(identity, bytes(100_000)))
    return await serving(identity, handler, ManualClock(), limits=limits, stall_timeout_s=1.0)


async def read_one(channel: AuthenticatedChannel, metadata: Any) -> pb.SubscribeResponse:
    stub: Any = pb_grpc.ExchangeServiceStub(channel.channel)
    call = stub.Subscribe(pb.SubscribeRequest(), metadata=metadata)
    try:
        async for response in call:
            return response
    finally:
        call.cancel()
    raise AssertionError("the stream was empty")


# --- clients -----------------------------------------------------------------------------------


async def test_client_without_a_session_is_refused(node: Node):
    channel = await node.open()
    for metadata in (None, ((SESSION_KEY, b""),), ((SESSION_KEY, secrets.token_bytes(32)),)):
        assert await status_of(read_one(channel, metadata)) is grpc.StatusCode.UNAUTHENTICATED
    assert node.handler.num_sent == 0


async def test_stolen_session_token_is_refused_on_another_connection(node: Node):
    victim, thief = await node.open(), await node.open()
    stolen = await victim.metadata(5.0)
    assert await status_of(read_one(thief, stolen)) is grpc.StatusCode.UNAUTHENTICATED
    assert (await read_one(victim, stolen)).cursor.epoch == "e"


async def test_a_peer_that_is_not_allowed_is_refused_at_hello_and_in_its_session_until_it_is_again():
    identity, liar, honest = Identity.create(), Identity.create(), Identity.create()
    refused: set[NodeId] = set()

    def require_allowed(peer: NodeId) -> None:
        if peer in refused:
            raise Unavailable("its reputation is low")

    hooks = PeerHooks(require_allowed=require_allowed)
    node = await serving(identity, Endless(sealed_of(identity, bytes(100))), SystemClock(), hooks=hooks)
    channel, other = await node.open(liar), await node.open(honest)
    metadata = await channel.metadata(5.0)
    await read_one(channel, metadata)
    refused.add(liar.node_id)
    assert await status_of(read_one(channel, metadata)) is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(Unavailable, match="reputation") as caught:
        await node.open(liar)
    assert not isinstance(caught.value, Unauthenticated)
    await read_one(other, await other.metadata(5.0))
    refused.clear()
    await read_one(channel, metadata)
    await node.open(liar)


async def test_session_expires_and_the_client_renews_it(node: Node):
    channel = await node.open()
    old = await channel.metadata(5.0)
    await read_one(channel, old)
    node.clock.advance(901.0)
    assert await status_of(read_one(channel, old)) is grpc.StatusCode.UNAUTHENTICATED


async def test_clients_session_is_renewed_before_it_expires(node: Node):
    clock = ManualClock()
    channel = await open_channel(node.endpoint, node.identity.node_id, Identity.create(), RUN, 5.0, clock)
    first = await channel.metadata(5.0)
    clock.advance(700.0)
    assert await channel.metadata(5.0) == first
    clock.advance(30.0)
    renewed = await channel.metadata(5.0)
    assert renewed != first
    await read_one(channel, renewed)


async def test_replayed_hello_is_refused(node: Node):
    channel = await node.open()
    stub: Any = session_grpc.SessionServiceStub(channel.channel)
    challenge = await stub.Challenge(session_pb.ChallengeRequest(client_nonce=bytes(32)))
    identity = Identity.create()
    message = hello_message(
        challenge.server_nonce, channel.certificate_digest, identity.node_id, node.identity.node_id, RUN
    )
    signature = identity.sign(DOMAIN_HELLO, message)
    hello = session_pb.HelloRequest(
        public_key=identity.public_key, signature=signature, run_id=RUN, protocol_version=PROTOCOL_VERSION
    )
    assert len((await stub.Hello(hello)).session_token) == 32
    assert await status_of(stub.Hello(hello)) is grpc.StatusCode.UNAUTHENTICATED
    await stub.Challenge(session_pb.ChallengeRequest(client_nonce=bytes(32)))
    assert await status_of(stub.Hello(hello)) is grpc.StatusCode.UNAUTHENTICATED


async def test_hello_with_the_key_of_another_is_refused(node: Node):
    class Impostor(Identity):
        @property
        def public_key(self) -> bytes:
            return victim.public_key

    victim, thief = Identity.create(), Identity.create()
    with pytest.raises(Unauthenticated):
        await node.open(Impostor(thief._key))


async def test_client_of_another_run_is_refused(node: Node):
    with pytest.raises(Unauthenticated, match="this is run test-run"):
        await node.open(run_id="other-run")


REMEDY = "install the same release of swarm-trainer on both"


@pytest.mark.parametrize("version", [0, PROTOCOL_VERSION + 1])
async def test_hello_of_another_protocol_version_is_answered_with_both_versions_and_the_remedy(
    node: Node, version: int
):
    channel = await node.open()
    stub: Any = session_grpc.SessionServiceStub(channel.channel)
    await stub.Challenge(session_pb.ChallengeRequest(client_nonce=bytes(32)))
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await stub.Hello(session_pb.HelloRequest(run_id=RUN, protocol_version=version))
    assert failed.value.details() == (
        f"the client speaks protocol version {version or 1}, this node {PROTOCOL_VERSION}: {REMEDY}"
    )


async def test_client_ends_at_a_server_of_another_protocol_version(node: Node, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(session, "PROTOCOL_VERSION", PROTOCOL_VERSION + 1)  # what this client speaks
    name, ours = node.identity.node_id[:8], PROTOCOL_VERSION + 1
    with pytest.raises(Unauthenticated) as failed:
        await node.open()
    sentence = f"node {name} speaks protocol version {PROTOCOL_VERSION}, this node {ours}: {REMEDY}"
    assert str(failed.value) == f"{node.endpoint}: {sentence}"


@pytest.mark.parametrize("nonce", [b"", bytes(31), bytes(33)])
async def test_challenge_with_a_bad_nonce_is_refused(node: Node, nonce: bytes):
    channel = await node.open()
    stub: Any = session_grpc.SessionServiceStub(channel.channel)
    request = session_pb.ChallengeRequest(client_nonce=nonce)
    assert await status_of(stub.Challenge(request)) is grpc.StatusCode.UNAUTHENTICATED


async def test_message_of_100_mb_is_refused_before_it_is_parsed(node: Node):
    unlimited = [("grpc.max_send_message_length", -1), ("grpc.ssl_target_name_override", "swarm-node")]
    pem = await asyncio.to_thread(_server_certificate, node.endpoint)
    raw = grpc.aio.secure_channel(node.endpoint, grpc.ssl_channel_credentials(pem), options=unlimited)
    send = raw.unary_unary("/swarm.wire.v1.SessionService/Hello")
    assert await status_of(send(bytes(100_000_000))) is grpc.StatusCode.RESOURCE_EXHAUSTED
    channel = await node.open()
    assert (await read_one(channel, await channel.metadata(5.0))).cursor.epoch == "e"


def _server_certificate(endpoint: str) -> bytes:
    host, _, port = endpoint.rpartition(":")
    return ssl.get_server_certificate((host, int(port))).encode()


async def test_client_that_sends_nothing_is_cut(node: Node):
    host, _, port = node.endpoint.rpartition(":")
    silent_tcp, tcp_writer = await asyncio.open_connection(host, int(port))
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    silent_tls, tls_writer = await asyncio.open_connection(host, int(port), ssl=context)
    assert await silent_tcp.read() == b""
    await silent_tls.read()
    for writer in (tcp_writer, tls_writer):
        writer.close()
        with suppress(OSError):  # the cut itself, reported once more
            await writer.wait_closed()


async def test_subscriber_that_does_not_read_is_cut_and_costs_bounded_streams(node: Node):
    owner = Identity.create()
    channel = await node.open(owner)
    stub: Any = pb_grpc.ExchangeServiceStub(channel.channel)
    metadata = await channel.metadata(5.0)
    calls = [stub.Subscribe(pb.SubscribeRequest(), metadata=metadata) for _ in range(STREAMS_PER_PEER)]
    await until(lambda: node.handler.num_open == STREAMS_PER_PEER)
    anew = await node.open(owner)
    assert (await read_one(anew, await anew.metadata(5.0))).cursor.epoch == "e", "the oldest made room"
    await until(lambda: node.handler.num_open == 0, most_s=PROMPT_S)
    assert node.handler.num_sent < 2000  # of 100 KB: what the buffers of both ends hold
    honest = await node.open()
    assert (await read_one(honest, await honest.metadata(5.0))).cursor.epoch == "e"
    for call in calls:
        call.cancel()


async def test_handshakes_are_bounded_per_address():
    clock = ManualClock()
    sessions = Sessions(Identity.create(), RUN, clock, ServerLimits(handshakes_per_minute=4))
    _, port = await start_server("127.0.0.1:0", sessions, [])
    node_id = sessions.identity.node_id
    endpoint = f"127.0.0.1:{port}"
    for _ in range(2):
        await (await open_channel(endpoint, node_id, Identity.create(), RUN, 5.0)).close()
    with pytest.raises(Unavailable, match="handshake calls"):
        await open_channel(endpoint, node_id, Identity.create(), RUN, 5.0)
    clock.advance(30.0)
    await (await open_channel(endpoint, node_id, Identity.create(), RUN, 5.0)).close()


# --- servers -----------------------------------------------------------------------------------


async def test_server_in_the_middle_is_unauthenticated(node: Node):
    """It relays Challenge to the true node, whose signature covers another certificate."""
    channel = await node.open()
    stub: Any = session_grpc.SessionServiceStub(channel.channel)

    class Relay(Sessions):
        async def Challenge(self, request: session_pb.ChallengeRequest, context: Any) -> Any:
            return await stub.Challenge(request)

    relay = Relay(Identity.create(), RUN, SystemClock())
    _, port = await start_server("127.0.0.1:0", relay, [])
    with pytest.raises(Unauthenticated, match="did not sign the certificate"):
        await open_channel(f"127.0.0.1:{port}", node.identity.node_id, Identity.create(), RUN, 5.0)


async def test_server_that_never_answers_costs_the_timeout():
    is_closed = asyncio.Event()

    async def never_answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # the client breaks the connection off
            await reader.read()
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()
        is_closed.set()

    server = await asyncio.start_server(never_answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(Unavailable, match=r"within 0\.3 s"):
        await open_channel(f"127.0.0.1:{port}", "ab" * 32, Identity.create(), RUN, 0.3)
    server.close()
    await is_closed.wait()


@pytest.mark.parametrize(
    "endpoint", ["", "x", "127.0.0.1:0", "127.0.0.1:70000", "unix:/tmp/x:1", "a b:1", "dns:///a:1"]
)
async def test_endpoint_that_is_no_host_and_port_is_unavailable(endpoint: str):
    with pytest.raises(Unavailable):
        await open_channel(endpoint, "ab" * 32, Identity.create(), RUN, 1.0)


class LyingServer(pb_grpc.ExchangeServiceServicer):
    """Answers with whatever the test says."""

    def __init__(self, *responses: Any) -> None:
        self.responses = responses

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> None:
        for response in self.responses:
            await context.write(response)

    Subscribe = Fetch


CHUNK = pb.FetchResponse(total_bytes=100, offset=0, data=bytes(50))
OTHER = sealed_to_bytes(sealed_of(Identity.from_seed(bytes(32)), b"other content"))


@pytest.mark.parametrize(
    ("responses", "error"),
    [
        ([pb.FetchResponse(total_bytes=2**40, offset=0, data=b"x")], TooLarge),
        ([pb.FetchResponse(total_bytes=10, offset=0, data=bytes(11))], Unavailable),
        ([CHUNK, pb.FetchResponse(total_bytes=200, offset=50, data=bytes(50))], Unavailable),
        ([CHUNK, CHUNK], Unavailable),
        ([pb.FetchResponse(total_bytes=100, offset=7, data=bytes(50))], Unavailable),
        ([pb.FetchResponse(total_bytes=100, offset=0, data=b"")], Unavailable),
        ([pb.FetchResponse(total_bytes=100, offset=0, data=bytes(100))], Unavailable),
        ([pb.FetchResponse(total_bytes=len(OTHER), offset=0, data=OTHER)], Unavailable),
        ([pb.FetchResponse(total_bytes=3 * 2**20, offset=0, data=bytes(2 * 2**20))], Unavailable),
        ([], Unavailable),
    ],
    ids=["huge", "overlong", "growing", "repeated", "gap", "empty", "zeros", "other", "fat chunk", "nothing"],
)
async def test_lying_fetch_is_refused(responses: list[Any], error: type[Exception]):
    peer = await client_of(LyingServer(*responses))
    with pytest.raises(error):
        await peer.fetch(bytes(32), 4 * 2**20, 5.0)


@pytest.mark.parametrize(
    "response",
    [
        pb.SubscribeResponse(digest=b"short"),
        pb.SubscribeResponse(digest=bytes(32), cursor={"epoch": "e" * 1000}),  # type: ignore[arg-type]
        pb.SubscribeResponse(digest=bytes(32), group={"public_key": b"x", "codec": 1}),  # type: ignore[arg-type]
        pb.SubscribeResponse(digest=bytes(32), group={"codec": 1, "body": bytes(5 * 2**20)}),  # type: ignore[arg-type]
    ],
    ids=["digest", "cursor", "key", "over 4 MiB"],
)
async def test_lying_subscription_ends(response: pb.SubscribeResponse):
    peer = await client_of(LyingServer(response))
    with pytest.raises(Unavailable):
        async for _ in peer.subscribe(Cursor(), StreamFilter()):
            raise AssertionError("an item came through")
