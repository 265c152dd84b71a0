"""One node, and neighbours that do as they are told: streams, notices and fetches in virtual time."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from scenes import Scene, make_test

from swarm.config import NodeConfig
from swarm.errors import Unavailable
from swarm.events import Event
from swarm.exchange.agent import Agent
from swarm.identity import Identity
from swarm.interfaces import PeerAddress, StreamItem
from swarm.loops import neighbours_loop
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.simulate.virtual.loop import LoopClock, run_virtual
from swarm.testing.builders import make_advert, make_group, make_identity, make_sealed
from swarm.testing.nodes import make_agent, make_context
from swarm.types import Advert, Cursor, Digest, NodeId, RefusalReason, SealedGroup, StreamFilter

OURS, FIRST, SECOND, PRODUCER = (make_identity(number) for number in range(1, 5))


class Bench:
    """One node, and neighbours that do as they are told: transport and directory in one."""

    def __init__(self, parts: dict[str, Any] | None = None, **sections: Any) -> None:
        """`parts`: of the node's agent, in place of toy ones."""
        self.clock = LoopClock(asyncio.get_running_loop())
        self.events: list[Event] = []
        self.agent = self.node(OURS, NodeConfig(**sections), **(parts or {}))
        self.neighbours: dict[NodeId, Neighbour] = {}
        self.adverts: list[Advert] = []

    def node(self, identity: Identity, config: NodeConfig, **parts: Any) -> Agent:
        context = make_context(config, identity, clock=self.clock, emit=self.events.append)
        return make_agent(context, MemoryGroupStore(self.clock, 2**26), **parts)

    def add(self, neighbour: "Neighbour") -> None:
        self.neighbours[neighbour.node_id] = neighbour
        self.adverts.append(make_advert(neighbour.node_id))

    def drop(self, identity: Identity) -> None:
        """The node does not want that neighbour any more."""
        for _ in range(5):
            self.agent.reputation.record_refused(RefusalReason.MALFORMED, identity.node_id, identity.node_id)

    def made(self, task_id: int) -> SealedGroup:
        return make_sealed(make_group(PRODUCER.node_id, task_id=task_id, created_at_s=self.clock.now_s()), PRODUCER)

    async def lookup(self) -> list[Advert]:
        return self.adverts

    async def connect(self, address: PeerAddress, timeout_s: float) -> "Neighbour":
        if address.node_id not in self.neighbours:
            raise Unavailable("nobody there")
        return self.neighbours[address.node_id]


class Neighbour:
    """A neighbour that sends its items from the follower's cursor on, and then nothing."""

    def __init__(self, node_id: NodeId, items: list[StreamItem], after_s: float = 0.0) -> None:
        self.node_id = node_id
        self.items = items
        self.after_s = after_s
        self.num_said = 0
        self.fetched: list[Digest] = []

    async def subscribe(self, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        await asyncio.sleep(self.after_s)
        for item in self.items[cursor.sequence :]:
            self.num_said += 1
            yield item
        await asyncio.Event().wait()

    async def fetch(self, digest: Digest, max_bytes: int, timeout_s: float) -> SealedGroup:
        raise NotImplementedError

    async def close(self) -> None:
        pass


class Honest(Neighbour):
    """Delivers what it announces."""

    def __init__(self, node_id: NodeId, groups: list[SealedGroup], after_s: float = 0.0) -> None:
        super().__init__(node_id, [notice(n + 1, g.digest) for n, g in enumerate(groups)], after_s)
        self.groups = {sealed.digest: sealed for sealed in groups}

    async def fetch(self, digest: Digest, max_bytes: int, timeout_s: float) -> SealedGroup:
        self.fetched.append(digest)
        return self.groups[digest]


def notice(number: int, digest: Digest, size_bytes: int = 100) -> StreamItem:
    return StreamItem(cursor=Cursor(epoch="e", sequence=number), digest=digest, size_bytes=size_bytes, sealed=None)


def play(scene: Callable[["Bench"], Awaitable[None]], parts: dict[str, Any] | None = None, **sections: Any) -> None:
    """Runs a scene in virtual time beside the node's loop."""

    async def main() -> None:
        bench = Bench(parts, **sections)
        loop = asyncio.create_task(neighbours_loop(bench.agent, bench, bench, random.Random(0)))  # type: ignore[arg-type]
        try:
            await scene(bench)
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)

    run_virtual(main())


def scene(parts: dict[str, Any] | None = None, **sections: Any) -> Callable[[Scene], Scene]:
    """Makes a test of a coroutine: a scene beside the node's loop."""
    return lambda acts: make_test(acts, lambda act: play(act, parts, **sections), num_given=1)
