"""Room for streams of peers: keys are free, addresses are not."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, cast

import pytest

from swarm.errors import Unavailable
from swarm.exchange import grpc_transport
from swarm.exchange.grpc_transport import ExchangeServicer

NUM_STREAMS = 8


@dataclass(frozen=True)
class PeerContext:
    """What a servicer asks of a call: where it comes from."""

    address: str

    def peer(self) -> str:
        return f"ipv4:{self.address}:4001"


async def hold(servicer: ExchangeServicer, peer: str, address: str, opened: asyncio.Queue[str]) -> str:
    """Holds one stream; returns why it ended."""
    try:
        async with servicer._one_stream(peer, cast(Any, PeerContext(address))):  # pyright: ignore[reportPrivateUsage] - the servicer's methods differ in nothing else
            opened.put_nowait(peer)
            await asyncio.Event().wait()
    except Unavailable as error:
        opened.put_nowait("")
        return str(error)
    raise AssertionError("the event is never set")


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "by keys alone"])
async def test_many_keys_of_one_subnet_hold_no_stream_of_others(
    monkeypatch: pytest.MonkeyPatch, is_defended: bool
) -> None:
    monkeypatch.setattr(grpc_transport, "STREAMS_TOTAL", NUM_STREAMS)
    if not is_defended:
        monkeypatch.setattr(grpc_transport, "peer_subnet", lambda peer: "everywhere")
    servicer = ExchangeServicer(cast(Any, None), cast(Any, None), stall_timeout_s=1.0)
    opened = asyncio.Queue[str]()
    async with AsyncExitStack() as stack:
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        hostile = [
            tasks.create_task(hold(servicer, f"key {number}", f"1.2.3.{number}", opened))
            for number in range(NUM_STREAMS)
        ]
        assert [await opened.get() for _ in hostile] == [f"key {number}" for number in range(NUM_STREAMS)]
        more = tasks.create_task(hold(servicer, "one more key", "1.2.3.99", opened))
        assert "streams are open" in await more
        assert await opened.get() == ""
        honest = tasks.create_task(hold(servicer, "honest", "5.6.7.8", opened))
        first = {await opened.get(), await opened.get()} if is_defended else {await opened.get()}
        assert first == ({"honest", ""} if is_defended else {""})
        assert sum(task.done() for task in hostile) == int(is_defended)
        for task in (*hostile, honest):
            task.cancel()
