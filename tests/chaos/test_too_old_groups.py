"""Followers whose episodes take different times, behind a trainer that learns without a pause: what is too old before a
draw takes it costs credit, and no follower its place.

Agents, admission, credit and draws are the product's own, over the in-memory network in virtual time.
"""

import asyncio
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from workers import make_report

from swarm.config import EntryConfig, ExchangeConfig, GeneratorConfig, ReplayConfig
from swarm.events import GroupsDrawn
from swarm.testing.builders import make_identity
from swarm.types import NodeId, PolicyVersion, Role

from . import following_world
from .following_world import TRAINER, Generator, Trainer, World, made_by, play, until

STEP_S, TURN_S, MOST_TURNS, BATCH = 0.25, 0.1, 6, 8
TURNS_AFTER_S = 15.0
REPLAY = ReplayConfig(local_groups=8, external_groups=0, max_age_steps=2)
LOOKUPS = ExchangeConfig(lookup_every_s=5.0, advert_every_s=30.0)


@pytest.fixture(autouse=True)
def small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions are not what is tested here."""
    monkeypatch.setattr(following_world, "NUM_ELEMENTS", 4000)


class Follower(Generator):
    """Plays a batch of episodes of one to six turns at once; each group is there when its last turn is."""

    async def _generate(self) -> None:
        rng = random.Random(self.number)
        while True:
            count = min(await self.agent.local.wait_capacity(), BATCH)
            async with asyncio.TaskGroup() as tasks:
                for _ in range(count):
                    tasks.create_task(self._play(rng.randint(1, MOST_TURNS)))

    async def _play(self, num_turns: int) -> None:
        version = self.engine.version
        await asyncio.sleep(num_turns * TURN_S)
        self.num_made += 1
        await self.agent.local.put(made_by(self, version, task_id=10_000 * self.number + self.num_made))


class LearningTrainer(Trainer):
    """Learns as long as there is something to learn from; `own_batch_s` for a batch of its own, 0: it makes none."""

    def __init__(self, world: World, own_batch_s: float = 0.0, **sections: Any) -> None:
        super().__init__(world, **sections)
        self.own_batch_s = own_batch_s
        self.published = list[PolicyVersion]()
        if own_batch_s:
            self.config = world.config(self.number, (Role.TRAINER, Role.GENERATOR), **sections)

    async def work(self) -> None:
        await self.publish()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._learn())
            if self.own_batch_s:
                tasks.create_task(self._generate())

    async def publish(self) -> None:
        self.published.append(self.version)
        await super().publish()

    async def _learn(self) -> None:
        while True:
            await self.learn(1)

    async def learn(self, num_steps: int, from_groups: bool = True) -> None:
        for _ in range(num_steps):
            draw = await self.agent.local.draw(self.version)
            await asyncio.sleep(STEP_S)
            self.weights, self.step = following_world.stepped(self.weights, f"{self.step}"), self.step + 1
            await self.publish()
            await self.agent.local.report_step(make_report(self.version, draw_step=draw.step))

    async def _generate(self) -> None:
        num_made = 0
        while True:
            count = min(await self.agent.local.wait_capacity(), BATCH)
            version = self.version
            await asyncio.sleep(self.own_batch_s)
            for _ in range(count):
                num_made += 1
                await self.agent.local.put(made_by(self, version, task_id=num_made))

    def drawn(self, after: int = 0) -> Counter[NodeId]:
        """Groups in its draws after the first ones, by who made them."""
        return Counter(use.producer for event in self.emitted(GroupsDrawn)[after:] for use in event.groups)


class Rearming(Follower):
    """Like the others for a while. Then it holds its credit until others made a step without it, and while that is
    under way brings what is admitted and too old for the next draw: it gives new credit, of which it holds as much."""

    trainer: LearningTrainer

    async def _generate(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(TURNS_AFTER_S):
                await super()._generate()
        while True:
            num_held = await self.agent.local.wait_capacity()
            while not self.trainer.agent.journal.is_under_way:  # noqa: ASYNC110 - virtual time
                await asyncio.sleep(0.02)
            for _ in range(num_held):
                self.num_made += 1
                version = self.trainer.published[-1 - REPLAY.max_age_steps]
                await self.agent.local.put(made_by(self, version, task_id=10_000 * self.number + self.num_made))


async def swarm_of(
    world: World, num_followers: int, own_batch_s: float = 0.0, rearming: int = 0, **sections: Any
) -> LearningTrainer:
    """A trainer, and followers that work for it; that of the number `rearming` turns."""
    batches = GeneratorConfig(groups_per_batch=BATCH)
    shared: dict[str, Any] = {"replay": REPLAY, "exchange": LOOKUPS, "generator": batches, **sections}
    trainer = LearningTrainer(world, own_batch_s=own_batch_s, **shared)
    await trainer.start()
    for number in range(1, num_followers + 1):
        follower = (Rearming if number == rearming else Follower)(world, number, **shared)
        if isinstance(follower, Rearming):
            follower.trainer = trainer
        await follower.start()
    await until(lambda: len(trainer.agent.credit_ledger.followers) == num_followers, "all follow")
    return trainer


@pytest.mark.sweep
def test_a_trainer_that_also_generates_goes_on_learning_from_its_followers(tmp_path: Path) -> None:
    """Its own generator begins what they get no credit for: without credit they bring nothing that gives it back."""
    shares: list[float] = []

    async def scene(world: World) -> None:
        trainer = await swarm_of(world, 2, own_batch_s=0.3)
        await asyncio.sleep(40.0)
        drawn = trainer.drawn(after=len(trainer.emitted(GroupsDrawn)) - 30)
        shares.append(1.0 - drawn[TRAINER.node_id] / drawn.total())

    play(tmp_path, scene)
    assert shares[0] > 0.25


def test_shares_of_members_leave_no_older_group_behind_a_younger_one(tmp_path: Path) -> None:
    """A run of four members makes full steps, about as many as a private one, since nobody's credit is taken off for
    groups that a draw passed over."""
    figures: list[tuple[float, int, int]] = []

    async def scene(world: World) -> None:
        members = tuple(make_identity(100 + number).node_id for number in range(1, 5))
        trainer = await swarm_of(world, 4, entry=EntryConfig(members=(TRAINER.node_id, *members)))
        await asyncio.sleep(40.0)
        num_steps = len(trainer.emitted(GroupsDrawn))
        figures.append((trainer.drawn().total() / num_steps, num_steps, trainer.agent.credit_ledger.num_taken_off))

    play(tmp_path, scene)
    groups_a_step, num_steps, num_taken_off = figures[0]
    assert groups_a_step > 7.9 and num_steps > 60 and num_taken_off < 12


@pytest.mark.sweep
def test_a_member_that_is_late_again_and_again_leaves_more_than_half_of_the_steps(tmp_path: Path) -> None:
    steps: list[int] = []

    async def scene(world: World) -> None:
        members = tuple(make_identity(100 + number).node_id for number in range(1, 5))
        trainer = await swarm_of(world, 4, rearming=4, entry=EntryConfig(members=(TRAINER.node_id, *members)))
        await asyncio.sleep(TURNS_AFTER_S)
        before = trainer.step
        await asyncio.sleep(40.0)
        steps.append(trainer.step - before)

    play(tmp_path, scene)
    assert steps[0] > 40  # of about 70 without it
