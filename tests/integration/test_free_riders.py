"""Free riders at a node whose uplink is full, over real sockets: those whose groups were admitted come first.

All connections to the node share one number of bytes a second. What each peer gave came over a socket, too.
"""

import asyncio
import socket
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from attacked_node import VICTIM, AttackedNode
from waits import until

from swarm.clock import SystemClock
from swarm.config import GeneratorConfig
from swarm.identity import Identity
from swarm.interfaces import PeerAddress, StreamItem
from swarm.testing.builders import make_group, make_identity
from swarm.types import Cursor, NodeId, RolloutGroup, Sampling, StreamFilter

GIVERS = [make_identity(number) for number in (10, 11)]
RIDERS = [make_identity(50 + number) for number in range(6)]
BYTES_PER_S, NUM_GROUPS, NUM_TAKEN = 700_000, 120, 30
TOKENS = 500  # of each wrong answer: a group is 10 KB


class NarrowUplink:
    """A line on which all connections to an endpoint share so many bytes a second."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at_s = 0.0

    async def _carry(self, num_bytes: int) -> None:
        now_s = asyncio.get_running_loop().time()
        self._free_at_s = max(self._free_at_s, now_s) + num_bytes / self._bytes_per_s
        await asyncio.sleep(self._free_at_s - now_s)

    @asynccontextmanager
    async def to(self, endpoint: str) -> AsyncGenerator[str]:
        """The near end of the line."""
        host, _, port = endpoint.rpartition(":")
        calls = set[asyncio.Task[None]]()

        async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_uplink: bool) -> None:
            with suppress(OSError):
                while data := await reader.read(4096):
                    if is_uplink:
                        await self._carry(len(data))
                    writer.write(data)
                    await writer.drain()

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far = socket.socket()
            far.setblocking(False)
            far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
            far.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 1460)  # packets as on a line, not of 64 KiB
            await asyncio.get_running_loop().sock_connect(far, (host, int(port)))
            from_node, to_node = await asyncio.open_connection(sock=far, limit=4096)
            try:
                async with asyncio.TaskGroup() as ways:
                    ways.create_task(copy(reader, to_node, is_uplink=False))
                    ways.create_task(copy(from_node, writer, is_uplink=True))
            finally:
                for end in (writer, to_node):
                    end.transport.abort()
                    with suppress(OSError):
                        await end.wait_closed()

        def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            calls.add(asyncio.ensure_future(forward(reader, writer)))

        server = await asyncio.start_server(begin, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)


class SendingNode(AttackedNode):
    """Has more groups than its uplink carries, and counts what peers got of them."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, generator=GeneratorConfig(max_new_tokens=TOKENS))
        self.clock = SystemClock()
        self.taken = Counter[NodeId]()

    def big_group(self, identity: Identity, task_id: int) -> RolloutGroup:
        """Ten kilobytes that cannot be packed."""
        rng = np.random.default_rng(task_id)
        wrong = ["".join(map(str, rng.integers(0, 10, TOKENS - 1))) for _ in range(4)]
        group = make_group(
            identity.node_id,
            task_id=task_id,
            texts=[str(task_id % 10)] * 4 + wrong,
            created_at_s=self.clock.now_s(),
            sampling=Sampling(max_new_tokens=TOKENS),
        )
        traces = [
            replace(each.trace, logprobs=-rng.random(len(each.trace.logprobs), np.float32))
            for each in group.rollouts
            if each.trace is not None and each.trace.logprobs is not None
        ]
        rollouts = tuple(replace(each, trace=trace) for each, trace in zip(group.rollouts, traces, strict=True))
        return replace(group, rollouts=rollouts)

    async def read_by(self, identity: Identity, endpoint: str, tasks: asyncio.TaskGroup) -> asyncio.Task[None]:
        """A peer that takes all that it can get."""
        client = await self._transport(identity).connect(PeerAddress(node_id=VICTIM.node_id, endpoint=endpoint), 10.0)
        return tasks.create_task(self._count(identity.node_id, client.subscribe(Cursor(), StreamFilter())))

    async def _count(self, node_id: NodeId, items: AsyncIterator[StreamItem]) -> None:
        async for item in items:
            self.taken[node_id] += item.sealed is not None


async def test_a_free_rider_has_hardly_any_of_a_full_uplink(tmp_path: Path) -> None:
    async with SendingNode(tmp_path) as node, AsyncExitStack() as stack:
        (endpoint,) = await node.transport.serve(node.agent.streams)
        for number, giver in enumerate(GIVERS):
            (await node.follow(giver)).send(node.big_group(giver, number))
        await node.judged(len(GIVERS))
        assert not node.refused
        for number in range(NUM_GROUPS):
            await node.agent.local.put(node.big_group(VICTIM, 100 + number))
        through = await stack.enter_async_context(NarrowUplink(BYTES_PER_S).to(endpoint))
        async with asyncio.TaskGroup() as tasks:
            reading = [await node.read_by(peer, through, tasks) for peer in (*GIVERS, *RIDERS)]
            before = node.taken.copy()
            await until(lambda: sum((node.taken - before)[each.node_id] for each in GIVERS) >= 2 * NUM_TAKEN)
            for task in reading:
                task.cancel()
        got = node.taken - before
        givers, riders = ([got[each.node_id] for each in peers] for peers in (GIVERS, RIDERS))
        # a fifteenth on an idle machine; 29 of 30 without the defence
        assert max(riders) <= 0.2 * min(givers), (givers, riders)
