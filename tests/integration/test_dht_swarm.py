"""Real DHT peers on loopback find each other, survive deaths and heal."""

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from waits import has_ended, until

from swarm.clock import SystemClock
from swarm.config import DirectoryConfig
from swarm.errors import ConfigError, Unavailable
from swarm.identity import Identity
from swarm.peers.discovery_dht import HivemindDirectory
from swarm.types import Advert, Correction, Cursor, NodeId, PolicyVersion, Role
from swarm.wire.adverts import seal_advert

pytest.importorskip("hivemind")

RUN = "dht-test"


def advert_of(identity: Identity, step: int = 1, ttl_s: float = 90.0) -> Advert:
    return Advert(
        node_id=identity.node_id,
        run_id=RUN,
        endpoints=("127.0.0.1:4000",),
        roles=(Role.TRAINER, Role.GENERATOR),
        tokenizer_digest=bytes(32),
        head=PolicyVersion(policy_id=identity.node_id, step=step, digest=bytes(32)),
        oldest_step=0,
        num_groups=3,
        reward_mean=0.5,
        reward_std=0.25,
        correction=Correction.EXACT,
        held_bytes=1000,
        cursor=Cursor(epoch="e", sequence=7),
        expires_at_s=time.time() + ttl_s,
    )


class Swarm:
    """DHT directories of one test, stopped at its end."""

    def __init__(self) -> None:
        self.members: list[tuple[Identity, HivemindDirectory]] = []

    async def join(
        self,
        *bootstrap: str,
        identity: Identity | None = None,
        cache: Path | None = None,
        shards: int = 1,
        is_outward: Callable[[], bool] = lambda: False,
    ) -> HivemindDirectory:
        identity = identity or Identity.create()
        config = DirectoryConfig(bootstrap=bootstrap, shards=shards)
        directory = await HivemindDirectory.start(identity, RUN, config, SystemClock(), cache, is_outward=is_outward)
        self.members.append((identity, directory))
        return directory

    async def grow(self, num_nodes: int, shards: int = 1) -> list[HivemindDirectory]:
        first = await self.join(shards=shards)
        for _ in range(num_nodes - 1):
            await self.join(*first.visible_maddrs(), shards=shards)
        return [directory for _, directory in self.members]

    async def announce_all(self) -> None:
        for identity, directory in self.members:
            await directory.announce(advert_of(identity))

    def ids(self) -> set[NodeId]:
        return {identity.node_id for identity, _ in self.members}


@pytest.fixture
async def swarm() -> AsyncIterator[Swarm]:
    it = Swarm()
    yield it
    for _, directory in it.members:
        await directory.stop()


async def strike(pid: int, how: signal.Signals) -> None:
    """Sends a signal and waits until it has had its effect."""
    os.kill(pid, how)
    await until(lambda: has_ended(pid) or psutil.Process(pid).status() == psutil.STATUS_STOPPED)


async def sees(directory: HivemindDirectory) -> set[NodeId]:
    return {advert.node_id for advert in await directory.lookup()}


def children(name: str = "p2pd", of: int | None = None) -> list[psutil.Process]:
    return [child for child in psutil.Process(of).children(recursive=True) if child.name() == name]


