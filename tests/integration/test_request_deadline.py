"""Calls of headers alone, without a request, against a real server: they hold the places of nobody else."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import grpc
import pytest

from swarm.clock import SystemClock
from swarm.errors import Unavailable
from swarm.identity import Identity
from swarm.wire import server as server_module
from swarm.wire.request_deadline import RequestDeadline
from swarm.wire.server import ServerLimits, Sessions, start_server
from swarm.wire.session import AuthenticatedChannel, open_channel

RUN = "request-deadline"
NUM_PLACES = 8


@pytest.fixture
async def sessions(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Sessions, str]]:
    short = partial(RequestDeadline, timeout_s=0.2, max_waiting=NUM_PLACES // 2)
    monkeypatch.setattr(server_module, "RequestDeadline", short)
    sessions = Sessions(Identity.create(), RUN, SystemClock(), ServerLimits(concurrent_calls=NUM_PLACES))
    server, port = await start_server("127.0.0.1:0", sessions, [])
    yield sessions, f"127.0.0.1:{port}"
    await server.stop(0)


async def open_one(sessions: Sessions, endpoint: str) -> AuthenticatedChannel | None:
    """A connection with a session; None where the server has no place for its calls."""
    try:
        return await open_channel(endpoint, sessions.identity.node_id, Identity.create(), RUN, 1.0)
    except Unavailable:
        return None


async def test_calls_without_a_request_hold_nobodys_place(sessions: tuple[Sessions, str]) -> None:
    attacker = await open_one(*sessions)
    assert attacker is not None
    begin: Any = attacker.channel.stream_unary("/swarm.wire.v1.SessionService/Challenge")
    half = [begin() for _ in range(2 * NUM_PLACES)]
    waiting = [asyncio.ensure_future(call.code()) for call in half]
    _, held = await asyncio.wait(waiting, timeout=10.0)
    honest = await open_one(*sessions)
    for call in half:
        call.cancel()
    codes = set(await asyncio.gather(*waiting))
    await attacker.close()
    assert not held and codes <= {grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED}
    assert honest is not None
    await honest.close()
