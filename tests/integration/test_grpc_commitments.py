"""Commitments over real sockets: they come before the groups, and an attacker that is faster gains nothing by it."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

import pytest
from waits import until

from swarm.config import NodeConfig
from swarm.exchange.agent import Agent
from swarm.exchange.novelty import Novelty, commitment_of
from swarm.identity import Identity
from swarm.interfaces import PeerAddress, StreamItem
from swarm.loops.neighbours import NeighbourStream
from swarm.loops.notices import StreamPositions
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import HoldsNothing, make_group, make_identity
from swarm.testing.nodes import make_agent, make_context
from swarm.types import Cursor, Digest, NodeId, RolloutGroup, SealedGroup, StreamFilter
from swarm.wire.envelopes import seal_group
from tests.worlds.grpc_world import transport_of

ALICE, BOB, EVE = (make_identity(number) for number in range(1, 4))
CONFIG = NodeConfig()


def agent_of(identity: Identity) -> Agent:
    context = make_context(CONFIG, identity)
    return make_agent(context, MemoryGroupStore(context.clock, 10**8))


def original(number: int = 0) -> RolloutGroup:
    rng = random.Random(number)
    texts = ["7", *("".join(rng.choices("abcdefghijklmnop", k=7)) for _ in range(7))]
    return make_group(ALICE.node_id, texts=texts, logprob=-2.4)


@pytest.mark.parametrize("wants", [True, False], ids=["asked for", "not asked for"])
async def test_commitments_to_own_groups_come_ahead_of_all_of_them(wants: bool) -> None:
    agent, server, client = agent_of(ALICE), transport_of(ALICE, CONFIG.run_id), transport_of(BOB, CONFIG.run_id)
    groups = [original(number) for number in range(3)]
    for group in groups:
        await agent.own_groups.put(group)
    (endpoint,) = await server.serve(agent.streams)
    peer = await client.connect(PeerAddress(node_id=ALICE.node_id, endpoint=endpoint), 5.0)
    items: list[StreamItem] = []
    async for item in peer.subscribe(Cursor(), StreamFilter(wants_commitments=wants)):
        items.append(item)
        if sum(item.sealed is not None for item in items) == len(groups):
            break
    if wants:
        assert items[0].commitments == tuple(map(commitment_of, groups)) and not items[0].digest
    assert [bool(item.digest) for item in items] == [False] * wants + [True] * len(groups)


class SlowBodies(HoldsNothing):
    """A line on which the groups of a node are slow: what is small comes at once."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self.may_send = asyncio.Event()

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        async for item in self._agent.streams.subscribe(peer, cursor, wanted):
            if item.sealed is not None:
                await self.may_send.wait()
            yield item


class Thief(HoldsNothing):
    """Sends the answers of others under its own name, as soon as it has them."""

    def __init__(self) -> None:
        self.loot: asyncio.Queue[SealedGroup] = asyncio.Queue()

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        sealed = await self.loot.get()
        yield StreamItem(
            cursor=Cursor(epoch="e", sequence=1), digest=sealed.digest, size_bytes=sealed.size_bytes, sealed=sealed
        )
        await asyncio.Event().wait()


def stolen(group: RolloutGroup) -> SealedGroup:
    texts = [rollout.text for rollout in group.rollouts]
    return seal_group(make_group(EVE.node_id, texts=texts, logprob=-2.4), EVE)


async def test_the_original_wins_although_the_copy_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    commit, has_come = Novelty.commit, asyncio.Event()

    def note(novelty: Novelty, commitments: Sequence[Digest], via: NodeId) -> None:
        commit(novelty, commitments, via)
        if commitments:
            has_come.set()

    monkeypatch.setattr(Novelty, "commit", note)
    author, victim, thief = agent_of(ALICE), agent_of(BOB), Thief()
    servers = {ALICE: transport_of(ALICE, CONFIG.run_id), EVE: transport_of(EVE, CONFIG.run_id)}
    client, slow, rng = transport_of(BOB, CONFIG.run_id), SlowBodies(author), random.Random(0)
    handlers = {ALICE: slow, EVE: thief}
    async with asyncio.TaskGroup() as tasks:
        streams: list[NeighbourStream] = []
        for identity, server in servers.items():
            (endpoint,) = await server.serve(handlers[identity])
            address = PeerAddress(node_id=identity.node_id, endpoint=endpoint)
            streams.append(NeighbourStream(victim, client, address, False, StreamPositions(2**22), rng))
            streams[-1].start(tasks)
        await until(lambda: len(victim.peers.connected) == 2)
        group = original()
        victim.novelty.measure_own(group)  # what a token of its own engine is worth
        await author.own_groups.put(group)
        await has_come.wait()
        thief.loot.put_nowait(stolen(group))
        await until(lambda: victim.ingest.num_admitted + sum(victim.ingest.refusals.values()) == 1)
        slow.may_send.set()
        await until(lambda: victim.ingest.num_admitted + sum(victim.ingest.refusals.values()) == 2)
        held = [*victim.replay.digests]
        for stream in streams:
            stream.stop()
    assert held == [*author.replay.digests]
