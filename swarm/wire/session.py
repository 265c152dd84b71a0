"""Sessions: gRPC over TLS on which both ends prove their Ed25519 identities over the certificate in use.

Invariant: a certificate (one per process, self-signed) proves nothing by itself; both signatures cover its digest. A
man in the middle has another certificate, which neither signature covers. So `open_channel` returns a connection to the
intended node, and `Sessions.require` returns the id of the node at the other end of the same connection.
"""

import asyncio
import hashlib
import os
import secrets
import socket
import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, cast

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from swarm.clock import Clock, SystemClock
from swarm.errors import OtherNode, Unauthenticated, Unavailable
from swarm.identity import DOMAIN_CHALLENGE, DOMAIN_HELLO, Identity, node_id_of, verify
from swarm.types import NodeId
from swarm.wire.adverts import is_endpoint
from swarm.wire.grpc_errors import calling
from swarm.wire.host_names import open_connection
from swarm.wire.v1 import session_service_pb2 as pb
from swarm.wire.v1 import session_service_pb2_grpc as pb_grpc

SESSION_KEY: Final = "swarm-session-bin"
NONCE_BYTES: Final = 32
# Raised with every change of meaning or name on the wire; both ends of a connection must have the same.
PROTOCOL_VERSION: Final = 4
MAX_MESSAGE_BYTES: Final = 4 * 2**20 + 64 * 1024  # a client refuses larger answers before parsing
PING_S: Final = 20.0  # shorter than the time for which most routers keep an idle connection
READ_AHEAD_BYTES: Final = 256 * 1024  # of each stream, where the line's speed is not measured
_RENEW_SHARE: Final = 0.8  # of a session's life, after which it is renewed

CERTIFICATE_NAME: Final = "swarm-node"
MAX_CERTIFICATE_BYTES: Final = 8192
# Validity means nothing for a key that lives as long as its process, and a node whose clock is a year off must still
# connect.
_NOT_BEFORE: Final = datetime(2000, 1, 1, tzinfo=UTC)
_NOT_AFTER: Final = datetime(2100, 1, 1, tzinfo=UTC)

Metadata = Sequence[tuple[str, bytes]]
NoteClock = Callable[[NodeId, float, float], None]  # server, its wall clock, our monotonic clock at that moment


def challenge_message(client_nonce: bytes, certificate_digest: bytes) -> bytes:
    """The bytes that a server signs: nonce and certificate digest, 32 bytes each."""
    return client_nonce + certificate_digest


def hello_message(server_nonce: bytes, certificate_digest: bytes, client: NodeId, server: NodeId, run_id: str) -> bytes:
    """The bytes that a client signs: nonce, certificate digest, client and server, 32 bytes each, then the run."""
    return server_nonce + certificate_digest + bytes.fromhex(client) + bytes.fromhex(server) + run_id.encode()


def check_protocol_version(other: str, version: int) -> None:
    """Raises Unauthenticated if `version` is not ours; `other` names the other end in the message."""
    if version != PROTOCOL_VERSION:
        raise Unauthenticated(
            f"{other} speaks protocol version {version or 1}, this node {PROTOCOL_VERSION}: "
            "install the same release of swarm-trainer on both"
        )


