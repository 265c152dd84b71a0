"""Requests that are answered later: one owner of many leaves room for others."""

import asyncio

import pytest

from swarm.extras.tinker import tinker_futures
from swarm.extras.tinker.tinker_futures import Promises, Reply
from swarm.serving.openai_requests import RequestRefused


async def never() -> Reply:
    await asyncio.Event().wait()
    return b""


async def test_a_session_whose_requests_all_wait_locks_nobody_else_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tinker_futures, "MAX_OPEN_OF_OWNER", 3)
    promises = Promises()
    for number in range(3):
        promises.begin(f"one:{number}", "one", never())
    with pytest.raises(RequestRefused, match="3 requests of this session are under way"):
        promises.begin("one:3", "one", never())
    promises.begin("other:0", "other", never())
    await asyncio.sleep(0)  # they begin
    for owner in ("one", "other"):
        promises.cancel_of(owner)
    assert await promises.wait("other:0", 10.0) == {"error": "it was cancelled", "category": "user"}
