"""A test that fails in the middle leaves no server and no channel open."""

import asyncio

import pytest
from grpc import ChannelConnectivity
from grpc_ends import everything_closed

from swarm.clock import SystemClock
from swarm.identity import Identity
from swarm.wire.server import Sessions, start_server
from swarm.wire.session import AuthenticatedChannel, open_channel


async def test_what_a_failed_test_left_open_is_closed() -> None:
    sessions, channels, ports = Sessions(Identity.create(), "run", SystemClock()), list[AuthenticatedChannel](), [0]
    with pytest.raises(ZeroDivisionError):
        async with everything_closed():
            _, ports[0] = await start_server("127.0.0.1:0", sessions, [])
            endpoint = f"127.0.0.1:{ports[0]}"
            channels.append(await open_channel(endpoint, sessions.identity.node_id, Identity.create(), "run", 5.0))
            raise ZeroDivisionError
    assert channels[0].channel.get_state() is ChannelConnectivity.SHUTDOWN
    assert sessions.connections._thread is None
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", ports[0])
