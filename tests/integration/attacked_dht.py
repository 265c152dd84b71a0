"""Directories on loopback, and peers of their DHT that do as they like, for tests that attack them."""

import gc
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from swarm.clock import SystemClock
from swarm.config import DirectoryConfig
from swarm.identity import Identity
from swarm.peers.dht_records import shard_key
from swarm.peers.discovery_dht import HivemindDirectory
from swarm.testing.builders import make_advert
from swarm.types import Advert
from swarm.wire.adverts import seal_advert

RUN = "dht-hostile"


def advert_of(identity: Identity, ttl_s: float = 90.0, run_id: str = RUN) -> Advert:
    return make_advert(identity.node_id, run_id=run_id, expires_at_s=time.time() + ttl_s)


class Attacker:
    """A plain hivemind node without our validator: it stores and answers whatever it likes."""

    def __init__(self, node: object) -> None:
        from hivemind.dht.node import DHTNode
        from hivemind.dht.routing import DHTID

        assert isinstance(node, DHTNode)
        self.node = node
        self.key = DHTID.generate(source=shard_key(RUN, 0))

    async def store(self, victim: str, subkey: object, value: bytes, until_s: float, key: Any = None) -> bool:
        from hivemind.p2p import PeerID

        peer = PeerID.from_base58(victim.rpartition("/p2p/")[2])
        answer = await self.node.protocol.call_store(peer, [key or self.key], [value], [until_s], [subkey])
        assert answer is not None, "the victim did not answer"
        return bool(answer[0])


async def attack(address: str, **options: Any) -> Attacker:
    from hivemind.dht.node import DHTNode

    from swarm.peers.dht_calls import forget_late_answers

    node = await DHTNode.create(initial_peers=[address], nat_port_map=False, auto_nat=False, **options)
    forget_late_answers(node)
    return Attacker(node)


async def says(node_id: bytes, address: str) -> Attacker:
    """A peer that only connects, and says an id of these bytes."""
    from hivemind.dht.node import DHTNode
    from hivemind.p2p import PeerID
    from hivemind.proto import dht_pb2
    from hivemind.utils.multiaddr import Multiaddr

    node = await DHTNode.create(nat_port_map=False, auto_nat=False)
    node.protocol.node_info = dht_pb2.NodeInfo(node_id=node_id)  # type: ignore[attr-defined]
    base, _, peer = address.rpartition("/p2p/")
    p2p: Any = node.protocol.p2p
    await p2p._client.connect(PeerID.from_base58(peer), [Multiaddr(base)])
    return Attacker(node)


def answers_with(attacker: Attacker, result: Any) -> None:
    """Has an attacker answer every read with this."""
    from hivemind.proto import dht_pb2

    protocol: Any = attacker.node.protocol
    control = protocol.p2p._client.control
    response = dht_pb2.FindResponse(results=[result], peer=protocol.node_info).SerializeToString()  # type: ignore[attr-defined]

    async def answer(request: bytes, remote_id: Any) -> bytes:
        return response

    control.unary_handlers["DHTProtocol.rpc_find"] = answer


@contextmanager
def noted_in(took_s: list[float]) -> Generator[None]:
    """Notes the CPU seconds of what this thread does within, without what a collection of garbage takes."""
    gc.disable()
    began_s = time.thread_time()
    try:
        yield
    finally:
        took_s.append(time.thread_time() - began_s)
        gc.enable()


def fill(directory: Any) -> None:
    """Has a node hold as many adverts as it takes."""
    storage = directory._peer._storage
    for _ in range(128):
        identity = Identity.create()
        advert = advert_of(identity)
        assert storage.store_subkey(
            storage.keys[0], identity.public_key, seal_advert(advert, identity), advert.expires_at_s
        )


class Stage:
    def __init__(self) -> None:
        self.honest: list[tuple[Identity, HivemindDirectory]] = []
        self.attackers: list[Attacker] = []

    async def join(self, listen: str = "/ip4/127.0.0.1/tcp/0") -> HivemindDirectory:
        bootstrap = self.honest[0][1].visible_maddrs() if self.honest else ()
        identity = Identity.create()
        directory = await HivemindDirectory.start(
            identity, RUN, DirectoryConfig(bootstrap=bootstrap, listen=listen), SystemClock(), None
        )
        self.honest.append((identity, directory))
        return directory

    async def attack(self, **options: object) -> Attacker:
        self.attackers.append(await attack(self.honest[0][1].visible_maddrs()[0], **options))
        return self.attackers[-1]


@asynccontextmanager
async def staged() -> AsyncGenerator[Stage]:
    """A stage, with nothing left when it ends."""
    it = Stage()
    try:
        yield it
    finally:
        for attacker in it.attackers:
            await attacker.node.shutdown()
        for _, directory in it.honest:
            await directory.stop()