@dataclass(eq=False, repr=False)
class AuthenticatedChannel:
    """A connection to a server, which must prove the identity `node_id`, with our session on it."""

    channel: grpc.aio.Channel
    node_id: NodeId
    certificate_digest: bytes
    _identity: Identity
    _run_id: str
    _clock: Clock
    _credential: Callable[[], bytes] = bytes  # called at every handshake, since it may be renewed
    _note_clock: NoteClock = lambda node_id, now_s, at_s: None

    def __post_init__(self) -> None:
        self._stub: Any = pb_grpc.SessionServiceStub(self.channel)
        self._token = b""
        self._renew_at_s = 0.0
        self._renewing = asyncio.Lock()
        self._is_closed = False

    async def metadata(self, timeout_s: float) -> Metadata:
        """The session token to send with a call; makes a handshake at first, and after _RENEW_SHARE of a session.

        Raises:
            Unavailable: the connection is closed, or the server does not answer.
            Unauthenticated: a proof failed, the server's or ours.
        """
        async with self._renewing:
            if not self._is_closed and self._clock.monotonic_s() >= self._renew_at_s:
                await self._handshake(timeout_s)
        if self._is_closed:  # otherwise gRPC raises an error of its own
            raise Unavailable(f"the connection to {self.node_id[:8]} was closed")
        return ((SESSION_KEY, self._token),)

    async def check_server(self, timeout_s: float) -> bytes:
        """Makes the server prove its identity without showing ours; returns the server's nonce for Hello.

        Raises:
            Unavailable: the server did not answer.
            Unauthenticated: the server's proof is wrong, or is that of another node.
        """
        nonce = secrets.token_bytes(NONCE_BYTES)
        with calling(f"handshake with {self.node_id[:8]}", Unauthenticated):
            challenge = await self._stub.Challenge(pb.ChallengeRequest(client_nonce=nonce), timeout=timeout_s)
            self._check_challenge(challenge, nonce)
        return challenge.server_nonce

    async def _handshake(self, timeout_s: float) -> None:
        server_nonce = await self.check_server(timeout_s)
        with calling(f"handshake with {self.node_id[:8]}", Unauthenticated):
            message = hello_message(
                server_nonce, self.certificate_digest, self._identity.node_id, self.node_id, self._run_id
            )
            asked_s = self._clock.monotonic_s()
            hello = await self._stub.Hello(
                pb.HelloRequest(
                    public_key=self._identity.public_key,
                    signature=self._identity.sign(DOMAIN_HELLO, message),
                    run_id=self._run_id,
                    protocol_version=PROTOCOL_VERSION,
                    credential=self._credential(),
                ),
                timeout=timeout_s,
            )
        answered_s = self._clock.monotonic_s()
        self._token = hello.session_token
        self._renew_at_s = answered_s + _RENEW_SHARE * hello.expires_in_s
        self._note_clock(self.node_id, hello.now_s, (asked_s + answered_s) / 2)

    def _check_challenge(self, challenge: pb.ChallengeResponse, nonce: bytes) -> None:
        shown = node_id_of(challenge.public_key)
        if len(challenge.server_nonce) != NONCE_BYTES:
            raise Unauthenticated(f"node {shown[:8]} sent a nonce of {len(challenge.server_nonce)} bytes")
        signed = challenge_message(nonce, self.certificate_digest)
        if not verify(challenge.public_key, DOMAIN_CHALLENGE, signed, challenge.signature):
            raise Unauthenticated(f"node {shown[:8]} did not sign the certificate of this connection")
        if shown != self.node_id:
            num = 8 if shown[:8] != self.node_id[:8] else len(shown)  # the typing error may be at the end
            raise OtherNode(f"expected node {self.node_id[:num]}, the server is {shown[:num]}", shown)
        check_protocol_version(f"node {shown[:8]}", challenge.protocol_version)

    async def close(self) -> None:
        """Closes the connection and every call on it."""
        self._is_closed = True
        await self.channel.close(grace=None)


async def open_channel(
    endpoint: str,
    expected_node_id: NodeId,
    identity: Identity,
    run_id: str,
    timeout_s: float,
    clock: Clock | None = None,
    credential: Callable[[], bytes] | None = bytes,
    note_clock: NoteClock = lambda node_id, now_s, at_s: None,
    *,
    socket_path: str = "",
    ping_s: float = PING_S,
    is_prompt: bool = False,
) -> AuthenticatedChannel:
    """Connects to a node or coordinator; both sides prove their identities.

    Args:
        endpoint: host:port.
        expected_node_id: identity that must answer there.
        identity: our own identity.
        run_id: the run that both ends must take part in.
        timeout_s: time limit of the whole handshake.
        clock: monotonic clock of the session; None: the machine's.
        credential: returns the credential that we show to be admitted. None shows nothing, not even our identity: only
            the server proves itself, for calls that need no session.
        note_clock: called with the server's clock at each handshake.
        socket_path: Unix socket connected to the node; the endpoint is then only a name for messages.
        ping_s: seconds without a byte after which the other end is pinged.
        is_prompt: the other end has only `ping_s` to answer a ping, instead of a minute.

    Raises:
        Unavailable: the server did not answer in time; the message names the endpoint.
        Unauthenticated: another node answered, or our proof was refused; the message names the endpoint.
    """
    if not socket_path and not is_endpoint(endpoint):
        raise Unavailable(f"{endpoint!a} is not host:port")
    try:
        async with asyncio.timeout(timeout_s):
            der = await fetch_certificate(endpoint, socket_path)
            target = f"unix:{socket_path}" if socket_path else endpoint
            channel = grpc.aio.secure_channel(
                target,
                grpc.ssl_channel_credentials(root_certificates=ssl.DER_cert_to_PEM_cert(der).encode()),
                options=_channel_options(ping_s, is_prompt=is_prompt),
            )
            digest, known = hashlib.sha256(der).digest(), clock or SystemClock()
            opened = AuthenticatedChannel(
                channel, expected_node_id, digest, identity, run_id, known, credential or bytes, note_clock
            )
            try:
                if credential is None:
                    await opened.check_server(timeout_s)
                else:
                    await opened.metadata(timeout_s)
            except BaseException:
                await channel.close(grace=None)
                raise
    except TimeoutError:
        raise Unavailable(f"{endpoint}: no session within {timeout_s} s") from None
    except OtherNode as error:
        raise OtherNode(f"{endpoint}: {error}", error.found) from None
    except Unavailable as error:
        raise type(error)(f"{endpoint}: {error}") from None
    return opened


