"""Followers that take a trainer's credit and bring nothing: every step goes on without them.

Agents, admission, credit and draws are the product's own, over the in-memory network in virtual time.
"""

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from swarm.config import EntryConfig, ExchangeConfig, GeneratorConfig, ReplayConfig
from swarm.errors import Unavailable
from swarm.interfaces import PeerAddress
from swarm.testing.builders import make_identity
from swarm.weight_sync.credit import CreditLedger

from . import following_world
from .following_world import TRAINER, Generator, Trainer, World, made_by, play, scene, until

NUM_FOLLOWERS, NUM_HOLDING = 9, 3
NUM_STEPS = 8
REPLAY = ReplayConfig(local_groups=8, external_groups=0, max_age_steps=2, max_age_s=600.0)
LOOKUPS = ExchangeConfig(lookup_every_s=5.0, advert_every_s=30.0)
MEMBERS = EntryConfig(members=(TRAINER.node_id, *(make_identity(100 + n).node_id for n in range(1, NUM_FOLLOWERS + 1))))


@pytest.fixture(autouse=True)
def small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions are not what is tested here."""
    monkeypatch.setattr(following_world, "NUM_ELEMENTS", 4000)


class Follower(Generator):
    """A member of the run; one that turned takes credit, and what it makes never leaves it."""

    has_turned = False

    async def _generate(self) -> None:
        while True:
            count = min(await self.agent.local.wait_capacity(), self.config.generator.groups_per_batch)
            await asyncio.sleep(self.seconds)
            for _ in range(count):
                self.num_made += 1
                if self.has_turned:
                    follower = self.agent.weight_follower
                    assert follower is not None
                    follower.credit.record_stored(self.world.clock.now_s())
                    continue
                await self.agent.local.put(made_by(self, self.engine.version, 1000 * self.number + self.num_made))


async def swarm_of(world: World) -> tuple[Trainer, list[Follower]]:
    """A trainer and its followers."""
    shared: dict[str, Any] = {
        "replay": REPLAY,
        "entry": MEMBERS,
        "generator": GeneratorConfig(groups_per_batch=2),
        "exchange": LOOKUPS,
    }
    trainer = Trainer(world, **shared)
    await trainer.start()
    await trainer.publish()
    followers = [Follower(world, number, seconds=1.0, **shared) for number in range(1, NUM_FOLLOWERS + 1)]
    for follower in followers:
        await follower.start()
    await until(lambda: len(trainer.agent.credit_ledger.followers) == NUM_FOLLOWERS, "all follow")
    return trainer, followers


async def seconds_of_steps(trainer: Trainer, count: int) -> float:
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    for _ in range(count):
        await trainer.learn(1)
        await asyncio.sleep(1.0)
    return loop.time() - begin_s


def test_members_that_hold_credit_stop_no_step(tmp_path: Path) -> None:
    taken_s: list[float] = []

    async def scene(world: World) -> None:
        trainer, followers = await swarm_of(world)
        await seconds_of_steps(trainer, NUM_STEPS)
        for follower in followers[-NUM_HOLDING:]:
            follower.has_turned = True
        taken_s.append(await seconds_of_steps(trainer, NUM_STEPS))

    play(tmp_path, scene)
    assert taken_s[0] < 8 * NUM_STEPS, taken_s


async def watch_anew(world: World, follower: Follower) -> None:
    """Follows no more; watches for its credit, and again before it is late: the newer stream ends the older one."""
    await follower.stop()
    address = PeerAddress(node_id=TRAINER.node_id, endpoint=world.network.endpoint_of(TRAINER.node_id))
    client = await follower.transport.connect(address, 5.0)

    async def watch() -> None:
        with suppress(Unavailable):
            async for _ in client.watch(TRAINER.node_id, follower.config.generator.groups_per_batch):
                continue

    async with asyncio.TaskGroup() as tasks:
        while True:
            tasks.create_task(watch())
            await asyncio.sleep(1.5)


def test_members_that_hold_credit_and_watch_anew_stop_no_step(tmp_path: Path) -> None:
    num_made: list[int] = []

    async def scene(world: World) -> None:
        trainer, followers = await swarm_of(world)
        await seconds_of_steps(trainer, NUM_STEPS)
        turned = followers[-NUM_HOLDING:]
        watching = [asyncio.create_task(watch_anew(world, follower)) for follower in turned]
        before = trainer.step
        with suppress(TimeoutError):
            async with asyncio.timeout(8 * NUM_STEPS):
                await seconds_of_steps(trainer, NUM_STEPS)
        num_made.append(trainer.step - before)
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    play(tmp_path, scene)
    assert num_made[0] == NUM_STEPS


NUM_WATCHING = 40


@scene()
async def test_who_watches_anew_on_and_on_has_the_credit_of_all_looked_at_once_each_time(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, num_looks = CreditLedger.grant, 0

    def grant(self: CreditLedger, capacity: int) -> None:
        nonlocal num_looks
        num_looks += 1
        plain(self, capacity)

    monkeypatch.setattr(CreditLedger, "grant", grant)
    trainer = Trainer(world, replay=REPLAY)
    await trainer.start()
    await trainer.publish()

    async def watch(number: int) -> None:
        async for _ in trainer.agent.weight_server.watch(make_identity(200 + number).node_id, TRAINER.node_id, 2):
            continue

    watching = [asyncio.create_task(watch(number)) for number in range(NUM_WATCHING)]
    await until(lambda: len(trainer.agent.credit_ledger.followers) == NUM_WATCHING, "all watch")
    await asyncio.sleep(1.0)
    before = num_looks
    watching.pop().cancel()
    await asyncio.sleep(0.01)
    assert num_looks - before < 5, num_looks - before
    for task in watching:
        task.cancel()
    await asyncio.gather(*watching, return_exceptions=True)
