"""The upload limit over real connections: streams, fetches and chunks of weights leave within one rate together."""

import asyncio
import hashlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
from sealed_groups import seal_bytes

from swarm.clock import SystemClock
from swarm.config import ExchangeConfig
from swarm.exchange.grpc_transport import GrpcTransport, PeerHooks
from swarm.identity import Identity
from swarm.interfaces import PeerAddress, PeerClient, StreamItem
from swarm.peers.send_order import BURST_S
from swarm.testing.builders import HoldsNothing
from swarm.types import Cursor, Digest, NodeId, SealedGroup, StreamFilter

RATE = 1_000_000
SIZE = 100_000
FOR_S = 3.0


@dataclass
class Endless(HoldsNothing):
    """Has one group and one chunk, and sends the group again and again."""

    group: SealedGroup
    data: bytes

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        for number in range(10**6):
            at = Cursor(epoch="one", sequence=number)
            yield StreamItem(cursor=at, digest=self.group.digest, size_bytes=SIZE, sealed=self.group)

    async def fetch(self, peer: NodeId, digest: Digest) -> SealedGroup:
        return self.group

    async def chunk(self, peer: NodeId, digest: Digest) -> bytes:
        return self.data


class Reader:
    """Takes as much as comes, in three ways at once."""

    def __init__(self, client: PeerClient, held: Endless) -> None:
        self.client, self.held = client, held
        self.of = {"stream": 0, "fetch": 0, "chunk": 0}

    async def read(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._stream())
            tasks.create_task(self._fetch())
            tasks.create_task(self._chunks())

    async def _stream(self) -> None:
        wanted = StreamFilter(relay=False, wants_zero_variance=False, wants_turn_signal=False, wants_commitments=False)
        async for item in self.client.subscribe(Cursor(), wanted):
            self.of["stream"] += item.size_bytes

    async def _fetch(self) -> None:
        while True:
            self.of["fetch"] += len((await self.client.fetch(self.held.group.digest, 2 * SIZE, 30.0)).body)

    async def _chunks(self) -> None:
        while True:
            self.of["chunk"] += len(await self.client.fetch_chunk(hashlib.sha256(self.held.data).digest(), 30.0))


@pytest.mark.parametrize("rate", [RATE, 0], ids=["limited", "without a limit"])
async def test_all_that_leaves_keeps_to_one_rate_and_givers_go_first(rate: int) -> None:
    giver, taker, owner = Identity.create(), Identity.create(), Identity.create()
    body = random.Random(0).randbytes(SIZE)
    held = Endless(seal_bytes(body, owner), body)
    config = ExchangeConfig(max_upload_bytes_per_s=rate, relay_reservations=0)
    hooks = PeerHooks(is_giver=lambda node_id: node_id == giver.node_id)
    server = GrpcTransport(owner, "run", config, SystemClock(), hooks=hooks)
    clients = [GrpcTransport(each, "run", ExchangeConfig(), SystemClock()) for each in (giver, taker)]
    try:
        (endpoint,) = await server.serve(held)
        address = PeerAddress(node_id=owner.node_id, endpoint=endpoint)
        readers = [Reader(await client.connect(address, 10.0), held) for client in clients]
        began_s = time.monotonic()
        reading = [asyncio.create_task(reader.read()) for reader in readers]
        await asyncio.sleep(FOR_S)
        took_s = time.monotonic() - began_s
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        of_giver, of_taker = ([*reader.of.values()] for reader in readers)
        total = sum(of_giver) + sum(of_taker)
        if not rate:
            assert total > 2 * RATE * (took_s + BURST_S), "the limit is what the other case measures"
            return
        assert total <= RATE * (took_s + BURST_S) + SIZE
        assert total >= 0.6 * RATE * took_s, "it is used, on a busy machine, too"
        assert all(of_giver), "no way of sending starves another"
        assert sum(of_giver) > 2 * sum(of_taker)
    finally:
        await asyncio.gather(*(transport.stop() for transport in (*clients, server)))