def _channel_options(ping_s: float, *, is_prompt: bool) -> list[tuple[str, Any]]:
    return [
        ("grpc.ssl_target_name_override", CERTIFICATE_NAME),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_metadata_size", 16 * 1024),
        # One channel is one connection: never shared with another channel to the same address, no proxy.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),
        ("grpc.keepalive_time_ms", int(1000 * ping_s)),
        ("grpc.keepalive_timeout_ms", int(1000 * min(ping_s, 10.0))),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),  # an idle connection stays audible, so silence means a relay
        *(_prompt_options(ping_s) if is_prompt else ()),
    ]


def _prompt_options(ping_s: float) -> list[tuple[str, Any]]:
    """Options for connections whose end must be noticed within seconds.

    gRPC 1.85 does not end a connection after `keepalive_timeout` but after the timeout of any ping, 60 s by default
    (its pull request 39239), and a bandwidth probe waits for its own ping before another one is sent. Not for all
    connections: on a slow line megabytes precede an answer, and a late ping means a lost peer only without probes.
    """
    return [
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", READ_AHEAD_BYTES),
        ("grpc.http2.ping_timeout_ms", int(1000 * ping_s)),
    ]


# --- TLS certificates --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """A self-signed P-256 certificate and its key."""

    key_pem: bytes
    pem: bytes
    digest: bytes  # SHA-256 of the DER form, 32 bytes


def create_certificate() -> Certificate:
    """Creates a self-signed certificate with a new key, for this process."""
    key = generate_private_key(SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, CERTIFICATE_NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(CERTIFICATE_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, SHA256())
    )
    return Certificate(
        key_pem=key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        pem=certificate.public_bytes(Encoding.PEM),
        digest=hashlib.sha256(certificate.public_bytes(Encoding.DER)).digest(),
    )


async def fetch_certificate(endpoint: str, socket_path: str = "") -> bytes:
    """The certificate (DER) that a server shows to anyone. The caller sets the deadline.

    Raises:
        Unavailable: no server answers TLS with HTTP/2 there, or its certificate is too large.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    try:
        tls: dict[str, Any] = {"ssl": context, "server_hostname": CERTIFICATE_NAME}
        if socket_path:
            _, writer = await asyncio.open_unix_connection(socket_path, **tls)
        else:
            host, _, port = endpoint.rpartition(":")
            _, writer = await open_connection(host.strip("[]"), int(port), **tls)
    except socket.gaierror:
        host = endpoint.rpartition(":")[0]
        raise Unavailable(f"the name {host} does not resolve: is it spelled right, and this machine online?") from None
    except (ssl.SSLError, ConnectionResetError) as error:
        if socket_path:  # a relay ended the connection; the caller that asked it knows the reason
            raise Unavailable("no TLS connection: the relay ended it") from None
        raise Unavailable(
            f"no TLS connection: {type(error).__name__}: what answers there speaks another protocol; is it the port of "
            "a status page?"
        ) from None
    except (OSError, ValueError) as error:
        why = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else type(error).__name__
        raise Unavailable(f"no TLS connection: {why}") from None
    try:
        connection = cast(ssl.SSLObject, writer.get_extra_info("ssl_object"))
        der = connection.getpeercert(binary_form=True) or b""
    finally:
        writer.transport.abort()
    if not 0 < len(der) <= MAX_CERTIFICATE_BYTES:
        raise Unavailable(f"certificate of {len(der)} bytes, bound {MAX_CERTIFICATE_BYTES}")
    return der
