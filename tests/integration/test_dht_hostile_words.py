"""Words of a DHT peer that hivemind's own code falls over: addresses, ids and answers that nobody sends by mistake."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import psutil
import pytest
from attacked_dht import RUN, Stage, answers_with, fill, noted_in, says, staged
from waits import until

from coordinator.daemon import CoordinatorDaemon
from swarm.config import CoordinatorConfig

pytest.importorskip("hivemind")

MIDDLE = 2**159
"""Of all ids."""


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with staged() as it:
        yield it


async def test_a_node_on_every_address_lends_strangers_no_circuits(stage: Stage) -> None:
    """libp2p lends them only from a public address, which no test has: p2pd is told not to."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    await stage.join(listen="/ip4/0.0.0.0/tcp/0")
    (p2pd,) = (each for each in psutil.Process().children(recursive=True) if each.pid not in before)
    assert {"-relay=0", "-autonat=0"} <= {*p2pd.cmdline()}


async def test_a_peer_that_is_dialled_by_webtransport_keeps_no_node_from_its_repair(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names no other address, and hangs up: who asks it then dials that. A coordinator ended at its next round."""
    from hivemind.p2p import P2P, PeerID

    victim: Any = await stage.join()
    with monkeypatch.context() as patches:  # hivemind cannot write the attacker's own address either
        patches.setattr(P2P, "_ping_daemon", _identify)
        attacker = await stage.attack(host_maddrs=["/ip4/127.0.0.1/udp/0/quic-v1/webtransport"])
    p2p: Any = attacker.node.protocol.p2p
    await p2p._client.disconnect(PeerID.from_base58(victim.visible_maddrs()[0].rpartition("/p2p/")[2]))
    while not await victim._peer._p2p.list_peers():
        await victim._peer.nearest(0)
        await asyncio.sleep(0.1)
    await victim.maintain()
    assert victim.num_peers == 1 and [*await victim._peer.connected()] == [str(p2p.peer_id)]


async def _identify(self: Any) -> None:
    self.peer_id, self._visible_maddrs = await self._client.identify()


async def test_a_peer_in_the_middle_of_all_ids_that_falls_silent_is_dropped(stage: Stage) -> None:
    """Then twenty more come: searches and rounds of repair raised KeyError for good."""
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import PeerID

    victim: Any = await stage.join()
    attacker = await stage.attack(node_id=DHTID(MIDDLE))
    protocol = victim._peer._node.protocol
    table = protocol.routing_table
    await until(lambda: DHTID(MIDDLE) in table, "the attacker")
    for number in range(1, 21):  # as the pings of as many keys; a process of its own for each would take long
        await protocol.update_routing_table(DHTID(MIDDLE + number), PeerID(b"\x12\x20" + bytes([number]) * 32))
    assert len(table.buckets) > 1
    await attacker.node.shutdown()
    stage.attackers.remove(attacker)
    await victim.maintain()
    await victim._peer.answers([str(attacker.node.peer_id)])
    await until(lambda: DHTID(MIDDLE) not in table, "the end of its place")  # the table changes after the answer


async def test_an_answer_that_names_a_peer_of_many_bytes_stops_no_event_loop(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of 250 KB took 49 s of CPU; this is an eighth of it."""
    from hivemind.proto import dht_pb2

    from swarm.peers import dht_node

    victim: Any = await stage.join()
    attacker, took_s, peers_in = await stage.attack(), [0.0], dht_node.peers_in

    def timed(response: Any, most: int) -> Any:
        with noted_in(took_s):
            return peers_in(response, most)

    monkeypatch.setattr(dht_node, "peers_in", timed)
    named = {"nearest_node_ids": [attacker.key.to_bytes()], "nearest_peer_ids": [b"\x12" * 2**15]}
    answers_with(attacker, dht_pb2.FindResult(type=dht_pb2.NOT_FOUND, **named))  # type: ignore[attr-defined]
    await victim._peer.nearest(0)
    assert len(took_s) > 1 and max(took_s) < 0.01, max(took_s)


async def test_an_answer_of_long_lists_in_lists_stops_no_event_loop(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 lists, each of which says that it has 160,000 places: 66 ms of CPU and 60 MB."""
    import msgpack as untyped_msgpack
    from hivemind.proto import dht_pb2

    from swarm.peers import dht_node

    msgpack: Any = untyped_msgpack
    victim: Any = await stage.join()
    attacker, took_s, records_in = await stage.attack(), [0.0], dht_node.records_in

    def timed(response: Any) -> Any:
        with noted_in(took_s):
            return records_in(response)

    monkeypatch.setattr(dht_node, "records_in", timed)
    places = 160_000
    lists = ((b"\xdd" + places.to_bytes(4)) * 1000).ljust(places, b"\xc0")
    answer = dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=msgpack.packb(msgpack.ExtType(0x50, lists)))  # type: ignore[attr-defined]
    answers_with(attacker, answer)
    await victim.lookup()
    assert len(took_s) > 1 and max(took_s) < 0.01, max(took_s)


async def test_a_peer_that_reads_a_shard_on_and_on_is_sent_little(stage: Stage) -> None:
    """35 calls of 60 bytes a second were the whole upload of 10 Mbit/s; another peer is answered all the while."""
    from hivemind.p2p import PeerID
    from hivemind.proto import dht_pb2

    victim: Any = await stage.join()
    fill(victim)
    attacker, reader = await stage.attack(), await stage.attack()
    peer = PeerID.from_base58(victim.visible_maddrs()[0].rpartition("/p2p/")[2])
    request = dht_pb2.FindRequest(keys=[attacker.key.to_bytes()])  # type: ignore[attr-defined]
    calls = [attacker.node.protocol.get_stub(peer).rpc_find(request, timeout=10.0) for _ in range(100)]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    num_bytes = sum(answer.ByteSize() for answer in answers if isinstance(answer, dht_pb2.FindResponse))  # type: ignore[attr-defined]
    assert num_bytes < 2 * 10**6
    answer: Any = await reader.node.protocol.get_stub(peer).rpc_find(request, timeout=5.0)
    assert answer.ByteSize() > 30_000


async def test_a_coordinator_outlives_whatever_its_directory_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A peer that says too long an id, where nothing else holds it off."""
    monkeypatch.setattr("swarm.peers.dht_calls.take_no_ids_that_are_none", lambda node: None)  # type: ignore[arg-type]
    monkeypatch.setattr("coordinator.daemon.TIDY_EVERY_S", 0.2)
    config = CoordinatorConfig(dir=tmp_path, run_id=RUN, listen="127.0.0.1:0", http_listen="127.0.0.1:0")
    async with AsyncExitStack() as ending:
        async with CoordinatorDaemon(config) as daemon:
            directory: Any = daemon._directory
            attacker = await says(b"\x01" * 2000, directory.visible_maddrs()[0])
            ending.push_async_callback(attacker.node.shutdown)
            running = asyncio.ensure_future(daemon.run())
            await until(lambda: running.done() or "directory not maintained" in caplog.text)
            assert not running.done()
            running.cancel()
            (error,) = await asyncio.gather(running, return_exceptions=True)
        assert isinstance(error, asyncio.CancelledError)
        assert "directory not maintained" in caplog.text


async def test_calls_with_one_id_write_nothing_into_the_log(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    """A second call of 90 bytes with the id of the first was a traceback of over a kilobyte."""
    from hivemind.p2p import PeerID
    from hivemind.proto import p2pd_pb2

    victim: Any = await stage.join()
    attacker = await stage.attack()
    peer = PeerID.from_base58(victim.visible_maddrs()[0].rpartition("/p2p/")[2])
    p2p: Any = attacker.node.protocol.p2p
    request: Any = p2pd_pb2.PersistentConnectionRequest(callId=uuid4().bytes)  # type: ignore[attr-defined]
    request.callUnary.peer, request.callUnary.proto, request.callUnary.data = b"", "DHTProtocol.rpc_ping", b""
    data = request.SerializeToString()
    writers = [(await p2p.call_binary_stream_handler(peer, "DHTProtocol.rpc_ping"))[2] for _ in range(20)]
    for writer in writers:
        writer.write(bytes([len(data)]) + data)
    await asyncio.sleep(1.0)
    for writer in writers:
        writer.close()
    assert await attacker.node.protocol.call_ping(peer), "it answers all the same; and it keeps the call it read last"
    gc.collect()
    text = "\n".join(record.getMessage() for record in caplog.records if record.name == "asyncio")
    assert not text
