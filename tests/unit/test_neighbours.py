"""What a neighbour can do to the node that follows it: talk without end, announce and not deliver, vanish, intrude."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from swarm.config import ExchangeConfig, NodeConfig
from swarm.exchange.admit import Door
from swarm.exchange.agent import Agent
from swarm.exchange.checks import DoorLimits
from swarm.exchange.memory_store import MemoryGroupStore
from swarm.exchange.replay import ReplayBuffer
from swarm.exchange.standing import Standing
from swarm.exchange.talk import ITEMS_PER_GROUP
from swarm.interfaces import PeerAddress, StreamItem
from swarm.loops import neighbours_loop
from swarm.simulate.virtual_loop import LoopClock, run_virtual
from swarm.testing import TOY_ENV, TOY_RUN_ID, ScriptedVerifier, ToyCodec, make_group, make_identity, make_sealed
from swarm.types import (
    Advert,
    Correction,
    Cursor,
    Digest,
    JsonDict,
    NodeId,
    PolicyVersion,
    RefusalReason,
    Role,
    SealedGroup,
    Wanted,
)

OURS, FIRST, SECOND, PRODUCER = (make_identity(number) for number in range(1, 5))


async def inline(function: Callable[..., Any], /, *arguments: object) -> Any:
    return function(*arguments)


def advert_of(node_id: NodeId, *roles: Role) -> Advert:
    return Advert(
        node_id=node_id,
        run_id=TOY_RUN_ID,
        endpoints=(f"{node_id[:8]}:1",),
        roles=roles or (Role.TRAINER,),
        tokenizer_digest=bytes(32),
        head=PolicyVersion(policy_id=node_id, step=0),
        oldest_step=0,
        num_groups=1,
        reward_mean=0.0,
        reward_std=0.0,
        correction=Correction.EXACT,
        held_bytes=0,
        cursor=Cursor(),
        expires_at_s=4e9,
    )


class Bench:
    """One node, and neighbours that do as they are told: transport and directory in one."""

    def __init__(self, **sections: Any) -> None:
        self.clock = LoopClock(asyncio.get_running_loop())
        self.standing = Standing(self.clock, 6000)
        self.events: list[tuple[str, JsonDict]] = []
        self.agent = self._agent(NodeConfig(**sections))
        self.neighbours: dict[NodeId, Neighbour] = {}
        self.adverts: list[Advert] = []

    def _agent(self, config: NodeConfig) -> Agent:
        store, verifier = MemoryGroupStore(self.clock, 2**26), ScriptedVerifier()
        door = Door(
            run_id=TOY_RUN_ID,
            node_id=OURS.node_id,
            codec=ToyCodec(),
            verifier=verifier,
            store=store,
            clock=self.clock,
            limits=DoorLimits.from_config(config),
            head_of=lambda _: None,
            environments=frozenset({TOY_ENV}),
            standing=self.standing,
            offload=inline,
        )
        return Agent(
            config=config,
            identity=OURS,
            store=store,
            replay=ReplayBuffer(config.replay, OURS.node_id, 0, self.clock),
            door=door,
            verifier=verifier,
            tokenizer_digest=ToyCodec().digest,
            clock=self.clock,
            emit=lambda kind, fields: self.events.append((kind, fields)),
        )

    def add(self, neighbour: "Neighbour") -> None:
        self.neighbours[neighbour.node_id] = neighbour
        self.adverts.append(advert_of(neighbour.node_id))

    def made(self, task_id: int) -> SealedGroup:
        return make_sealed(make_group(PRODUCER.node_id, task_id=task_id, created_at_s=self.clock.now_s()), PRODUCER)

    async def lookup(self) -> list[Advert]:
        return self.adverts

    async def connect(self, address: PeerAddress, timeout_s: float) -> "Neighbour":
        return self.neighbours[address.node_id]


class Neighbour:
    """Says its items, from wherever the follower left off, and then nothing."""

    def __init__(self, node_id: NodeId, items: list[StreamItem], after_s: float = 0.0) -> None:
        self.node_id = node_id
        self.items = items
        self.after_s = after_s
        self.num_said = 0
        self.fetched: list[Digest] = []

    async def subscribe(self, cursor: Cursor, wanted: Wanted) -> AsyncIterator[StreamItem]:
        await asyncio.sleep(self.after_s)
        for item in self.items[cursor.sequence :]:
            self.num_said += 1
            yield item
        await asyncio.Event().wait()

    async def fetch(self, digest: Digest, max_bytes: int, timeout_s: float) -> SealedGroup:
        raise NotImplementedError

    async def close(self) -> None:
        pass


def notice(number: int, digest: Digest, size_bytes: int = 100) -> StreamItem:
    return StreamItem(cursor=Cursor(epoch="e", sequence=number), digest=digest, size_bytes=size_bytes, sealed=None)


def play(scene: Callable[["Bench"], Awaitable[None]], **sections: Any) -> None:
    """Runs a scene in virtual time beside the node's loop."""

    async def main() -> None:
        bench = Bench(**sections)
        loop = asyncio.create_task(neighbours_loop(bench.agent, bench, bench, random.Random(0)))  # type: ignore[arg-type]
        try:
            await scene(bench)
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)

    run_virtual(main())


