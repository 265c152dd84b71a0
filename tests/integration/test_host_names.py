"""Adverts state names that no name server answers for: nothing else of a node waits for them."""

import asyncio
import socket
import threading
from typing import Any

import pytest
from waits import HANG_S

from swarm.errors import Unavailable
from swarm.wire import host_names
from swarm.wire.session import fetch_certificate

HERE = "127.0.0.1"


async def test_names_that_nobody_resolves_hold_up_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """36 dials to such names, of as many domains: more than asyncio ever has threads. Others are resolved meanwhile."""
    is_over, resolve = threading.Event(), socket.getaddrinfo

    def slow(host: Any, *arguments: Any, flags: int = 0, **options: Any) -> Any:
        if str(host).endswith(".test") and flags != socket.AI_NUMERICHOST:
            is_over.wait(HANG_S)  # as glibc does for a server that is silent
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return resolve(host, *arguments, flags=flags, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    dials = [asyncio.ensure_future(fetch_certificate(f"node.domain{number}.test:7700")) for number in range(36)]
    try:
        await asyncio.sleep(0.2)
        async with asyncio.timeout(20.0):  # names take up to HANG_S
            await asyncio.to_thread(int)  # such as a step, or a look at a group
            with socket.socket() as nobody:
                nobody.bind(("127.0.0.1", 0))
                with pytest.raises(Unavailable, match="refused"):
                    await fetch_certificate(f"localhost:{nobody.getsockname()[1]}")
    finally:
        is_over.set()
        assert all(isinstance(each, Unavailable) for each in await asyncio.gather(*dials, return_exceptions=True))


async def test_a_name_of_many_addresses_gets_one_connection_of_each_family(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dials are counted by the name: whoever answers there does so once a dial."""
    num_refused = 0

    async def refuse(family: int, address: Any, source: str) -> Any:
        nonlocal num_refused
        num_refused += 1
        raise ConnectionRefusedError(111, "refused")

    monkeypatch.setattr("swarm.wire.host_names._connected", refuse)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (f"127.9.0.{number}", 7700)) for number in range(1, 101)]
    found.append((socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 7700, 0, 0)))  # type: ignore[arg-type]

    def resolve(host: str, *_: Any, flags: int = 0, **__: Any) -> Any:
        if flags == socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "no number")
        return found

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(Unavailable, match="refused"):
        await fetch_certificate("many.test:7700")
    assert num_refused == 2


async def test_who_answers_a_name_with_another_protocol_is_greeted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_greeted, plain = 0, host_names._connected

    def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_greeted
        num_greeted += 1
        writer.transport.abort()

    async def connected(family: int, address: Any, source: str) -> socket.socket:
        return await plain(socket.AF_INET, address, source)  # not every machine has IPv6

    servers = [await asyncio.start_server(greet, HERE, 0) for _ in range(2)]
    families = (socket.AF_INET, socket.AF_INET6)
    both = [(family, 1, 6, "", each.sockets[0].getsockname()) for family, each in zip(families, servers, strict=True)]
    resolve = socket.getaddrinfo

    def resolved(host: str, *arguments: Any, **options: Any) -> Any:
        return both if host == "many.test" else resolve(host, *arguments, **options)

    monkeypatch.setattr(host_names, "_connected", connected)
    monkeypatch.setattr(socket, "getaddrinfo", resolved)
    with pytest.raises(Unavailable, match="another protocol"):
        await fetch_certificate("many.test:7700")
    for server in servers:
        server.close()
    assert num_greeted == 1
