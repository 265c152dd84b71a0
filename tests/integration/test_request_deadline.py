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


class NoDeadline(grpc.aio.ServerInterceptor):
    """The server as gRPC makes it."""

    def __init__(self, *_: object) -> None:
        pass

    async def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        return await continuation(handler_call_details)


@pytest.fixture(params=[True, False], ids=["defended", "no deadline"])
def is_defended(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    short = partial(RequestDeadline, timeout_s=0.2, max_waiting=NUM_PLACES // 2)
    monkeypatch.setattr(server_module, "RequestDeadline", short if request.param else NoDeadline)
    return bool(request.param)


@pytest.fixture
async def sessions(is_defended: bool) -> AsyncIterator[tuple[Sessions, str]]:
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


async def test_calls_without_a_request_hold_nobodys_place(sessions: tuple[Sessions, str], is_defended: bool) -> None:
    attacker = await open_one(*sessions)
    assert attacker is not None
    begin: Any = attacker.channel.stream_unary("/swarm.wire.v1.SessionService/Challenge")
    half = [begin() for _ in range(2 * NUM_PLACES)]
    waiting = [asyncio.ensure_future(call.code()) for call in half]
    refused = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.DEADLINE_EXCEEDED)
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)  # all places are taken, or some were cleared
    if is_defended:
        assert {await code for code in waiting} <= set(refused)
        honest = await open_one(*sessions)
        assert honest is not None
        await honest.close()
    else:
        assert [await open_one(*sessions) for _ in range(3)] == [None] * 3
        assert sum(not code.done() for code in waiting) == NUM_PLACES
    for call, code in zip(half, waiting, strict=True):
        call.cancel()
        await asyncio.wait([code])
    await attacker.close()
