"""Connections to hosts by name, which an advert of anybody may state.

Invariant: names are resolved in threads of their own, which hold up no other work of the node, nor its end. A name
server that does not answer holds one for up to half a minute, and behind those of asyncio, of which two cores have six,
all other work waited.
"""

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

# More than all that are dialled in half a minute, known peers too (`swarm/peers/address_book.py`).
_FREE: Final = threading.BoundedSemaphore(128)


async def dial(host: str, port: int, source: str = "") -> socket.socket:
    """A socket that is connected to one address of each family, the first that answers; it does not block.

    Args:
        host: name or address.
        port: TCP.
        source: own address to call from; empty: any.

    Raises:
        OSError: nobody answers.
        ValueError: it is no name.
    """
    resolve = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        found = resolve(flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await _in_a_thread(resolve)
    # a name of a hundred addresses gets no hundred connections
    *others, last = {family: (family, address) for family, *_, address in reversed(found)}.values()
    for family, address in others:
        with suppress(OSError):
            return await _connected(family, address, source)
    return await _connected(*last, source)


async def open_connection(host: str, port: int, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """As asyncio's, by `dial`. Raises OSError, or ValueError where it is no name."""
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
