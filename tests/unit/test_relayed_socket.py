"""A local socket for a relayed node: whatever is connected to it ends with it."""

import asyncio
import gc
import warnings
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
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
