"""Ticket port: the TCP port of a relay at which a socket becomes an end of a connection by showing its ticket.

Tickets are handed out in calls of RelayService, which enforces all bounds but one: sockets that showed no ticket yet
are bounded here. A socket is cheaper than a call, in which gRPC encrypts, frames and copies each byte once more.

Invariant: a ticket is valid once. If the port cannot be reached, the calls carry the bytes.
"""

import asyncio
import socket
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from swarm.addresses import is_wildcard, subnet_of
from swarm.errors import ConfigError
from swarm.fairness import FairTable
from swarm.open_files import places_for_relayed
from swarm.relay.tunnel import Acceptor, limit_buffers, reset
from swarm.wire.host_names import dial

TICKET_BYTES: Final = 16
GREETING: Final = b"swarm-relay\n"  # before the ticket: a relay must not choose the bytes that others send to a port
ANSWER: Final = b"+"  # the socket is an end from here on
TICKET_S: Final = 5.0  # to show a ticket
MAX_SILENT: Final = 256  # sockets that showed no ticket yet
MAX_SILENT_OF_SUBNET: Final = 32
_BACKLOG: Final = 128


class TicketPort:
    """Listening port, open from `start` to `close`, that hands each socket to the holder of the ticket it shows."""

    def __init__(self) -> None:
        self.number = 0  # 0: closed
        self._awaited: dict[bytes, asyncio.Future[socket.socket]] = {}
        self._silent = FairTable[str, "_Silent"]()  # by subnet
        self._accepted: Acceptor | None = None

    async def start(self, host: str, number: int) -> None:
        """Listens at a host, or for a wildcard at every IPv4 and IPv6 address; number 0 picks a free port.

        Raises:
            ConfigError: the address cannot be listened on.
        """
        try:
            listening = await _listening(host, number)
        except OSError as error:
            raise ConfigError(
                f"relay_port {number}: cannot listen at {host or '*'}:{number}: {error.strerror}; free the port, "
                "choose another, or 0 for any"
            ) from None
        limit_buffers(listening)
        self.number = listening.getsockname()[1]
        self._accepted = Acceptor(listening, self._take)
        self._accepted.start()

    async def close(self) -> None:
        """Closes the port and the sockets that showed no ticket; idempotent."""
        self.number = 0
        if self._accepted is not None:
            self._accepted.close()
        greetings = [silent.greeting for subnet in self._silent.parties for silent in self._silent.of(subnet)]
        for task in greetings:
            task.cancel()
        await asyncio.gather(*greetings, return_exceptions=True)

    @contextmanager
    def awaited(self, ticket: bytes, shown: asyncio.Future[socket.socket]) -> Generator[None]:
        """Expects a ticket: the socket that shows it becomes the result of `shown`, whose holder closes it."""
        self._awaited[ticket] = shown
        try:
            yield
        except BaseException:
            if shown.done() and not shown.cancelled():
                reset(shown.result())
            raise
        finally:
            self._awaited.pop(ticket, None)

    def _take(self, connection: socket.socket) -> None:
        try:
            subnet = subnet_of(connection.getpeername()[0])
        except OSError:  # it is gone
            connection.close()
            return
        if len(self._silent.of(subnet)) >= MAX_SILENT_OF_SUBNET:
            self._drop(self._silent.oldest(subnet))
        elif len(self._silent) >= places_for_relayed(MAX_SILENT):
            self._drop(self._silent.oldest_of_longest())
        connection.setblocking(False)
        silent = _Silent(subnet, asyncio.ensure_future(self._greet(connection)))
        self._silent.add(subnet, silent)
        silent.greeting.add_done_callback(lambda _: self._greeted(silent, connection))

    def _drop(self, silent: "_Silent") -> None:
        self._silent.remove(silent.subnet, silent)
        silent.greeting.cancel()

    def _greeted(self, silent: "_Silent", connection: socket.socket) -> None:
        self._silent.remove(silent.subnet, silent)
        if silent.greeting.cancelled() or not silent.greeting.result():
            reset(connection)

    async def _greet(self, connection: socket.socket) -> bool:
        """True if the socket showed a ticket that is expected."""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(TICKET_S):
                shown = await _exactly(connection, len(GREETING) + TICKET_BYTES)
            taken = self._awaited.pop(shown[len(GREETING) :], None)
            if taken is None or taken.done() or not shown.startswith(GREETING):
                return False
            connection.send(ANSWER)  # in the same turn: later the waiting call may be gone
            taken.set_result(connection)
            return True
        return False


@dataclass(eq=False, slots=True)
class _Silent:
    """A socket that showed no ticket yet."""

    subnet: str
    greeting: asyncio.Task[bool]


async def _exactly(connection: socket.socket, num_bytes: int) -> bytes:
    found, loop = b"", asyncio.get_running_loop()
    while len(found) < num_bytes:
        more = await loop.sock_recv(connection, num_bytes - len(found))
        if not more:
            raise ConnectionResetError("the connection ended")
        found += more
    return found


async def _listening(host: str, number: int) -> socket.socket:
    if is_wildcard(f"{host}:0"):  # both families where available, as gRPC does
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        return socket.create_server(("", number), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual)
    loop = asyncio.get_running_loop()
    family, *_, address = (await loop.getaddrinfo(host.strip("[]"), number, type=socket.SOCK_STREAM))[0]
    return socket.create_server(address[:2], family=family, backlog=_BACKLOG)


async def show_ticket(host: str, port: int, ticket: bytes) -> socket.socket:
    """Connects to a ticket port, shows a ticket, and returns the socket, now an end of the ticket's connection.

    The caller sets the deadline.

    Raises:
        OSError: nobody answers, or the ticket is not expected.
        ValueError: the host is not a valid name.
    """
    connection = await dial(host, port)
    limit_buffers(connection)  # with large buffers megabytes would precede each sign of life on a slow line
    try:
        await asyncio.get_running_loop().sock_sendall(connection, GREETING + ticket)
        if await _exactly(connection, len(ANSWER)) != ANSWER:
            raise ConnectionResetError(f"port {port} is no ticket port")
    except BaseException:
        reset(connection)
        raise
    return connection
