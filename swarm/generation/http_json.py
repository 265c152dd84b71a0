"""JSON client over HTTP to one server, for many threads: deadlines, retries, bounded replies, cancellation.

Invariant: a call ends with a reply, with one of the project's errors or, as soon as it is cancelled, with Cancelled;
no attempt waits for a silent server beyond the timeout. The key is sent in a header, and no message contains it.

This is own code on http.client, since cancelling must end calls that wait for a reply: with httpx2 2.16, which is
installed beside huggingface_hub, closing the client from another thread left a call waiting for its whole timeout (7.0
of 7 s). That library would replace about 25 of these lines; retries, bounds and errors would stay.
"""

import http.client
import json
import random
import socket
import threading
from contextlib import suppress
from typing import Any, Final
from urllib.parse import urlsplit

from swarm.errors import ConfigError, TooLarge, Unavailable
from swarm.flow import Backoff

MAX_REPLY_BYTES: Final = 256 * 2**20
ATTEMPTS: Final = 5
FIRST_BACKOFF_S: Final = 0.2
_TRANSIENT: Final = frozenset({408, 425, 429})  # besides 5xx
_SHOWN: Final = 300  # characters of a server's explanation


class Refusal(ConfigError):
    """The server refuses a request with a status of 3xx or 4xx, and would refuse it again."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Cancelled(Exception):
    """The call was cancelled from another thread."""


class _Transient(Exception):
    """The server failed in a way that is worth another attempt."""


class JsonClient:
    """Client of the server at a base address.

    Args:
        url: http or https address, else ConfigError; its path is put before the path of every request.
        api_key: sent as a bearer token if not empty.
        timeout_s: longest silence of the server, in seconds.

    Example:
        reply = JsonClient("http://127.0.0.1:8000").call("POST", "/v1/completions", {"prompt": [1, 2]})
    """

    def __init__(self, url: str, api_key: str = "", timeout_s: float = 600.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"engine.url {url!r}: expected an address such as http://127.0.0.1:8000/v1")
        self.url = url.rstrip("/")
        self._parts = parts
        self._path = parts.path.rstrip("/")
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._rng = random.Random()  # for jitter alone, which has to differ between the clients of one server
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._live: set[http.client.HTTPConnection] = set()

    def call(self, method: str, path: str, body: object = None, *, attempts: int = ATTEMPTS) -> Any:
        """Sends a request with retries (blocking); returns the reply's JSON, else its text, or None if it is empty.

        Raises:
            Unavailable: every attempt got no answer, or a status of 408, 425, 429 or 5xx.
            Refusal: another status of 3xx or 4xx.
            TooLarge: the reply is larger than MAX_REPLY_BYTES.
            Cancelled: `cancel` was called.
        """
        backoff = Backoff(self._rng, FIRST_BACKOFF_S)
        for attempt in range(attempts):
            if attempt and self._cancelled.wait(backoff.next_s()):
                raise Cancelled
            if self._cancelled.is_set():
                raise Cancelled
            try:
                return self._once(method, path, body)
            except (_Transient, OSError, http.client.HTTPException) as error:
                if self._cancelled.is_set():
                    raise Cancelled from None
                if attempt + 1 == attempts:
                    raise Unavailable(f"{method} {self.url}{path}: {type(error).__name__}: {error}") from error
        raise AssertionError("at least one attempt")

    def cancel(self) -> None:
        """Ends the calls in progress, whose connections are closed, and every later call until `resume`."""
        self._cancelled.set()
        with self._lock:
            live = list(self._live)
        for connection in live:
            _close(connection)

    def resume(self) -> None:
        """Allows calls again after `cancel`."""
        self._cancelled.clear()

    def _once(self, method: str, path: str, body: object) -> Any:
        connection = self._connection()
        with self._lock:
            self._live.add(connection)
        try:
            connection.connect()
            if self._cancelled.is_set():  # `cancel` may have come before there was anything to close
                raise Cancelled
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, self._path + path, content, self._headers)
            response = connection.getresponse()
            reply = response.read(MAX_REPLY_BYTES + 1)
            return self._decode(f"{method} {self.url}{path}", response.status, reply)
        finally:
            with self._lock:
                self._live.discard(connection)
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        assert self._parts.hostname is not None
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.hostname, self._parts.port, timeout=self._timeout_s)

    def _decode(self, request: str, status: int, reply: bytes) -> Any:
        if len(reply) > MAX_REPLY_BYTES:
            raise TooLarge(f"{request}: reply exceeds {MAX_REPLY_BYTES} bytes")
        if status >= 500 or status in _TRANSIENT:
            raise _Transient(f"status {status}: {_excerpt(reply)}")
        if status >= 300:
            raise Refusal(f"{request}: status {status}: {_excerpt(reply)}", status)
        try:
            return json.loads(reply) if reply.strip() else None
        except ValueError:
            return reply.decode(errors="replace")  # some control requests are answered in plain text


def _close(connection: http.client.HTTPConnection) -> None:
    stream = connection.sock
    if isinstance(stream, socket.socket):
        with suppress(OSError):  # it may have ended already
            stream.shutdown(socket.SHUT_RDWR)


def _excerpt(reply: bytes) -> str:
    return reply[:_SHOWN].decode(errors="replace").strip()
