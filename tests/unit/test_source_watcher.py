"""Sources of weights that are left: a relay over which no chunk comes, a peer that sends no news."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

import pytest

from swarm.clock import SystemClock
from swarm.errors import Unavailable
from swarm.flow import Signal
from swarm.interfaces import PeerAddress
from swarm.loops.fetch_weights import MAX_IDLE_ITEMS, SourceWatcher
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import make_identity
from swarm.testing.nodes import make_agent, make_context
from swarm.types import Credit, NodeId
from swarm.weight_sync.chunk_fetch import MAX_FAILURES, ChunkSources, Outcome

TRAINER, RELAY = make_identity(2), make_identity(3)
DIRECT = PeerAddress(node_id=TRAINER.node_id, endpoint="8.1.0.1:7700")
THROUGH = PeerAddress(node_id=TRAINER.node_id, endpoint=f"8.2.0.1:7700/{RELAY.node_id}")


class Client:
    """A connection over which nothing more comes."""

    def __init__(self) -> None:
        self.closed = asyncio.Event()

    async def watch(self, policy_id: str, window: int) -> AsyncIterator[Any]:
        await self.closed.wait()
        raise Unavailable("closed")
        yield  # makes it a generator

    async def close(self) -> None:
        self.closed.set()


class Crediting(Client):
    """Grants credit, which is not its own to give, without end."""

    async def watch(self, policy_id: str, window: int) -> AsyncIterator[Any]:
        for number in range(3 * MAX_IDLE_ITEMS):
            yield Credit(head_step=1, granted=number)
        await asyncio.Event().wait()


class Scene:
    """A follower that watches its trainer at one address."""

    def __init__(self, address: PeerAddress) -> None:
        clock = SystemClock()
        self.agent = make_agent(make_context(clock=clock), MemoryGroupStore(clock, 2**20))
        self.agent.address_book.record_answer(address)
        self.sources, self.changed = ChunkSources(clock), Signal()
        self.policy_id, self.known_head_step = TRAINER.node_id, 0
        self.clients: list[Client] = []
        self.make_client: Callable[[], Client] = Client
        self.num_credits = 0
        self.watcher = SourceWatcher(self.agent, cast(Any, self), cast(Any, self), address, random.Random(0))

    async def connect(self, address: PeerAddress, timeout_s: float) -> Client:
        self.clients.append(self.make_client())
        return self.clients[-1]

    def on_connected(self, peer: NodeId, client: Client) -> None:
        self.sources.connect(peer, is_origin=True)

    def on_disconnected(self, peer: NodeId, client: Client) -> None:
        self.sources.disconnect(peer)

    async def on_credit(self, peer: NodeId, credit: Credit) -> None:
        self.num_credits += 1

    def end(self, outcome: Outcome) -> None:
        """A chunk that the trainer was asked for came, or did not."""
        self.sources.end(self.sources.begin(TRAINER.node_id, bytes(32)), outcome)
        self.changed.fire()


async def test_a_source_that_grants_credit_without_end_is_left() -> None:
    other = PeerAddress(node_id=make_identity(4).node_id, endpoint="8.3.0.1:7700")
    it = Scene(other)
    it.make_client = Crediting
    await it.watcher.run()
    assert it.sources.is_banned(other.node_id) and it.num_credits == MAX_IDLE_ITEMS + 1


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.mark.parametrize("address", [DIRECT, THROUGH], ids=["direct", "through a relay"])
async def test_a_relay_over_which_no_chunk_comes_is_left_and_the_trainer_itself_is_not(address: PeerAddress) -> None:
    it = Scene(address)
    watching = asyncio.ensure_future(it.watcher.run())
    await settle()
    for outcome in (*[Outcome.FAILED] * (MAX_FAILURES - 1), Outcome.SERVED, *[Outcome.FAILED] * (MAX_FAILURES - 1)):
        it.end(outcome)
    await settle()
    assert not it.clients[0].closed.is_set(), "a chunk came in between"
    it.end(Outcome.FAILED)
    await settle()
    assert it.clients[0].closed.is_set() is (address is THROUGH)
    assert it.agent.address_book.may_dial(address) is (address is DIRECT), "another relay is tried"
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
