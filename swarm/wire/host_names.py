"""Connections to hosts by name, which any node's advert may state.

Invariant: each name is resolved in its own thread, which delays neither other work of the node nor its end. An
unresponsive name server blocks a thread for up to half a minute, and the pool of asyncio (six threads on two cores)
would stall all other work.
"""

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

# More than are dialled in half a minute, known peers included (`swarm/peers/address_book.py`).
_FREE: Final = threading.BoundedSemaphore(128)


async def dial(host: str, port: int, source: str = "") -> socket.socket:
    """A connected non-blocking socket; tries one address of each family in turn.

    Args:
        host: name or IP address.
        port: TCP port.
        source: local address of the connection; "": any.

    Raises:
        OSError: the name does not resolve, or no address answers.
        ValueError: `host` is not a valid name.
    """
    resolve = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        found = resolve(flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await _in_a_thread(resolve)
    # one address per family: a name of a hundred addresses gets no hundred connections
    *others, last = {family: (family, address) for family, *_, address in reversed(found)}.values()
    for family, address in others:
        with suppress(OSError):
            return await _connected(family, address, source)
    return await _connected(*last, source)


async def open_connection(host: str, port: int, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """`asyncio.open_connection` by way of `dial`. Raises OSError, or ValueError if `host` is invalid."""
    return await asyncio.open_connection(sock=await dial(host, port), **options)


async def _connected(family: int, address: Any, source: str) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        connection.setblocking(False)
        if source:
            connection.bind((source, 0))
        await asyncio.get_running_loop().sock_connect(connection, address)
    except BaseException:
        connection.close()
        raise
    return connection


async def _in_a_thread(work: Callable[[], Any]) -> Any:
    if not _FREE.acquire(blocking=False):
        raise socket.gaierror(socket.EAI_AGAIN, "too many names are being resolved")
    loop = asyncio.get_running_loop()
    answer = loop.create_future()

    def run() -> None:
        try:
            give: Callable[[], None] = partial(answer.set_result, work())
        except Exception as error:
            give = partial(answer.set_exception, error)
        _FREE.release()
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(lambda: None if answer.done() else give())

    threading.Thread(target=run, name="host name", daemon=True).start()
    return await answer
