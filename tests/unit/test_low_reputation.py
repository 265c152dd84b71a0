"""A peer that keeps sending what no honest node would is let go, and taken back when that is long ago."""

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from scenes import in_virtual_time

from swarm.errors import Unavailable
from swarm.exchange.agent import Agent
from swarm.interfaces import PeerAddress, StreamItem
from swarm.loops import neighbours_loop
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.simulate.virtual.loop import LoopClock
from swarm.testing.builders import make_advert, make_group, make_identity, make_sealed
from swarm.testing.nodes import make_agent, make_context
from swarm.types import (
    Advert,
    Cursor,
    Digest,
    NodeId,
    RefusalReason,
    SealedGroup,
    StreamFilter,
)

OURS, LIAR, HONEST = make_identity(1), make_identity(2), make_identity(3)


def agent_on(clock: LoopClock) -> Agent:
    return make_agent(make_context(identity=OURS, clock=clock), MemoryGroupStore(clock, 2**24))


def lie(number: int, clock: LoopClock) -> SealedGroup:
    group = make_group(LIAR.node_id, task_id=number, created_at_s=clock.now_s())
    false = replace(group.rollouts[0], claimed_reward=0.3)
    return make_sealed(replace(group, rollouts=(false, *group.rollouts[1:])), LIAR)


class Lies:
    """Transport and directory in one: two peers, one of which streams lies for ever."""

    def __init__(self, clock: LoopClock) -> None:
        self.clock = clock
        self.num_sent = 0
        self.open: list[NodeId] = []

    async def lookup(self) -> list[Advert]:
        return [make_advert(LIAR.node_id), make_advert(HONEST.node_id)]

    async def connect(self, address: PeerAddress, timeout_s: float) -> "Peer":
        self.open.append(address.node_id)
        return Peer(self, address.node_id)


class Peer:
    """A connection to one of the two."""

    def __init__(self, peers: Lies, node_id: NodeId) -> None:
        self._peers = peers
        self.node_id = node_id

    async def subscribe(self, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        while self.node_id == LIAR.node_id:
            self._peers.num_sent += 1
            sealed = lie(self._peers.num_sent, self._peers.clock)
            yield StreamItem(cursor=cursor, digest=sealed.digest, size_bytes=sealed.size_bytes, sealed=sealed)
            await asyncio.sleep(0.1)
        await asyncio.Event().wait()

    async def fetch(self, digest: Digest, max_bytes: int, timeout_s: float) -> SealedGroup:
        raise Unavailable("nothing to fetch")

    async def close(self) -> None:
        self._peers.open.remove(self.node_id)


@in_virtual_time
async def test_a_liar_is_not_followed_until_its_standing_has_decayed_and_the_others_go_on() -> None:
    clock = LoopClock(asyncio.get_running_loop())
    agent, peers = agent_on(clock), Lies(clock)
    following = asyncio.create_task(neighbours_loop(agent, peers, peers, random.Random(0)))  # type: ignore[arg-type]
    await asyncio.sleep(20.0)
    assert peers.open == [HONEST.node_id]
    sent = peers.num_sent
    assert 0 < sent < 10
    await asyncio.sleep(30.0)
    assert peers.num_sent == sent and not agent.ingest.refusals.get(RefusalReason.LOW_REPUTATION)
    await asyncio.sleep(300.0)
    assert peers.num_sent > sent, "nobody is condemned for ever"
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


@pytest.mark.parametrize("relay", [False, True])
@in_virtual_time
async def test_a_liar_loses_its_own_stream_at_once_even_when_nothing_is_new(relay: bool) -> None:
    clock = LoopClock(asyncio.get_running_loop())
    agent = agent_on(clock)

    async def read(peer: NodeId) -> list[StreamItem]:
        return [item async for item in agent.streams.subscribe(peer, Cursor(), StreamFilter(relay=relay))]

    liar, honest = asyncio.create_task(read(LIAR.node_id)), asyncio.create_task(read(HONEST.node_id))
    await asyncio.sleep(1.0)
    for number in range(5):
        await agent.ingest.receive(lie(number, clock), via=LIAR.node_id)
    with pytest.raises(Unavailable, match="reputation"):
        async with asyncio.timeout(1.0):
            await liar
    with pytest.raises(Unavailable, match="reputation"):
        await agent.streams.fetch(LIAR.node_id, bytes(32))
    assert not honest.done()
    honest.cancel()
    await asyncio.gather(honest, return_exceptions=True)
