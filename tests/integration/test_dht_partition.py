"""Two DHT nodes whose every connection runs through a relay that can be cut: a partition as the network makes it.

While cut, nothing is forwarded and nothing is refused: bytes wait and new connections hang, as on a route
that is gone. The nodes announce only their relay's address, so no direct path exists between them.
"""

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import psutil
import pytest
from waits import until

from swarm.clock import SystemClock
from swarm.config import DirectoryConfig
from swarm.errors import Unavailable
from swarm.identity import Identity
from swarm.peers.discovery_dht import HivemindDirectory
from swarm.types import Advert, Correction, Cursor, PolicyVersion, Role

pytest.importorskip("hivemind")

RUN = "dht-partition"
MAINTAIN_EVERY_S = 5.0


@dataclass
class Relay:
    """Forwards TCP to a port of this machine while the link is up."""

    target: int
    link: asyncio.Event
    port: int = 0
    num_forwarded: int = 0  # bytes
    server: asyncio.Server | None = None
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    async def start(self) -> None:
        self.server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self.server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self.server is not None
        self.server.close()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(self._connect(reader, writer))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward: asyncio.StreamWriter | None = None
        try:
            await self.link.wait()
            back, onward = await asyncio.open_connection("127.0.0.1", self.target)
            there, here = self._pump(reader, onward), self._pump(back, writer)
            await asyncio.wait(
                [asyncio.ensure_future(there), asyncio.ensure_future(here)], return_when="FIRST_COMPLETED"
            )
        except OSError:
            pass  # nobody listens there (any more): the caller sees its connection end
        finally:
            for end in (writer, onward):
                if end is not None:
                    end.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(65536):
                await self.link.wait()
                writer.write(data)
                await writer.drain()
                self.num_forwarded += len(data)


@dataclass
class Side:
    """One node behind its relay."""

    identity: Identity
    relay: Relay
    directory: HivemindDirectory
    step: int = 0

    async def announce(self, ttl_s: float = 90.0) -> None:
        self.step += 1
        await self.directory.announce(advert_of(self.identity, self.step, ttl_s))

    async def steps(self) -> dict[str, int]:
        """Newest step seen of each node, by node id; none while the directory says that nobody answers."""
        try:
            adverts = await self.directory.lookup()
        except Unavailable:
            return {}
        return {advert.node_id: advert.head.step for advert in adverts}

    async def keep_house(self) -> None:
        """Repairs the directory as a node does, one round after another."""
        while True:
            with suppress(Unavailable):
                await self.directory.maintain()
            await asyncio.sleep(MAINTAIN_EVERY_S)


def advert_of(identity: Identity, step: int, ttl_s: float) -> Advert:
    return Advert(
        node_id=identity.node_id,
        run_id=RUN,
        endpoints=("127.0.0.1:4000",),
        roles=(Role.TRAINER,),
        tokenizer_digest=bytes(32),
        head=PolicyVersion(policy_id=identity.node_id, step=step, digest=bytes(32)),
        oldest_step=0,
        num_groups=1,
        reward_mean=0.5,
        reward_std=0.25,
        correction=Correction.EXACT,
        held_bytes=1000,
        cursor=Cursor(epoch="e", sequence=1),
        expires_at_s=time.time() + ttl_s,
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Pair:
    west: Side
    east: Side
    link: asyncio.Event

    def cut(self) -> None:
        self.link.clear()

    def heal(self) -> None:
        self.link.set()

    @property
    def num_forwarded(self) -> int:
        return self.west.relay.num_forwarded + self.east.relay.num_forwarded

    def direct_connections(self) -> list[Any]:
        """Connections of one daemon to the other's listening port, past the relay."""
        ports = {self.west.relay.target: self.west, self.east.relay.target: self.east}
        daemons = [side.directory.daemon_pid for side in (self.west, self.east)]
        return [
            connection
            for pid in daemons
            for connection in psutil.Process(pid).net_connections("tcp")
            if connection.raddr and connection.raddr.port in ports
        ]

    async def each_sees_the_newest_of_the_other(self) -> bool:
        expected = {side.identity.node_id: side.step for side in (self.west, self.east)}
        return await self.west.steps() == expected and await self.east.steps() == expected


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    link, sides = asyncio.Event(), list[Side]()
    link.set()
    for _ in range(2):
        identity, relay = Identity.create(), Relay(free_port(), link)
        await relay.start()
        config = DirectoryConfig(
            listen=f"/ip4/127.0.0.1/tcp/{relay.target}",
            announce=(f"/ip4/127.0.0.1/tcp/{relay.port}",),
            bootstrap=sides[0].directory.visible_maddrs() if sides else (),
        )
        directory = await HivemindDirectory.start(identity, RUN, config, SystemClock(), None)
        assert all(f"/tcp/{relay.port}/" in address for address in directory.visible_maddrs())
        sides.append(Side(identity, relay, directory))
    yield Pair(sides[0], sides[1], link)
    link.set()
    for side in sides:
        await side.directory.stop()
        await side.relay.stop()


async def survive(pair: Pair, partition_s: float, ttl_s: float) -> None:
    """Cuts the link while both nodes keep house and refresh, and waits until each sees the other again."""
    for side in (pair.west, pair.east):
        await side.announce(ttl_s)
    assert await pair.each_sees_the_newest_of_the_other()
    assert pair.num_forwarded > 0 and not pair.direct_connections()
    async with asyncio.TaskGroup() as group:
        keepers = [group.create_task(side.keep_house()) for side in (pair.west, pair.east)]
        try:
            await apart(pair, partition_s, ttl_s)
            pair.heal()
            await until(pair.each_sees_the_newest_of_the_other)
        finally:
            for keeper in keepers:
                keeper.cancel()


async def apart(pair: Pair, partition_s: float, ttl_s: float) -> None:
    """The partition itself: each side refreshes its advert, and neither hears of the other."""
    old = {side.identity.node_id: side.step for side in (pair.west, pair.east)}
    pair.cut()
    until_s = time.monotonic() + partition_s
    await asyncio.sleep(0.5)  # what is on its way into a relay when the link goes still counts as sent
    num_forwarded = pair.num_forwarded
    while (left_s := until_s - time.monotonic()) > 0:
        for side in (pair.west, pair.east):
            with suppress(Unavailable):
                await side.announce(ttl_s)
        await asyncio.sleep(min(max(left_s, 0.0), ttl_s / 3))
    assert pair.num_forwarded == num_forwarded, "the cut leaks"
    for side, other in ((pair.west, pair.east), (pair.east, pair.west)):
        seen = (await side.steps()).get(other.identity.node_id)
        assert other.step > old[other.identity.node_id]
        assert seen is None or (seen == old[other.identity.node_id] and partition_s < ttl_s)


@pytest.mark.sweep
async def test_a_short_partition_heals(pair: Pair) -> None:
    await survive(pair, partition_s=10.0, ttl_s=60.0)


@pytest.mark.sweep
async def test_a_partition_of_90_seconds_outlives_every_advert_and_heals(pair: Pair) -> None:
    await survive(pair, partition_s=90.0, ttl_s=60.0)
