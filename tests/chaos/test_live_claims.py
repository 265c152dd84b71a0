"""Keys that are alive and claim dead addresses: they call from one place, and delay a newcomer by a few dials."""

import asyncio
import hashlib
import random
from collections.abc import AsyncIterator

import pytest

from swarm.clock import ManualClock
from swarm.config import NodeConfig
from swarm.errors import Unavailable
from swarm.interfaces import PeerAddress, StreamItem
from swarm.loops import neighbours_loop
from swarm.peers.address_book import AddressBook
from swarm.peers.peer_table import MAX_INBOUND, Peers
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.simulate.virtual.loop import LoopClock, run_virtual
from swarm.testing.builders import make_advert, make_identity
from swarm.testing.nodes import make_agent, make_context
from swarm.types import Advert, Cursor, StreamFilter

OURS, HONEST = make_identity(1), make_identity(2)
NUM_HOSTILE = 300
LIMIT_S = 150.0


class Place:
    """Directory and network of one node: of all that the directory names, one answers."""

    def __init__(self, num_hostile: int, num_subnets: int) -> None:
        self.clock = LoopClock(asyncio.get_running_loop())
        self.agent = make_agent(make_context(NodeConfig(), OURS, clock=self.clock), MemoryGroupStore(self.clock, 2**20))
        self.rng = random.Random(1)
        self.num_hostile, self.num_subnets = num_hostile, num_subnets
        self.num_keys = 0

    def hostile(self) -> list[Advert]:
        """Fresh keys that call from a few subnets, and claim addresses all over the world."""
        adverts: list[Advert] = []
        for number in range(self.num_hostile):
            self.num_keys += 1
            key = hashlib.sha256(f"hostile {self.num_keys}".encode()).hexdigest()
            self.agent.peers.record_call(key, f"8.8.{number % self.num_subnets}.0/24")
            host = f"{self.rng.randrange(11, 99)}.{self.rng.randrange(256)}.{self.rng.randrange(256)}.9"
            adverts.append(make_advert(key, endpoints=(f"{host}:7700",)))
        return adverts

    async def lookup(self) -> list[Advert]:
        return [*self.hostile(), make_advert(HONEST.node_id, endpoints=("9.9.9.9:7700",))]

    async def connect(self, address: PeerAddress, timeout_s: float) -> "Place":
        if address.node_id != HONEST.node_id:
            await asyncio.sleep(timeout_s)
            raise Unavailable("nobody there")
        return self

    async def subscribe(self, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        await asyncio.Event().wait()
        yield  # type: ignore[misc]

    async def close(self) -> None:
        pass


def linked_after_s(num_subnets: int) -> float:
    """Seconds until a node finds the one honest newcomer that called it, among keys that called it too."""

    async def scene() -> float:
        place = Place(NUM_HOSTILE, num_subnets)
        place.agent.peers.record_call(HONEST.node_id, "9.9.9.0/24")
        loop = asyncio.create_task(neighbours_loop(place.agent, place, place, random.Random(0)))  # type: ignore[arg-type]
        began_s = place.clock.monotonic_s()
        try:
            while not place.agent.peers.connected and place.clock.monotonic_s() < began_s + LIMIT_S:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(1.0)
            return place.clock.monotonic_s() - began_s
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)

    return run_virtual(scene())


@pytest.mark.parametrize("num_subnets", [1, 4, 16])
def test_live_keys_of_a_few_subnets_with_dead_addresses_delay_a_newcomer_by_a_few_dials(num_subnets: int) -> None:
    assert linked_after_s(num_subnets) <= 10.0 + 4.0 * num_subnets


def test_who_calls_with_many_keys_from_one_subnet_pushes_no_other_caller_out() -> None:
    peers = Peers(OURS.node_id)
    peers.record_call(HONEST.node_id, "9.9.9.0/24")
    for number in range(2 * MAX_INBOUND):
        peers.record_call(f"{number:064x}", "8.8.8.0/24")
    assert len(peers.inbound) == MAX_INBOUND and HONEST.node_id in peers.inbound
    peers.record_call(HONEST.node_id)
    assert peers.inbound[HONEST.node_id] == "9.9.9.0/24", "what the transport said stays"


def test_a_claimed_address_that_fails_counts_against_key_and_place() -> None:
    book = AddressBook(ManualClock(), random.Random(0))
    liar, place = PeerAddress(node_id="1" * 64, endpoint="8.8.8.8:1"), "7.7.7.0/24"
    book.record_failure(liar, place)
    book.record_other(liar, HONEST.node_id, place)
    assert book.num_false_claims(liar.node_id) == book.num_false_claims("2" * 64, place) == 2
    book.record_answer(liar)
    assert book.num_false_claims(liar.node_id) == 0 and book.num_false_claims(liar.node_id, place) == 2
