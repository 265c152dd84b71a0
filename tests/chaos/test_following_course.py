"""A trainer and those who follow it when nothing breaks: who fetches what, and whose groups are learned from."""

import asyncio
from collections import Counter
from dataclasses import replace

from swarm.config import ExchangeConfig
from swarm.events import GroupRefused, GroupsDrawn, VersionApplied
from swarm.loops.own_advert import own_advert
from swarm.testing.builders import make_identity
from swarm.types import Refused
from swarm.wire.envelopes import seal_group

from .following_world import (
    ANCHOR_EVERY,
    FULL_BYTES,
    Generator,
    Trainer,
    World,
    made_by,
    scene,
    serves,
    trainer_and_follower,
    until,
)


@scene()
async def test_a_trainer_learns_from_those_who_follow_it_and_every_token_names_a_version_that_existed(
    world: World,
) -> None:
    trainer = Trainer(world)
    generators = [Generator(world, 1), Generator(world, 2, seconds=0.7)]
    await trainer.start()
    await trainer.publish()
    for generator in generators:
        await generator.start()
    await trainer.learn(10)
    for generator in generators:
        await serves(generator, trainer)
        assert generator.engine.steps == sorted(generator.engine.steps) and len(generator.engine.steps) >= 4
        assert not generator.agent.replay.num_local, "nothing here learns"
        assert own_advert(generator.agent).head == trainer.version
        assert len(generator.emitted(VersionApplied)) == len(generator.engine.steps)
    drawn = Counter(group.producer for draw in trainer.emitted(GroupsDrawn) for group in draw.groups)
    assert drawn.keys() == {generator.node_id for generator in generators}
    # only the slow one is overtaken at times
    refused = [refused.reason for refused in trainer.emitted(GroupRefused)]
    assert set(refused) <= {"too_old"} and len(refused) <= 0.15 * sum(drawn.values())
    most = (trainer.config.replay.max_age_steps + 1) * trainer.config.replay.local_groups
    assert trainer.agent.credit_ledger.num_outstanding + trainer.agent.replay.num_local <= most
    assert not any(node.agent.num_failures for node in (trainer, *generators))


@scene()
async def test_a_patch_is_fetched_where_the_weights_are_held_and_nothing_where_they_are_the_same(world: World) -> None:
    trainer, generator = await trainer_and_follower(world)
    assert generator.agent.weight_follower is not None and generator.agent.weight_follower.bytes_fetched == 0
    await trainer.learn(3, from_groups=False)
    await serves(generator, trainer)
    assert 0 < generator.agent.weight_follower.bytes_fetched < FULL_BYTES / 50


@scene()
async def test_who_comes_later_is_served_by_those_who_came_before(world: World) -> None:
    trainer = Trainer(world)
    others = [Generator(world, number, makes_groups=False) for number in (1, 2)]
    await trainer.start()
    await trainer.learn(1, from_groups=False)
    for node in others:
        await node.start()
        await serves(node, trainer)
    await asyncio.sleep(2.0)
    before = trainer.agent.weight_server.bytes_sent
    late = Generator(world, 3, makes_groups=False)
    await late.start()
    await asyncio.sleep(0.4)
    await serves(late, trainer)
    await trainer.learn(2, from_groups=False)
    await serves(late, trainer)
    assert sum(node.agent.weight_server.bytes_sent for node in others) > 0
    assert late.agent.weight_follower is not None
    assert trainer.agent.weight_server.bytes_sent - before < 3 * late.agent.weight_follower.bytes_fetched


@scene()
async def test_a_trainer_takes_groups_from_all_who_have_its_credit_whatever_the_overlay_says(world: World) -> None:
    few = ExchangeConfig(lookup_every_s=0.5, advert_every_s=5.0, max_neighbours=1)
    trainer = Trainer(world, exchange=few)
    generators = [Generator(world, number, exchange=few) for number in (1, 2, 3, 4)]
    await trainer.start()
    await trainer.publish()
    for generator in generators:
        await generator.start()
    await trainer.learn(12)
    drawn = Counter(group.producer for draw in trainer.emitted(GroupsDrawn) for group in draw.groups)
    assert drawn.keys() == {generator.node_id for generator in generators}
    assert all(not generator.agent.peers.connected for generator in generators), "they take nobody's groups"


@scene()
async def test_groups_that_are_refused_give_their_credit_back_and_forged_ones_do_not(world: World) -> None:
    trainer, generator = await trainer_and_follower(world)
    credit_ledger = trainer.agent.credit_ledger
    await until(lambda: any(line["granted"] for line in credit_ledger.status().values()), "it has credit")
    given = credit_ledger.status()[generator.node_id]["granted"]
    outsider = make_identity(300)
    forged = seal_group(made_by(generator, trainer.version, task_id=5), generator.identity)
    await trainer.agent.ingest.receive(replace(forged, signature=bytes(64)), via=outsider.node_id)
    assert credit_ledger.status()[generator.node_id]["delivered"] == 0
    old = replace(trainer.version, digest=bytes(32))  # never existed
    refused = await trainer.agent.ingest.receive(
        seal_group(made_by(generator, old, task_id=6), generator.identity), via=generator.node_id
    )
    assert isinstance(refused, Refused) and credit_ledger.status()[generator.node_id]["delivered"] == 1
    await trainer.agent.ingest.receive(forged, via=outsider.node_id)  # the true one, handed on
    again = await trainer.agent.ingest.receive(forged, via=generator.node_id)
    assert isinstance(again, Refused) and credit_ledger.status()[generator.node_id]["delivered"] == 2
    await until(lambda: credit_ledger.status()[generator.node_id]["granted"] > given, "it gets more")


@scene()
async def test_a_laggard_catches_up_with_fewer_bytes_than_replaying_every_step(world: World) -> None:
    trainer, generator = Trainer(world), Generator(world, 1, makes_groups=False)
    steady = Generator(world, 2, makes_groups=False)
    await trainer.start()
    await trainer.publish()
    for node in (steady, generator):
        await node.start()
        await serves(node, trainer)
    await trainer.learn(ANCHOR_EVERY, from_groups=False)
    await serves(steady, trainer)
    await serves(generator, trainer)
    await generator.kill()
    assert steady.agent.weight_follower is not None
    before = steady.agent.weight_follower.bytes_fetched
    for _ in range(ANCHOR_EVERY):  # up to the next anchor, one step at a time
        await trainer.learn(1, from_groups=False)
        await serves(steady, trainer)
    replayed = steady.agent.weight_follower.bytes_fetched - before
    again = Restarted(generator)
    await again.start()
    await serves(again, trainer)
    assert again.agent.weight_follower is not None
    caught_up = again.agent.weight_follower.bytes_fetched
    assert caught_up < 0.75 * replayed, (caught_up, replayed)
    assert again.engine.steps[-1] == 2 * ANCHOR_EVERY and len(again.engine.steps) <= 2


class Restarted(Generator):
    """A generator whose process was killed and which goes on in its directory, its engine with what it served last."""

    def __init__(self, before: Generator) -> None:
        super().__init__(before.world, before.number, before.makes_groups, before.seconds, **before.sections)
        self.before = before

    async def work(self) -> None:
        self.applier = self.before.applier
        self.applier._engine = self.engine  # type: ignore[assignment]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take_versions())
