"""A local socket for a relayed node: whatever is connected to it ends with it."""

import asyncio
import gc
import os
import tempfile
import warnings
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from swarm.interfaces import PeerAddress
from swarm.relay.relay_client import RelayedSocket, RelaySessions
from swarm.testing.builders import make_identity

RELAY, NODE = (make_identity(number).node_id for number in (1, 2))


class NeverConnects:
    """Sessions with a relay that does not answer."""

    @asynccontextmanager
    async def call(self, relay: PeerAddress) -> AsyncGenerator[tuple[Any, Any]]:
        await asyncio.Event().wait()
        yield None, None


@pytest.mark.parametrize("turns", range(1, 8))  # with 0, asyncio itself drops what it had accepted
async def test_a_connection_of_any_age_is_closed_with_its_socket(turns: int) -> None:
    socket = RelayedSocket(
        cast(RelaySessions, NeverConnects()), PeerAddress(node_id=RELAY, endpoint="127.0.0.1:1"), NODE
    )
    with warnings.catch_warnings(record=True) as unclosed:
        warnings.simplefilter("always", ResourceWarning)
        async with socket as path:
            reader, writer = await asyncio.open_unix_connection(path)
            for _ in range(turns):
                await asyncio.sleep(0)
        async with asyncio.timeout(10):
            assert await reader.read() == b""
        writer.close()
        await writer.wait_closed()
        gc.collect()
    assert not [str(warning.message) for warning in unclosed if "unclosed" in str(warning.message)]


async def begun_and_left(self: RelayedSocket) -> str:
    """Mutation: what a thread is at when a dial is given up stays."""
    self._folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="swarm-relay-")
    return self._folder


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: begun and left"])
async def test_a_dial_that_is_given_up_leaves_no_folder_and_no_socket(
    is_defended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 120 dials through a relay, given up within .3 s, 11 left both."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    if not is_defended:
        monkeypatch.setattr(RelayedSocket, "__aenter__", begun_and_left)
    num_listening = 0
    for turns in range(12):
        socket = RelayedSocket(
            cast(RelaySessions, NeverConnects()), PeerAddress(node_id=RELAY, endpoint="127.0.0.1:1"), NODE
        )
        dialling = asyncio.ensure_future(socket.__aenter__())
        for _ in range(turns % 4):
            await asyncio.sleep(0)
        if turns >= 4:
            async with asyncio.timeout(10):
                while not socket._folder:  # noqa: ASYNC110 - a thread makes it
                    await asyncio.sleep(0)
            for _ in range(turns % 4):
                await asyncio.sleep(0)
        was_entered = dialling.done()
        dialling.cancel()
        await asyncio.gather(dialling, return_exceptions=True)
        if was_entered:
            await socket.close()
        num_listening += socket._server is not None and socket._server.is_serving()
    await asyncio.sleep(0.1)  # a thread that nobody waits for
    assert num_listening == 0 and (await asyncio.to_thread(os.listdir, tmp_path) == []) is is_defended
