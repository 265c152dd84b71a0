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
from swarm.weight_sync.weight_server import WeightServer

from . import following_world
from .following_world import TRAINER, Generator, Trainer, World, made_by, play, until

NUM_FOLLOWERS, NUM_HOLDING = 9, 3
MAX_AGE_S = 600.0
NUM_STEPS = 8
REPLAY = ReplayConfig(local_groups=8, external_groups=0, max_age_steps=2, max_age_s=MAX_AGE_S)
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


@pytest.mark.parametrize("is_out", [False, True], ids=["defended", "mutation: nobody is late before it expires"])
def test_members_that_hold_credit_stop_no_step(tmp_path: Path, is_out: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if is_out:
        monkeypatch.setattr(CreditLedger, "patience_s", property(lambda self: self._expiry_s))
    taken_s: list[float] = []

    async def scene(world: World) -> None:
        trainer, followers = await swarm_of(world)
        await seconds_of_steps(trainer, NUM_STEPS)
        for follower in followers[-NUM_HOLDING:]:
            follower.has_turned = True
        taken_s.append(await seconds_of_steps(trainer, NUM_STEPS))

    play(tmp_path, scene)
    if is_out:
        assert taken_s[0] > MAX_AGE_S / 4, taken_s
    else:
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


def with_a_stream_all_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: who watches anew has held nothing."""
    plain = CreditLedger.close

    def close(self: CreditLedger, line: Any) -> None:
        plain(self, line)
        line.record.left_s.clear()

    monkeypatch.setattr(CreditLedger, "close", close)


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: all is forgotten"])
def test_members_that_hold_credit_and_watch_anew_stop_no_step(
    tmp_path: Path, is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        with_a_stream_all_is_forgotten(monkeypatch)
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
    assert num_made[0] == NUM_STEPS if is_defended else num_made[0] < NUM_STEPS / 2, num_made


NUM_WATCHING = 40


def every_watch_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation: each watch that asks whether there is news gives credit to all."""
    plain = WeightServer._grant

    def grant(self: WeightServer, line: Any, policy_id: str, **_: Any) -> Any:
        return plain(self, line, policy_id)

    monkeypatch.setattr(WeightServer, "_grant", grant)


@pytest.mark.parametrize("is_defended", [True, False], ids=["defended", "mutation: every watch gives"])
def test_who_watches_anew_on_and_on_has_the_credit_of_all_looked_at_once_each_time(
    tmp_path: Path, is_defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_defended:
        every_watch_gives(monkeypatch)
    plain, num_looks = CreditLedger.grant, 0

    def grant(self: CreditLedger, capacity: int) -> None:
        nonlocal num_looks
        num_looks += 1
        plain(self, capacity)

    monkeypatch.setattr(CreditLedger, "grant", grant)

    async def scene(world: World) -> None:
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
        assert (num_looks - before < 5) is is_defended, num_looks - before
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    play(tmp_path, scene)
