"""Small HTTP server for read-only pages: /healthz, /metrics, the coordinator's status page.

Invariant: at a loopback address no public name is answered; requests are bounded in size and time, and connections in
number: if all places are taken, a new connection takes the place of the oldest connection of the subnet that holds
most, so a client with few connections is answered.
The server runs in its own thread: an event loop would accept hundreds of connections before it reads from one.
"""

import contextlib
import ipaddress
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from swarm.addresses import is_loopback, is_private_host, subnet_of
from swarm.fairness import FairTable
from swarm.flow import BoundedTable
from swarm.open_files import places_for_pages

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES: Final = 8192
REQUEST_TIMEOUT_S: Final = 5.0  # from the connection to the end of the answer
MAX_CONNECTIONS: Final = 512  # fewer where the limit of open files is low
MAX_PAGES: Final = 64  # that are remembered
CONNECTIONS_PER_SUBNET: Final = 64
_BACKLOG: Final = 1024
_ACCEPTED_AT_ONCE: Final = 64  # then those that are connected are read: fewer than have places
_WAKE_EVERY_S: Final = 0.5
_PAGE_S: Final = 1.0  # a page of this age is answered again: frequent requests cost no work
_REASONS: Final = {
    200: "OK",
    404: "Not Found",
    405: "Method Not Allowed",
    421: "Misdirected Request",
    500: "Internal Server Error",
    503: "Service Unavailable",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Page:
    """Response body of a path, with its content type, status and further headers."""

    body: bytes
    kind: str = "text/plain"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(eq=False, slots=True)
class _Client:
    socket: socket.socket
    subnet: str
    since_s: float
    request: bytes = b""
    answer: memoryview = field(default_factory=lambda: memoryview(b""))


class PageServer:
    """HTTP server for GET and HEAD, one request per connection.

    Example:
        server = PageServer(lambda path: Page(body=b"ok") if path == "/healthz" else None)
        port = server.start("127.0.0.1", 0)
        server.stop()
    """

    def __init__(self, page_of: Callable[[str], Page | None]) -> None:
        """Stores `page_of`, which maps a path (without query) to its page or to None, in the server's thread."""
        self._page_of = page_of
        self._selector = selectors.DefaultSelector()
        self._made = BoundedTable[str, tuple[float, Page]](MAX_PAGES)  # path -> when it was made, and the page
        self._clients: dict[_Client, None] = {}  # the oldest first
        self._of_subnet = FairTable[str, _Client]()
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    @property
    def num_open(self) -> int:
        """Number of open connections."""
        return len(self._clients)

    def start(self, host: str, port: int) -> int:
        """Starts to serve at host and port (0: a free port); returns the port. Raises OSError, OverflowError."""
        host = host.strip("[]")
        family, _, _, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server((address[0], address[1]), family=family, backlog=_BACKLOG)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, args=(listener,), name=f"pages on {port}", daemon=True)
        self._thread.start()
        return listener.getsockname()[1]

    def stop(self) -> None:
        """Closes the listening socket and every connection (blocking)."""
        self._is_stopped = True
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, listener: socket.socket) -> None:
        with listener, self._selector:
            while not self._is_stopped:
                ready = self._selector.select(_WAKE_EVERY_S)
                # Clients that are connected come first: their requests must not wait behind newcomers.
                for key, events in ready:
                    if key.data in self._clients:
                        self._serve(key.data, events)
                if any(key.data is None for key, _ in ready):
                    self._accept(listener)
                self._end_late()
            for client in list(self._clients):
                self._end(client)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                connection, address = listener.accept()
            except OSError:  # nobody waits, or no descriptor is left
                return
            connection.setblocking(False)
            client = _Client(connection, subnet_of(address[0]), time.monotonic())
            self._take_place(client)

    def _take_place(self, client: _Client) -> None:
        if len(self._of_subnet.of(client.subnet)) >= CONNECTIONS_PER_SUBNET:
            self._end(self._of_subnet.oldest(client.subnet))
        elif self._clients and len(self._clients) >= places_for_pages(MAX_CONNECTIONS):
            self._end(self._of_subnet.oldest_of_longest())
        self._clients[client] = None
        self._of_subnet.add(client.subnet, client)
        self._selector.register(client.socket, selectors.EVENT_READ, client)
        self._serve(client, selectors.EVENT_READ)  # most requests come with the connection

    def _end_late(self) -> None:
        now_s = time.monotonic()
        while self._clients:
            oldest = next(iter(self._clients))
            if now_s - oldest.since_s <= REQUEST_TIMEOUT_S:
                return
            self._end(oldest)

    def _serve(self, client: _Client, events: int) -> None:
        try:
            if events & selectors.EVENT_READ and not client.answer:
                self._read(client)
            if client.answer:
                client.answer = client.answer[client.socket.send(client.answer) :]
                if not client.answer:
                    self._end(client)
        except BlockingIOError:
            return  # goes on when the socket is ready
        except OSError as error:
            logger.debug("request dropped", extra={"error": type(error).__name__})
            self._end(client)

    def _read(self, client: _Client) -> None:
        data = client.socket.recv(8 * MAX_REQUEST_BYTES)
        client.request += data
        head, end, _ = client.request.partition(b"\r\n\r\n")
        if end:
            is_here = is_loopback(client.socket.getsockname()[0])
            client.answer = memoryview(self._answer(head, is_here))
            self._selector.modify(client.socket, selectors.EVENT_WRITE, client)
        elif not data or len(client.request) > MAX_REQUEST_BYTES:
            raise ConnectionError("no request")

    def _end(self, client: _Client) -> None:
        del self._clients[client]
        self._of_subnet.remove(client.subnet, client)
        with contextlib.suppress(KeyError):
            self._selector.unregister(client.socket)
        client.socket.close()

    def _answer(self, head: bytes, is_here: bool) -> bytes:
        if is_here and any(map(_is_public_name, _hosts(head))):
            return _response(Page(body=b"this machine has another name: open the page by its address\n", status=421))
        method, _, rest = head.partition(b" ")
        if method not in (b"GET", b"HEAD"):
            return _response(Page(body=b"read-only\n", status=405))
        path = rest.partition(b" ")[0].partition(b"?")[0].decode("ascii", "replace")
        answer = _response(self._page(path))
        return answer if method == b"GET" else answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"

    def _page(self, path: str) -> Page:
        now_s = time.monotonic()
        made = self._made.get(path)
        if made is not None and now_s - made[0] < _PAGE_S:
            return made[1]
        try:
            page = self._page_of(path) or Page(body=b"there is no such page\n", status=404)
        except Exception:  # task boundary: one page that fails must not end the others
            logger.exception("page failed", extra={"path": path})
            page = Page(body=b"this page failed; the log says why\n", status=500)
        if page.status in (200, 500):  # the paths that exist: few
            self._made[path] = (now_s, page)
        return page


def _hosts(head: bytes) -> list[str]:
    """Names in the Host headers of a request, without ports; [] for a request without one, which no browser sends."""
    lines = [line.partition(b":") for line in head.split(b"\r\n")[1:]]
    given = [text.strip().decode("latin-1") for name, _, text in lines if name.strip().lower() == b"host"]
    return [text if text.endswith("]") else text.rpartition(":")[0] or text for text in given]


def _is_public_name(host: str) -> bool:
    """True for a name that anybody may register: a page of that name could let a browser read what only it can reach.

    The owner of the name has it lead to a loopback address once the browser has opened the page (DNS rebinding).
    """
    try:
        ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return not is_private_host(host)
    return False


def _response(page: Page) -> bytes:
    headers = {
        "Content-Type": page.kind,
        "Content-Length": str(len(page.body)),
        "X-Content-Type-Options": "nosniff",
        "Connection": "close",
        **page.headers,
    }
    lines = [f"HTTP/1.1 {page.status} {_REASONS[page.status]}", *(f"{name}: {text}" for name, text in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + page.body
