"""Calls and answers that a DHT peer may send as hivemind reads them: none ends, stalls or fills a node."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from attacked_dht import RUN, Stage, advert_of, answers_with, attack, fill, noted_in, says, staged

from swarm.peers.discovery_dht import HivemindDirectory

pytest.importorskip("hivemind")

STALL_S = 0.01
"""More than a call may take of the event loop, in CPU time."""

VICTIM = """
import asyncio, sys
from swarm.clock import SystemClock
from swarm.config import DirectoryConfig
from swarm.identity import Identity
from swarm.peers.discovery_dht import HivemindDirectory

async def main():
    directory = await HivemindDirectory.start(Identity.create(), sys.argv[1], DirectoryConfig(), SystemClock(), None)
    print(directory.visible_maddrs()[0], flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(len(await directory.lookup()), flush=True)
    await directory.stop()

asyncio.run(main())
"""


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with staged() as it:
        yield it


def nested(levels: int = 300) -> bytes:
    """A tuple in a tuple in a tuple, as hivemind sends tuples."""
    import msgpack as untyped_msgpack

    msgpack: Any = untyped_msgpack
    data = b"\x90"
    for _ in range(levels):
        data = msgpack.packb([msgpack.ExtType(0x40, data)])
    return data


@pytest.mark.parametrize("how", ["stored", "answered"])
async def test_a_kilobyte_of_tables_in_tables_ends_no_node(how: str) -> None:
    from hivemind.p2p import PeerID
    from hivemind.proto import dht_pb2

    victim = await asyncio.create_subprocess_exec(
        sys.executable, "-c", VICTIM, RUN, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert victim.stdin is not None and victim.stdout is not None
    address = (await victim.stdout.readline()).decode().strip()
    attacker = await attack(address)
    try:
        peer = PeerID.from_base58(address.rpartition("/p2p/")[2])
        protocol: Any = attacker.node.protocol
        if how == "stored":
            request = dht_pb2.StoreRequest(  # type: ignore[attr-defined]
                keys=[attacker.key.to_bytes()], subkeys=[b""], values=[nested()], expiration_time=[time.time() + 50],
                in_cache=[False], peer=protocol.node_info,
            )  # fmt: skip
            await asyncio.gather(protocol.get_stub(peer).rpc_store(request, timeout=5.0), return_exceptions=True)
        else:
            answers_with(attacker, dht_pb2.FindResult(type=dht_pb2.FOUND_DICTIONARY, value=nested()))  # type: ignore[attr-defined]
        victim.stdin.write(b"look up\n")
        assert await victim.stdout.readline() == b"0\n"
        victim.stdin.close()
        assert await victim.wait() == 0
    finally:
        if victim.returncode is None:
            victim.kill()
            await victim.wait()
        await attacker.node.shutdown()


def slowest_call(directory: Any) -> list[float]:
    """Seconds of the event loop that a node's answers to calls of others took: none of them waits for anything."""
    handlers, took_s = directory._peer._p2p._client.control.unary_handlers, list[float]()
    for name, handle in list(handlers.items()):

        async def timed(request: bytes, remote_id: Any, handle: Any = handle) -> bytes:
            with noted_in(took_s):
                return await handle(request, remote_id)

        handlers[name] = timed
    return took_s


@pytest.mark.parametrize("call", ["find", "store"])
async def test_a_call_that_names_keys_without_number_stops_no_event_loop(call: str, stage: Stage) -> None:
    """1,000 times the key of a full shard, in 22 KB, took .4 s of CPU and 33 MB; 20,000 records that are none .09 s."""
    from hivemind.p2p import PeerID
    from hivemind.proto import dht_pb2

    directory: Any = await stage.join()
    fill(directory)
    took_s, attacker = slowest_call(directory), await stage.attack()
    peer = PeerID.from_base58(directory.visible_maddrs()[0].rpartition("/p2p/")[2])
    stub, key = attacker.node.protocol.get_stub(peer), attacker.key.to_bytes()
    sender = attacker.node.protocol.node_info
    if call == "find":
        asked = stub.rpc_find(dht_pb2.FindRequest(keys=[key] * 100, peer=sender), timeout=5.0)  # type: ignore[attr-defined]
    else:
        num = 20_000
        request = dht_pb2.StoreRequest(  # type: ignore[attr-defined]
            keys=[key] * num, subkeys=[b"\xc4\x20" + bytes(32)] * num, values=[b""] * num,
            expiration_time=[time.time() + 50] * num, in_cache=[False] * num, peer=sender,
        )  # fmt: skip
        asked = stub.rpc_store(request, timeout=5.0)
    await asyncio.gather(asked, return_exceptions=True)
    assert max(took_s) < STALL_S
    assert len(await stub_finds(stub, key, sender)) > 30_000, "it answers all the same"


async def stub_finds(stub: Any, key: bytes, sender: Any) -> bytes:
    from hivemind.proto import dht_pb2

    response = await stub.rpc_find(dht_pb2.FindRequest(keys=[key], peer=sender), timeout=5.0)  # type: ignore[attr-defined]
    return response.results[0].value


async def test_an_answer_that_names_thousands_stops_no_event_loop(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hivemind.proto import dht_pb2

    from swarm.peers import dht_node

    directory: Any = await stage.join()
    attacker, took_s, peers_in = await stage.attack(), [0.0], dht_node.peers_in

    def timed(response: Any, most: int) -> Any:
        with noted_in(took_s):
            return peers_in(response, most)

    monkeypatch.setattr(dht_node, "peers_in", timed)
    number = range(1, 4_000)
    answers_with(
        attacker,
        dht_pb2.FindResult(  # type: ignore[attr-defined]
            type=dht_pb2.NOT_FOUND,  # type: ignore[attr-defined]
            nearest_node_ids=[(int(attacker.key) ^ n).to_bytes(20) for n in number],
            nearest_peer_ids=[b"\x12\x20" + n.to_bytes(32) for n in number],
        ),
    )
    await directory._peer.nearest(0)
    assert len(took_s) > 1 and max(took_s) < STALL_S, max(took_s)


@pytest.mark.parametrize("num_bytes", [21, 2000])  # Python writes no number of so many digits into a message
async def test_a_peer_that_answers_a_ping_with_more_than_an_id_keeps_no_node_from_its_repair(
    num_bytes: int, stage: Stage
) -> None:
    """It only connects: a node had no round of repair while it stayed."""
    directory = await stage.join()
    stage.attackers.append(await says(b"\x01" * num_bytes, directory.visible_maddrs()[0]))
    await directory.maintain()
    assert directory.num_peers == 0


async def test_a_peer_that_says_ever_new_ids_is_sent_nothing(stage: Stage) -> None:
    """200 pings of 60 bytes were worth 13 MB."""
    from hivemind.dht.routing import DHTID
    from hivemind.p2p import PeerID
    from hivemind.proto import dht_pb2

    directory: Any = await stage.join()
    fill(directory)
    attacker, num_bytes = await stage.attack(), 0
    protocol: Any = attacker.node.protocol
    handlers = protocol.p2p._client.control.unary_handlers
    handle = handlers["DHTProtocol.rpc_store"]

    async def count(request: bytes, remote_id: Any) -> bytes:
        nonlocal num_bytes
        num_bytes += len(request)
        return await handle(request, remote_id)

    handlers["DHTProtocol.rpc_store"] = count
    stub = protocol.get_stub(PeerID.from_base58(directory.visible_maddrs()[0].rpartition("/p2p/")[2]))
    own = int(directory._peer._node.node_id)
    for number in range(40):
        new = dht_pb2.NodeInfo(node_id=DHTID(own ^ number + 1).to_bytes())  # type: ignore[attr-defined]
        await stub.rpc_ping(dht_pb2.PingRequest(peer=new), timeout=5.0)  # type: ignore[attr-defined]
    await asyncio.sleep(0.5)
    assert num_bytes == 0


async def test_calls_that_were_given_up_leave_nothing(stage: Stage) -> None:
    """Of 300 given up after 2 ms, 118 stayed for good."""
    from hivemind.p2p import PeerID
    from hivemind.proto import dht_pb2

    directory: Any = await stage.join()
    fill(directory)
    attacker = await stage.attack()
    peer = PeerID.from_base58(directory.visible_maddrs()[0].rpartition("/p2p/")[2])
    stub, sender = attacker.node.protocol.get_stub(peer), attacker.node.protocol.node_info
    handled = directory._peer._p2p._client.control._handler_tasks

    async def give_up() -> None:
        request = dht_pb2.FindRequest(keys=[attacker.key.to_bytes()], peer=sender)  # type: ignore[attr-defined]
        call = asyncio.ensure_future(stub.rpc_find(request))
        await asyncio.sleep(0.002)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    for _ in range(20):
        await asyncio.gather(*(give_up() for _ in range(30)))
    await asyncio.sleep(0.5)
    assert not handled


async def test_a_node_is_asked_and_named_as_before(stage: Stage) -> None:
    """It answers once all bounds are in place, and has an id then."""
    for _ in range(3):
        await stage.join()
    for identity, directory in stage.honest:
        await directory.announce(advert_of(identity))
    for _, directory in stage.honest:
        assert isinstance(directory, HivemindDirectory) and directory.num_peers == 2
        assert {each.node_id for each in await directory.lookup()} == {identity.node_id for identity, _ in stage.honest}
