"""Adverts state names that no name server answers for: nothing else of a node waits for them."""

import asyncio
import socket
import threading
from contextlib import suppress
from typing import Any

import pytest
from waits import HANG_S, PROMPT_S

from swarm.errors import Unavailable
from swarm.wire import host_names
from swarm.wire.session import fetch_certificate

HERE = "127.0.0.1"


def among_all_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: names are resolved in the threads that do everything else."""
    monkeypatch.setattr("swarm.wire.host_names._in_a_thread", asyncio.to_thread)


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: among all work"])
async def test_names_that_nobody_resolves_hold_up_nothing_else(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """36 dials to such names, of as many domains: more than asyncio ever has threads. Others are resolved meanwhile."""
    if not is_defended:
        among_all_work(monkeypatch)
    is_over, resolve, most_s = threading.Event(), socket.getaddrinfo, PROMPT_S if is_defended else 2.0

    def slow(host: Any, *arguments: Any, flags: int = 0, **options: Any) -> Any:
        if str(host).endswith(".test") and flags != socket.AI_NUMERICHOST:
            is_over.wait(HANG_S)  # as glibc does for a server that is silent
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return resolve(host, *arguments, flags=flags, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    dials = [asyncio.ensure_future(fetch_certificate(f"node.domain{number}.test:7700")) for number in range(36)]
    try:
        await asyncio.sleep(0.2)
        async with asyncio.timeout(most_s):
            await asyncio.to_thread(int)  # such as a step, or a look at a group
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            with pytest.raises(Unavailable, match="refused"):
                await asyncio.wait_for(fetch_certificate(f"localhost:{nobody.getsockname()[1]}"), most_s)
    except TimeoutError:
        assert not is_defended
    else:
        assert is_defended
    finally:
        is_over.set()
        assert all(isinstance(each, Unavailable) for each in await asyncio.gather(*dials, return_exceptions=True))


def each_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: whatever an address answers, the next one is tried."""
    monkeypatch.setattr("swarm.wire.host_names.reversed", by_address, raising=False)


def by_address(found: Any) -> Any:
    return [(address, *rest, address) for _, *rest, address in found]


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: each address"])
async def test_a_name_of_many_addresses_gets_one_connection_of_each_family(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dials are counted by the name: whoever answers there does so once a dial."""
    if not is_defended:
        each_address(monkeypatch)
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
    assert (num_refused == 2) is is_defended


def greets_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: where one address answers otherwise, the next one is greeted."""

    async def open_connection(host: str, port: int, **options: Any) -> Any:
        found: Any = socket.getaddrinfo(host, port)
        for *_, address in found:
            with suppress(OSError):
                return await asyncio.open_connection(*address[:2], **options)
        raise ConnectionResetError

    monkeypatch.setattr("swarm.wire.session.open_connection", open_connection)


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: greets each"])
async def test_who_answers_a_name_with_another_protocol_is_greeted_once(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        greets_each(monkeypatch)
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
    assert num_greeted == (1 if is_defended else 2)
