"""Adverts state names that no name server answers for: nothing else of a node waits for them."""

import asyncio
import socket
import threading
from typing import Any

import pytest

from swarm.errors import Unavailable
from swarm.wire.session import fetch_certificate


def among_all_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: names are resolved in the threads that do everything else."""
    monkeypatch.setattr("swarm.wire.host_names._THREADS", None)


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: among all work"])
async def test_names_that_nobody_resolves_hold_up_nothing_else(
    is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """36 dials to such names, of as many domains: more than asyncio ever has threads."""
    if not is_defended:
        among_all_work(monkeypatch)
    is_over, resolve = threading.Event(), socket.getaddrinfo

    def slow(host: Any, *arguments: Any, flags: int = 0, **options: Any) -> Any:
        if str(host).endswith(".test") and flags != socket.AI_NUMERICHOST:
            is_over.wait(15.0)  # as glibc does for a server that is silent
            raise socket.gaierror(socket.EAI_AGAIN, "no answer")
        return resolve(host, *arguments, flags=flags, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    dials = [asyncio.ensure_future(fetch_certificate(f"node.domain{number}.test:7700")) for number in range(36)]
    try:
        await asyncio.sleep(0.2)
        async with asyncio.timeout(2.0):
            await asyncio.to_thread(int)  # such as a step, or a look at a group
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            with pytest.raises(Unavailable, match="refused"):
                await asyncio.wait_for(fetch_certificate(f"localhost:{nobody.getsockname()[1]}"), 2.0)
    except TimeoutError:
        assert not is_defended
    else:
        assert is_defended
    finally:
        is_over.set()
        assert all(isinstance(each, Unavailable) for each in await asyncio.gather(*dials, return_exceptions=True))
