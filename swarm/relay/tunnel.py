"""Bytes between a local socket and a call to a relay.

Invariant: nothing is kept but what is under way; whoever reads slowly holds back the other end, and where one direction
ends the other does.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import grpc

from swarm.errors import Unauthenticated, Unavailable
from swarm.wire.grpc_errors import calling

# Of a call to Connect, once the other end took it: gRPC forgets why a call was refused where our bytes cross that.
TAKEN: Final = (("taken", "1"),)
FRAME_BYTES: Final = 60 * 1024  # of one message: a request of a server has at most 64 KiB (`ServerLimits`)


async def pump(
    call: Any, request_of: Callable[[bytes], Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter, what: str
) -> None:
    """Passes bytes both ways until one side ends. The caller closes socket and call.

    Args:
        call: whose responses have `data`.
        request_of: the request that carries some bytes.
        reader: of the socket.
        writer: of the socket.
        what: the call, for messages.

    Raises:
        Unavailable: the call broke.
    """

    async def send() -> None:
        while data := await reader.read(FRAME_BYTES):
            try:
                await call.write(request_of(data))
            except asyncio.InvalidStateError:  # it has ended
                if await call.code() is not grpc.StatusCode.OK:
                    raise Unavailable(f"{what}: {await call.details()!a}") from None
                return

    async def receive() -> None:
        async for response in call:
            if len(response.data) > FRAME_BYTES:
                raise Unavailable(f"{what}: {len(response.data)} bytes in a frame, expected at most {FRAME_BYTES}")
            writer.write(response.data)
            await writer.drain()

    try:
        with calling(what, Unauthenticated):
            await until_first_ends(send(), receive())
    except Unavailable:  # which is an OSError, too
        raise
    except OSError:
        return  # the local end was closed


async def until_first_ends(*ways: Coroutine[Any, Any, None]) -> None:
    """Runs the directions of one connection until one ends, and raises what ended it; the others are cancelled."""
    tasks = [asyncio.ensure_future(way) for way in ways]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
