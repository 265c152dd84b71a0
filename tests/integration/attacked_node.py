"""A node that is attacked over real sockets: its groups come by gRPC, pass admission, and lie in SQLite on the disk.

Only its learner is left out: a test looks at the draw, and at the batch that a learner would make of it.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

from waits import until

from swarm.clock import ManualClock, SystemClock
from swarm.config import EntryConfig, ExchangeConfig, NodeConfig
from swarm.exchange.group_store import SqliteGroupStore
from swarm.exchange.grpc_transport import GrpcTransport
from swarm.identity import Identity
from swarm.interfaces import PeerAddress, StreamItem
from swarm.loops.neighbours import NeighbourStream
from swarm.loops.notices import StreamPositions
from swarm.objectives.batch import Batch
from swarm.objectives.draw_batch import make_batch
from swarm.testing.builders import HoldsNothing, ToyTokenizer, make_group, make_identity, toy_task
from swarm.testing.nodes import make_agent, make_context
from swarm.types import (
    Cursor,
    Draw,
    NodeId,
    PolicyVersion,
    RefusalReason,
    RolloutGroup,
    SealedGroup,
    StepReport,
    StreamFilter,
)
from swarm.wire.envelopes import seal_group

VICTIM = make_identity(1)


class Sender(HoldsNothing):
    """A peer with a key of its own that streams what it is told to, and follows no rule."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self._items = asyncio.Queue[SealedGroup]()

    def send(self, group: RolloutGroup) -> None:
        self.send_sealed(seal_group(group, self.identity))

    def send_sealed(self, sealed: SealedGroup) -> None:
        """Whoever signed it."""
        self._items.put_nowait(sealed)

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        number = 0
        while True:
            sealed = await self._items.get()
            number += 1
            cursor = Cursor(epoch="e", sequence=number)
            yield StreamItem(cursor=cursor, digest=sealed.digest, size_bytes=sealed.size_bytes, sealed=sealed)


class AttackedNode:
    """The victim: agent, store and streams. `members` may be empty: then it is a private run, where everybody counts.

    Example:
        async with AttackedNode(tmp_path) as node:
            eve = await node.follow(make_identity(5))
            eve.send(group)
            await node.judged(1)
    """

    def __init__(self, directory: Path, members: tuple[Identity, ...] = (), **sections: Any) -> None:
        entry = EntryConfig(members=tuple(member.node_id for member in members))
        self.config = NodeConfig(dir=directory, entry=entry, **sections)
        self.clock = ManualClock()
        self.num_draws = 0
        self._exit = AsyncExitStack()
        self._streams: list[NeighbourStream] = []

    async def __aenter__(self) -> Self:
        path = self.config.dir / "groups.sqlite"
        self.store = await SqliteGroupStore.open(path, self.clock, self.config.exchange.store_bytes)
        self._exit.push_async_callback(self.store.close)
        context = make_context(self.config, VICTIM, clock=self.clock)
        self.agent = make_agent(context, self.store, **self.parts())
        self.transport = self._transport(VICTIM)
        self._tasks = await self._exit.enter_async_context(asyncio.TaskGroup())
        self._exit.callback(self._stop_streams)
        await self.agent.local.publish(self.version)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit.aclose()

    def parts(self) -> dict[str, Any]:
        """Other parts of the agent than toy ones."""
        return {}

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(policy_id=VICTIM.node_id, step=0)

    def _transport(self, identity: Identity) -> GrpcTransport:
        transport = GrpcTransport(identity, self.config.run_id, ExchangeConfig(), SystemClock())
        self._exit.push_async_callback(transport.stop)
        return transport

    def _stop_streams(self) -> None:
        for stream in self._streams:
            stream.stop()

    async def follow(self, identity: Identity) -> Sender:
        """A peer at a socket of its own, whose groups the node takes from now on."""
        sender = Sender(identity)
        (endpoint,) = await self._transport(identity).serve(sender)
        self.stream_from(PeerAddress(node_id=identity.node_id, endpoint=endpoint))
        await until(lambda: identity.node_id in self.agent.peers.connected)
        return sender

    def stream_from(self, address: PeerAddress) -> NeighbourStream:
        """Takes groups from a peer until the node ends."""
        stream = NeighbourStream(self.agent, self.transport, address, False, StreamPositions(2**22), random.Random(0))
        stream.start(self._tasks)
        self._streams.append(stream)
        return stream

    async def judged(self, count: int) -> None:
        """Waits until so many groups were admitted or refused."""
        await until(lambda: self.num_judged >= count)

    @property
    def num_judged(self) -> int:
        return self.agent.ingest.num_admitted + sum(self.agent.ingest.refusals.values())

    @property
    def refused(self) -> dict[RefusalReason, int]:
        return {reason: count for reason, count in self.agent.ingest.refusals.items() if count}

    async def draw(self) -> Draw:
        """The groups of one more step: its own ones were made before the others came."""
        for number in range(self.config.replay.local_groups):
            task_id = 100_000 + 10 * self.num_draws + number
            await self.agent.own_groups.put(make_group(VICTIM.node_id, task_id=task_id))
        return await self.next_draw()

    async def next_draw(self) -> Draw:
        draw = await self.agent.local.draw(self.version)
        self.num_draws += 1
        report = StepReport(
            version=self.version,
            loss=0.0,
            grad_norm=0.0,
            num_tokens=1,
            was_skipped=False,
            diagnostics={},
            seconds={},
            draw_step=draw.step,
        )
        await self.agent.journal.settle(report)
        return draw

    async def drawn(self, num_draws: int) -> Counter[NodeId]:
        """Groups of others in so many draws, by who made them."""
        draws = [await self.draw() for _ in range(num_draws)]
        producers = [drawn.scored.group.producer for draw in draws for drawn in draw.groups]
        return Counter(producer for producer in producers if producer != VICTIM.node_id)


def batch_of(draw: Draw) -> Batch:
    """The batch that a learner makes of the groups."""
    return make_batch(draw, ToyTokenizer(), task_of=toy_task)