async def test_a_start_that_fails_in_hivemind_leaves_no_daemon(swarm: Swarm, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(node: object) -> None:
        raise KeyError("of hivemind")

    monkeypatch.setattr("swarm.peers.dht_node.bound_calls", fail)
    before = {child.pid for child in children()}
    with pytest.raises(Unavailable, match="cannot be used: KeyError"):
        await swarm.join()

    async def is_gone() -> bool:
        return {child.pid for child in children()} <= before

    await until(is_gone)


async def test_the_only_node_that_others_can_ask_passes_on_adverts_among_those_who_only_ask(swarm: Swarm) -> None:
    server = await swarm.join()  # a coordinator, of a run whose nodes are all at home
    home = await swarm.join(*server.visible_maddrs(), is_outward=lambda: True)
    home_id = swarm.members[-1][0]
    await home.announce(advert_of(home_id))
    office = Identity.create()  # it cannot reach the directory at all, and has a relay ask and announce for it
    data = seal_advert(advert_of(office), office)
    assert await server.pass_on(data)
    assert await sees(home) == {home_id.node_id, office.node_id}
    assert data in await server.records() and len(await server.records()) == 2


async def test_a_node_that_left_is_found_again_though_its_clock_was_set_back(swarm: Swarm) -> None:
    """Its last word, without an address, was the newest of its adverts for as long as its clock had been ahead."""
    reader, node = await swarm.grow(2)
    identity = swarm.members[1][0]
    await node.announce(dataclasses.replace(advert_of(identity, ttl_s=150.0), endpoints=()))
    await node.stop()
    again = await swarm.join(*reader.visible_maddrs(), identity=identity)
    await again.lookup()  # as a node does every two seconds
    await again.announce(advert_of(identity))
    found = [advert.endpoints for advert in await reader.lookup() if advert.node_id == identity.node_id]
    assert found == [advert_of(identity).endpoints]


@pytest.mark.sweep
async def test_a_bootstrap_peer_that_is_silent_does_not_stand_for_the_directory(swarm: Swarm) -> None:
    """A laptop moves to a network that hides it; free keys near every shard are all that it asks from then on."""
    server = await swarm.join()
    laptop = await swarm.join(*server.visible_maddrs(), is_outward=lambda: True)
    assert laptop.is_bootstrapped
    await strike(server.daemon_pid, signal.SIGSTOP)
    await laptop.maintain()
    assert not laptop.is_bootstrapped
    os.kill(server.daemon_pid, signal.SIGCONT)
    await laptop.maintain()
    assert laptop.is_bootstrapped, "and again once it answers"


async def test_a_node_that_moves_behind_a_router_is_asked_no_more_and_again_once_it_is_back(swarm: Swarm) -> None:
    is_home = False
    server = await swarm.join()
    laptop = await swarm.join(*server.visible_maddrs(), is_outward=lambda: is_home)
    await swarm.announce_all()
    assert (server.num_peers, laptop.num_peers) == (1, 1)
    is_home = True
    await laptop.maintain()
    assert laptop.is_bootstrapped and not server.is_bootstrapped
    restarted = await swarm.join(*server.visible_maddrs())  # knows nobody but whom the server names
    assert restarted.num_peers == 1 and await sees(restarted) == swarm.ids() - {swarm.members[-1][0].node_id}
    is_home = False
    await laptop.maintain()

    async def is_named() -> bool:
        await restarted.maintain()
        return restarted.num_peers == 2

    await until(is_named)
    assert laptop.num_restarts == 0, "nothing was dead"


async def test_a_question_to_the_daemon_that_is_cancelled_leaves_no_connection(swarm: Swarm) -> None:
    (node,) = await swarm.grow(1)
    assert node._peer is not None
    for turns in range(12):
        asking = asyncio.ensure_future(node._peer.connected())
        for _ in range(turns):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    gc.collect()  # what is not closed warns, which is an error


@pytest.mark.parametrize("shards", [1, 4])
async def test_eight_nodes_find_each_other_through_one_bootstrap_peer(swarm: Swarm, shards: int) -> None:
    nodes = await swarm.grow(8, shards)
    await swarm.announce_all()
    for node in nodes:
        assert await sees(node) == swarm.ids()


async def test_a_newer_advert_replaces_the_older_one_everywhere(swarm: Swarm) -> None:
    nodes = await swarm.grow(3)
    await swarm.announce_all()
    identity, node = swarm.members[1]
    await node.announce(advert_of(identity, step=9, ttl_s=95.0))
    for reader in nodes:
        steps = {advert.node_id: advert.head.step for advert in await reader.lookup()}
        assert steps[identity.node_id] == 9


async def test_an_advert_vanishes_when_it_expires(swarm: Swarm) -> None:
    nodes = await swarm.grow(3)
    identity, node = swarm.members[1]
    steps, expires_at_s = itertools.count(1), 0.0

    async def is_seen() -> bool:  # one that expires before it was looked up is announced again
        nonlocal expires_at_s
        advert = advert_of(identity, step=next(steps), ttl_s=1.5)
        await node.announce(advert)
        expires_at_s = advert.expires_at_s
        return identity.node_id in await sees(nodes[2])

    async def is_gone() -> bool:
        return identity.node_id not in await sees(nodes[2])

    await until(is_seen)
    await until(is_gone)
    assert time.time() >= expires_at_s


async def test_a_newcomer_joins_through_another_node_after_the_bootstrap_peer_died(swarm: Swarm) -> None:
    nodes = await swarm.grow(4)
    dead = nodes[0].visible_maddrs()
    await swarm.members.pop(0)[1].stop()
    newcomer = await swarm.join(*dead, *nodes[2].visible_maddrs())
    await swarm.announce_all()
    assert await sees(newcomer) == swarm.ids()
    assert await sees(nodes[1]) == swarm.ids()


async def test_a_node_without_a_living_bootstrap_peer_runs_alone_and_is_found_once_one_lives(
    swarm: Swarm, caplog: pytest.LogCaptureFixture
) -> None:
    identity = Identity.create()
    gone = await HivemindDirectory.start(identity, RUN, DirectoryConfig(), SystemClock(), None)
    address = gone.visible_maddrs()[0]
    await gone.stop()
    lonely = await swarm.join(address)
    assert lonely.num_peers == 0 and not lonely.is_bootstrapped
    assert caplog.text.count("no DHT peer answers") == 1
    await swarm.announce_all()
    assert await sees(lonely) == swarm.ids()
    config = DirectoryConfig(listen=address.rpartition("/p2p/")[0])
    back = await HivemindDirectory.start(identity, RUN, config, SystemClock(), None)
    swarm.members.append((identity, back))
    assert back.visible_maddrs() == (address,)  # the peer id outlives the process, so old links go on working

    async def found() -> bool:  # libp2p redials an address that failed only after five seconds
        await lonely.maintain()
        return await sees(back) == {swarm.members[0][0].node_id}

    await until(found)
    assert caplog.text.count("no DHT peer answers") == 1, "once, however often it is tried"


async def test_known_peers_on_disk_replace_a_dead_bootstrap_peer(swarm: Swarm, tmp_path: Path) -> None:
    nodes, cache, identity = await swarm.grow(3), tmp_path / "node" / "peers.json", Identity.create()
    first = await swarm.join(*nodes[0].visible_maddrs(), identity=identity, cache=cache)
    await first.maintain()
    assert len(json.loads(cache.read_text())) == 3
    await swarm.members.pop()[1].stop()
    await swarm.members.pop(0)[1].stop()
    again = await swarm.join(*nodes[0].visible_maddrs(), identity=identity, cache=cache)
    await swarm.announce_all()
    assert await sees(again) == swarm.ids()


async def test_a_broken_peer_cache_costs_nothing(swarm: Swarm, tmp_path: Path) -> None:
    cache = tmp_path / "peers.json"
    for text in ("{", "{}", '[1, null, "/ip4/1.2.3.4/udp/1/p2p/x"]', "\xff\xfe"):
        cache.write_text(text, encoding="latin-1")
        node = await swarm.join(cache=cache)
        assert node.num_peers == 0


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_maintain_rebuilds_a_daemon_that_was_killed_or_hangs(
    swarm: Swarm, how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.peers.dht_node._PROBE_TIMEOUT_S", 3.0)
    nodes = await swarm.grow(3)
    await swarm.announce_all()
    identity, node = swarm.members[2]
    old_pid, old_peer = node.daemon_pid, node.visible_maddrs()[0].rpartition("/p2p/")[2]
    await strike(old_pid, how)
    await node.maintain()
    assert node.daemon_pid != old_pid and not psutil.pid_exists(old_pid)
    assert node.visible_maddrs()[0].endswith(old_peer)
    assert await sees(node) == swarm.ids()
    await node.announce(advert_of(identity, step=2, ttl_s=99.0))

    async def others_see_it() -> bool:
        return any(a.node_id == identity.node_id and a.head.step == 2 for a in await nodes[0].lookup())

    await until(others_see_it)


async def test_calls_on_a_dead_daemon_end_with_unavailable_within_the_deadline(
    swarm: Swarm, monkeypatch: pytest.MonkeyPatch
) -> None:
    await swarm.grow(2)
    identity, node = swarm.members[1]
    await node.announce(advert_of(identity))
    await strike(node.daemon_pid, signal.SIGSTOP)
    monkeypatch.setattr("swarm.peers.discovery_dht._CALL_TIMEOUT_S", 1.0)
    with pytest.raises(Unavailable):
        await node.announce(advert_of(identity, ttl_s=95.0))
    with pytest.raises(Unavailable):
        await node.lookup()


async def test_after_stop_every_call_says_unavailable_and_nothing_is_left(swarm: Swarm) -> None:
    nodes = await swarm.grow(2)
    (identity, node), pid = swarm.members[1], nodes[1].daemon_pid
    sockets = [str(c.laddr) for c in psutil.Process(pid).net_connections("unix") if c.laddr]
    assert sockets and all(os.path.exists(path) for path in sockets)  # noqa: ASYNC240, PTH110
    await node.stop()
    assert not psutil.pid_exists(pid)
    assert not any(os.path.exists(path) for path in sockets)  # noqa: ASYNC240, PTH110
    for call in (node.lookup(), node.maintain(), node.announce(advert_of(identity))):
        with pytest.raises(Unavailable):
            await call
    await node.stop()


async def test_two_islands_merge_in_one_round_of_maintenance(swarm: Swarm) -> None:
    """Two swarms that never met, each with a full routing table of its own: what a long partition leaves behind."""
    west = await swarm.grow(2)
    east_first = await swarm.join()
    await swarm.join(*east_first.visible_maddrs())
    await swarm.announce_all()
    assert len(await sees(west[1])) == 2 and len(await sees(east_first)) == 2
    bridge = await swarm.join(*west[0].visible_maddrs(), *east_first.visible_maddrs())
    await bridge.maintain()
    for _, node in swarm.members:
        await node.maintain()
    for _, node in swarm.members[:4]:
        assert await sees(node) >= {identity.node_id for identity, _ in swarm.members[:4]}


@pytest.mark.parametrize("listen", ["/ip4/127.0.0.1/udp/0/quic", "127.0.0.1:0"])
async def test_only_tcp_multiaddresses_are_accepted(listen: str) -> None:
    with pytest.raises(ConfigError, match="TCP multiaddress"):
        await HivemindDirectory.start(Identity.create(), RUN, DirectoryConfig(listen=listen), SystemClock(), None)


@pytest.mark.sweep
async def test_a_taken_port_is_unavailable_and_leaves_no_daemon(swarm: Swarm) -> None:
    (first,) = await swarm.grow(1)
    config = DirectoryConfig(listen=first.visible_maddrs()[0].rpartition("/p2p/")[0])
    num_before = len(children())
    with pytest.raises(Unavailable, match="cannot listen"):
        await HivemindDirectory.start(Identity.create(), RUN, config, SystemClock(), None)
    assert len(children()) == num_before


CHILD = """
import asyncio, sys
from swarm.clock import SystemClock
from swarm.config import DirectoryConfig
from swarm.peers.discovery_dht import HivemindDirectory
from swarm.identity import Identity

async def main():
    directory = await HivemindDirectory.start(Identity.create(), "dht-test", DirectoryConfig(), SystemClock(), None)
    print(directory.daemon_pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_the_daemon_dies_with_a_killed_process(how: signal.Signals) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "ignore", "-c", CHILD, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    pid = int(await process.stdout.readline())
    process.send_signal(how)
    await process.wait()
    await until(lambda: has_ended(pid))


async def part(west: list[HivemindDirectory], east: list[HivemindDirectory]) -> None:
    """Brings about the state of a long partition: no connection and no routing entry across."""
    from hivemind.p2p import PeerID

    for here, there in ((west, east), (east, west)):
        for node in here:
            assert node._peer is not None
            table: Any = node._peer._node.protocol.routing_table
            for other in there:
                peer = PeerID.from_base58(other.visible_maddrs()[0].rpartition("/p2p/")[2])
                await node._peer._p2p._client.disconnect(peer)
                if peer in table:
                    del table[table[peer]]


async def test_after_a_partition_one_round_of_maintenance_on_one_node_heals_the_view(swarm: Swarm) -> None:
    nodes = await swarm.grow(4)
    await swarm.announce_all()
    for node in nodes:
        await node.maintain()
    await part(nodes[:2], nodes[2:])
    identity, far = swarm.members[0][0], nodes[3]

    async def steps() -> set[int]:
        return {advert.head.step for advert in await far.lookup() if advert.node_id == identity.node_id}

    await nodes[0].announce(advert_of(identity, step=5, ttl_s=99.0))
    assert await steps() == {1}  # hivemind by itself never finds the other side again
    for node in nodes[:2]:
        await node.maintain()

    async def is_healed() -> bool:
        return await steps() == {5}

    await until(is_healed)


class PortMapping:
    """A router's port mapping: connections to `port` go to another port of this machine."""

    def __init__(self) -> None:
        self.inside = 0
        self.num_used = 0
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_used += 1
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self.inside)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._copy(reader, inner_writer))
                tasks.create_task(self._copy(inner_reader, writer))
        finally:
            writer.close()
            inner_writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                writer.write(data)
                await writer.drain()
        writer.close()


async def test_a_node_behind_a_mapped_port_is_found_at_the_address_that_it_announces(swarm: Swarm) -> None:
    mapping = PortMapping()
    outside = await mapping.start()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        mapping.inside = probe.getsockname()[1]
    identity = Identity.create()
    config = DirectoryConfig(listen=f"/ip4/127.0.0.1/tcp/{mapping.inside}", announce=(f"/ip4/127.0.0.1/tcp/{outside}",))
    behind = await HivemindDirectory.start(identity, RUN, config, SystemClock(), None)
    swarm.members.append((identity, behind))
    (address,) = behind.visible_maddrs()
    assert address.startswith(f"/ip4/127.0.0.1/tcp/{outside}/p2p/")
    await swarm.join(address)
    assert mapping.num_used > 0
    await swarm.announce_all()
    assert {advert.node_id for advert in await swarm.members[1][1].lookup()} == swarm.ids()
    mapping.stop()
