"""Connections to hosts by name, which an advert of anybody may state.

Invariant: names are resolved in threads of their own, which hold up no other work of the node, nor its end. A name
server that does not answer holds one for up to half a minute, and behind those of asyncio, of which two cores have six,
all other work waited.
"""

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

# More than all that are dialled in half a minute, known peers too (`swarm/peers/address_book.py`).
_FREE: Final = threading.BoundedSemaphore(128)


async def open_connection(host: str, port: int, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """As asyncio's, to one address of each family. Raises OSError, or ValueError where it is no name."""
    resolve = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        found = resolve(flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await _in_a_thread(resolve)
    *others, last = {family: str(address[0]) for family, *_, address in reversed(found)}.values()
    for each in others:
        try:
            return await asyncio.open_connection(each, port, **options)
        except (ssl.SSLError, ConnectionResetError):
            raise  # somebody answers: a name of a hundred addresses gets no hundred connections
        except OSError:
            continue
    return await asyncio.open_connection(last, port, **options)


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