# --- talk without end -----------------------------------------------------------------------------------


@pytest.mark.parametrize("size_bytes", [2**40, 100])
def test_a_neighbour_that_announces_without_end_is_let_go_and_told_of(size_bytes: int) -> None:
    class Endless(Neighbour):
        async def subscribe(self, cursor: Cursor, wanted: Wanted) -> AsyncIterator[StreamItem]:
            while True:
                self.num_said += 1
                yield notice(self.num_said, known.digest, size_bytes)
                await asyncio.sleep(0.001)

    async def scene(bench: Bench) -> None:
        nonlocal known
        known = bench.made(1)
        await bench.agent.intake.receive(known, via=SECOND.node_id)
        endless = Endless(FIRST.node_id, [])
        bench.add(endless)
        await asyncio.sleep(10.0)
        assert not bench.agent.is_welcome(FIRST.node_id)
        assert endless.num_said <= 10 * ITEMS_PER_GROUP + 5
        assert bench.agent.intake.refusals == {RefusalReason.TOO_MUCH_TALK: 3}
        assert [f["producer"] for k, f in bench.events if k == "refused"] == [FIRST.node_id] * 3

    known: Any = None
    play(scene, exchange=ExchangeConfig(groups_per_minute=10))


def test_a_neighbour_with_a_long_backlog_and_steady_news_stays() -> None:
    async def scene(bench: Bench) -> None:
        backlog = bench.agent.config.replay.max_groups
        known = bench.made(1)
        await bench.agent.intake.receive(known, via=SECOND.node_id)

        class Honest(Neighbour):
            async def subscribe(self, cursor: Cursor, wanted: Wanted) -> AsyncIterator[StreamItem]:
                while True:
                    self.num_said += 1
                    yield notice(self.num_said, known.digest)
                    await asyncio.sleep(0.0 if self.num_said < backlog else 0.002)  # 30,000 a minute

        honest = Honest(FIRST.node_id, [])
        bench.add(honest)
        await asyncio.sleep(120.0)
        assert bench.agent.is_welcome(FIRST.node_id) and not bench.agent.intake.refusals
        assert honest.num_said > 60_000

    play(scene)


def test_groups_that_are_not_taken_count_as_received_bytes() -> None:
    async def scene(bench: Bench) -> None:
        sealed = bench.made(1)
        bench.agent.intake.takes_from = lambda peer: False  # type: ignore[method-assign]
        item = StreamItem(
            cursor=Cursor(epoch="e", sequence=1), digest=sealed.digest, size_bytes=sealed.size_bytes, sealed=sealed
        )
        bench.add(Neighbour(FIRST.node_id, [item]))
        await asyncio.sleep(5.0)
        assert bench.agent.intake.bytes_received == sealed.size_bytes

    play(scene)
