"""Adverts of fresh keys without end: the head of a lineage whose groups come stays known, and nobody pays for it."""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from swarm.config import ExchangeConfig, NodeConfig
from swarm.errors import Unavailable
from swarm.exchange.agent import Agent
from swarm.flow import BoundedTable
from swarm.interfaces import PeerAddress, StreamItem
from swarm.loops import neighbours_loop
from swarm.peers.peer_table import MAX_PEERS, Peers
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.simulate.virtual.loop import LoopClock, run_virtual
from swarm.testing.builders import make_advert, make_group, make_identity, make_sealed
from swarm.testing.nodes import make_agent, make_context
from swarm.types import (
    Advert,
    Cursor,
    PolicyVersion,
    RefusalReason,
    Refused,
    ScoredGroup,
    SealedGroup,
    StreamFilter,
    VersionSpan,
)

OURS, TRAINER, GENERATOR, OTHER = (make_identity(number) for number in range(1, 5))
NUM_LOOKUPS = 6
PER_LOOKUP = 1100  # of strangers a node looks at 1,024


class Flooded:
    """Directory and network of one node, which has a generator as its neighbour and never met that one's trainer."""

    def __init__(self) -> None:
        self.clock = LoopClock(asyncio.get_running_loop())
        config = NodeConfig(exchange=ExchangeConfig(lookup_every_s=1.0))
        context = make_context(config, OURS, clock=self.clock)
        self.agent: Agent = make_agent(context, MemoryGroupStore(self.clock, 2**26))
        version = PolicyVersion(policy_id=TRAINER.node_id, step=3)
        self.generator = replace(make_advert(GENERATOR.node_id), head=version)
        self.trainer = replace(make_advert(TRAINER.node_id, endpoints=()), head=version)
        self.is_flooding = False
        self.num_lookups = 0

    async def lookup(self) -> list[Advert]:
        self.num_lookups += 1
        if not self.is_flooding:
            return [self.generator, self.trainer]
        names = (hashlib.sha256(f"{self.num_lookups} {n}".encode()).hexdigest() for n in range(PER_LOOKUP))
        return [self.generator, *(make_advert(name, endpoints=()) for name in names)]

    async def connect(self, address: PeerAddress, timeout_s: float) -> "Flooded":
        if address.node_id != GENERATOR.node_id:
            raise Unavailable("nobody there")
        return self

    async def subscribe(self, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        await asyncio.Event().wait()
        yield  # type: ignore[misc]

    async def close(self) -> None:
        pass

    def made(self, task_id: int, step: int = 3, producer: str = GENERATOR.node_id) -> SealedGroup:
        group = make_group(producer, task_id=task_id, created_at_s=self.clock.now_s())
        spans = (VersionSpan(start=0, version=PolicyVersion(policy_id=TRAINER.node_id, step=step)),)
        rollouts = tuple(replace(r, trace=replace(r.trace, spans=spans)) for r in group.rollouts if r.trace)
        identity = GENERATOR if producer == GENERATOR.node_id else OTHER
        return make_sealed(replace(group, policy_id=TRAINER.node_id, rollouts=rollouts), identity)

    async def offer(self, sealed: SealedGroup) -> ScoredGroup | Refused:
        return await self.agent.ingest.receive(sealed, via=GENERATOR.node_id)

    async def flood(self) -> None:
        self.is_flooding, before = True, self.num_lookups
        while self.num_lookups < before + NUM_LOOKUPS:  # noqa: ASYNC110 - the node's loop raises it
            await asyncio.sleep(1.0)


def after_the_flood(*, delivers_before: bool) -> tuple[list[ScoredGroup | Refused], Flooded]:
    """The fate of the generator's groups once the directory has named 6,600 fresh keys."""

    async def scene() -> tuple[list[ScoredGroup | Refused], Flooded]:
        flooded = Flooded()
        loop = asyncio.create_task(neighbours_loop(flooded.agent, flooded, flooded, random.Random(0)))  # type: ignore[arg-type]
        try:
            await asyncio.sleep(5.0)
            assert flooded.agent.peers.connected == {GENERATOR.node_id}
            if delivers_before:
                assert isinstance(await flooded.offer(flooded.made(1)), ScoredGroup)
            await flooded.flood()
            assert len(flooded.agent.peers.heads) == MAX_PEERS
            return [await flooded.offer(flooded.made(number)) for number in range(2, 8)], flooded
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)

    return run_virtual(scene())


@pytest.mark.parametrize("delivers_before", [True, False])
def test_fresh_adverts_push_out_no_head_of_a_lineage_in_use(delivers_before: bool) -> None:
    results, _ = after_the_flood(delivers_before=delivers_before)
    assert all(isinstance(result, ScoredGroup) for result in results)


def test_where_the_head_is_lost_the_groups_are_refused_and_their_producer_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is lost as no head is kept."""
    monkeypatch.setattr(Peers, "is_in_use", lambda self, policy_id: False)
    results, flooded = after_the_flood(delivers_before=True)
    assert [type(result) for result in results] == [Refused] * 6
    assert flooded.agent.ingest.refusals[RefusalReason.UNKNOWN_HEAD] >= 5
    assert flooded.agent.reputation.is_allowed(GENERATOR.node_id)


def test_a_producer_that_is_far_ahead_of_what_is_known_here_is_not_charged() -> None:
    """We were away, or stopped, while its trainer went on."""

    async def scene() -> None:
        flooded = Flooded()
        flooded.agent.peers.observe([flooded.trainer])
        result = await flooded.offer(flooded.made(1, step=5000))
        assert isinstance(result, Refused) and result.reason is RefusalReason.UNKNOWN_HEAD
        assert flooded.agent.reputation.score(GENERATOR.node_id) == 0.0

    run_virtual(scene())


def test_of_what_is_kept_the_oldest_makes_room_where_all_is_kept() -> None:
    table = BoundedTable[int, None](8, lambda key: True)
    for key in range(200):
        table[key] = None
        assert key in table and len(table) == min(key + 1, 8)


def test_up_to_half_of_a_table_is_kept_whatever_comes() -> None:
    table = BoundedTable[int, None](8, lambda key: key < 100)
    for key in (1, 2, 3, *range(200, 1000)):
        table[key] = None
    assert {1, 2, 3} < set(table) and len(table) == 8
