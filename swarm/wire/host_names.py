"""Connections to hosts by name, which an advert of anybody may state.

Invariant: names are resolved in threads of their own. A name server that does not answer holds one for up to half a
minute, and behind those of asyncio, of which two cores have six, all other work of the node waited.
"""

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Final

# More than the strangers that are dialled in half a minute (`swarm/peers/address_book.py`); they start as needed.
_THREADS: Final = ThreadPoolExecutor(48, thread_name_prefix="host-names")


async def open_connection(host: str, port: int, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """As `asyncio.open_connection`. Raises OSError, or ValueError where it is no name."""
    resolve = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        found = resolve(flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        found = await asyncio.get_running_loop().run_in_executor(_THREADS, resolve)
    *others, last = [str(address[0]) for *_, address in found]
    for each in others:
        try:
            return await asyncio.open_connection(each, port, **options)
        except OSError:  # the host has another address
            continue
    return await asyncio.open_connection(last, port, **options)
