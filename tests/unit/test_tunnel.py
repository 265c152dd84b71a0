"""Bytes of a relayed connection from a socket to a socket."""

import asyncio
import gc
import random
import socket
import warnings
from collections.abc import Callable

import pytest

from swarm.errors import Unavailable
from swarm.relay import tunnel
from swarm.relay.tunnel import FRAME_BYTES, splice

MANY = 2**22  # bytes, more than kernel and transports keep of a direction


async def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a connection."""
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.socket()
        near.setblocking(False)
        await loop.sock_connect(near, server.getsockname())
        far, _ = server.accept()
    far.setblocking(False)
    return near, far


async def unix_pair() -> tuple[socket.socket, socket.socket]:
    near, far = socket.socketpair()
    for each in (near, far):
        each.setblocking(False)
    return near, far


Pair = Callable[[], "asyncio.Future[tuple[socket.socket, socket.socket]]"]


async def all_of(end: socket.socket) -> bytes:
    loop, found = asyncio.get_running_loop(), bytearray()
    while data := await loop.sock_recv(end, 2**16):
        found += data
    return bytes(found)


@pytest.mark.parametrize("pairs", [(tcp_pair, tcp_pair), (unix_pair, tcp_pair), (tcp_pair, unix_pair)])
async def test_all_bytes_pass_both_ways_and_the_last_ones_before_the_end(pairs: tuple[Pair, Pair]) -> None:
    (first, own), (other, last) = await pairs[0](), await pairs[1]()
    splicing = asyncio.ensure_future(splice(own, other))
    loop, there, back = asyncio.get_running_loop(), random.randbytes(MANY), random.randbytes(MANY // 3)

    async def answer() -> bytes:
        found = bytearray()
        while len(found) < MANY:
            found += await loop.sock_recv(last, 2**16)
        await loop.sock_sendall(last, back)
        last.shutdown(socket.SHUT_WR)
        return bytes(found)

    with first, last:
        _, found, answered = await asyncio.gather(loop.sock_sendall(first, there), answer(), all_of(first))
        assert found == there and answered == back
        first.close()
        await splicing


async def test_who_reads_nothing_holds_back_the_other_end() -> None:
    (first, own), (other, last) = await tcp_pair(), await tcp_pair()
    tunnel.limit_buffers(own)
    tunnel.limit_buffers(other)
    splicing = asyncio.ensure_future(splice(own, other))
    loop, num_sent = asyncio.get_running_loop(), 0
    with first, last:
        with pytest.raises(TimeoutError):
            while num_sent < 2**26:
                async with asyncio.timeout(0.5):
                    await loop.sock_sendall(first, bytes(FRAME_BYTES))
                num_sent += FRAME_BYTES
        assert num_sent < 2**25, "the kernel's, of the ends that are not bounded"
        splicing.cancel()
        await asyncio.gather(splicing, return_exceptions=True)


async def test_a_frame_that_may_not_pass_yet_holds_back_its_direction_alone() -> None:
    (first, own), (other, last) = await tcp_pair(), await tcp_pair()
    may_pass: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    num_waiting = 0

    async def later(data: bytes) -> bytes:
        nonlocal num_waiting
        num_waiting += 1
        await may_pass
        return data

    splicing = asyncio.ensure_future(
        splice(own, other, frame=lambda data: later(data) if data.startswith(b"slow") else data, own_idle_s=0.2)
    )
    loop = asyncio.get_running_loop()
    with first, last:
        await loop.sock_sendall(first, b"slow")
        await asyncio.sleep(0.4)  # longer than its silence may last
        await loop.sock_sendall(first, b"after")
        await loop.sock_sendall(last, b"quick")
        assert await loop.sock_recv(first, 99) == b"quick"
        assert num_waiting == 1 and not splicing.done()
        may_pass.set_result(None)
        first.shutdown(socket.SHUT_WR)
        assert await all_of(last) == b"slowafter"
        last.close()
        await splicing


@pytest.mark.parametrize("which", ["sends nothing", "reads nothing"])
async def test_a_side_whose_bytes_do_not_pass_is_lost(which: str) -> None:
    (first, own), (other, last) = await tcp_pair(), await tcp_pair()
    splicing = asyncio.ensure_future(splice(own, other, own_idle_s=0.3))
    loop = asyncio.get_running_loop()

    async def send() -> None:
        while which == "reads nothing":
            await loop.sock_sendall(first, bytes(FRAME_BYTES))

    sending = asyncio.ensure_future(send())
    with first, last:
        await asyncio.wait((splicing,), timeout=10.0)
        assert splicing.done()
        with pytest.raises(Unavailable, match="no byte came"):
            await splicing
        for task in (sending, splicing):
            task.cancel()
        await asyncio.gather(sending, splicing, return_exceptions=True)


async def test_who_reads_nothing_after_the_end_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "FINISH_S", 0.2)
    (first, own), (other, last) = await tcp_pair(), await tcp_pair()
    splicing = asyncio.ensure_future(splice(own, other))
    with last:
        with first:
            await asyncio.get_running_loop().sock_sendall(first, bytes(1000))
        await asyncio.wait((splicing,), timeout=10.0)
        assert splicing.done()
        splicing.cancel()
        await asyncio.gather(splicing, return_exceptions=True)


@pytest.mark.parametrize("num_turns", range(1, 7))
def test_a_splice_that_is_given_up_at_any_turn_leaves_no_socket(num_turns: int) -> None:
    async def scene() -> None:
        (first, own), (other, last) = await tcp_pair(), await tcp_pair()
        until = asyncio.get_running_loop().create_future()

        with first, last:
            splicing = asyncio.ensure_future(splice(own, other, until, frame=later))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            first.send(b"one frame that waits")
            for _ in range(num_turns):
                await asyncio.sleep(0)
            splicing.cancel()
            await asyncio.gather(splicing, return_exceptions=True)

    async def later(data: bytes) -> bytes:
        await asyncio.Event().wait()
        return data

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(scene())
        gc.collect()
    assert not caught, [str(each.message) for each in caught]
