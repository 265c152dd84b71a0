"""Trainers, sources and generators that are killed or go back: the others go on, and no weights are ever mixed."""

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from swarm.events import ApplyFailed, GroupsDrawn
from swarm.simulate.virtual.faults import FaultPlan
from swarm.weights import patch_graph
from swarm.weights.payload import CHUNK_BYTES

from .following_world import (
    ANCHOR_EVERY,
    FULL_BYTES,
    Engine,
    Generator,
    Trainer,
    World,
    follower_of,
    initial,
    play,
    scene,
    serves,
    stepped,
    stepped_far,
    trainer_and_follower,
    until,
)


@scene(FaultPlan(bytes_per_s=0.5e6))
async def test_a_generator_killed_in_the_middle_of_a_download_goes_on_with_what_it_has(world: World) -> None:
    trainer = Trainer(world)
    await trainer.start()
    trainer.weights = {"w": replace(trainer.weights["w"], bits=trainer.weights["w"].bits[::-1].copy())}  # a long chain
    await trainer.learn(1, from_groups=False)
    generator = Generator(world, 1, makes_groups=False)
    await generator.start()
    await until(lambda: follower_of(generator).bytes_fetched >= CHUNK_BYTES, "the first chunk comes")
    assert generator.engine.steps == []
    fetched = follower_of(generator).bytes_fetched
    await generator.kill()
    again = Generator(world, 1, makes_groups=False)
    await again.start()
    await serves(again, trainer)
    assert again.engine.steps == [1]
    assert fetched + follower_of(again).bytes_fetched < 1.05 * FULL_BYTES + CHUNK_BYTES


@pytest.mark.parametrize("is_agent_killed", [False, True])
@scene()
async def test_a_generator_that_starts_again_from_the_base_model_downloads_no_version_in_full(
    world: World, is_agent_killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch_graph, "KEPT_MANIFESTS", 0)  # the patches from the base model are long gone
    trainer, generator = Trainer(world), Generator(world, 1, makes_groups=False)
    await trainer.start()
    await trainer.publish()
    await generator.start()
    for _ in range(3 * ANCHOR_EVERY + 2):
        await trainer.learn(1, from_groups=False)
        await serves(generator, trainer)
    await trainer.agent.tidy(2**30)
    await generator.agent.tidy(2**30)
    fetched = follower_of(generator).bytes_fetched
    assert fetched < FULL_BYTES / 10, "it followed by patches"
    if is_agent_killed:
        await generator.kill()
        generator, fetched = Generator(world, 1, makes_groups=False), 0
        await generator.start()
    else:  # the worker alone
        generator.engine = Engine()
        generator.applier = generator.start_applier()
        await trainer.learn(1, from_groups=False)
    await serves(generator, trainer)
    assert follower_of(generator).bytes_fetched - fetched < FULL_BYTES / 10


@scene()
async def test_who_followed_by_patches_serves_an_anchor_in_full_to_those_who_join(world: World) -> None:
    trainer, generator = Trainer(world), Generator(world, 1, makes_groups=False)
    await trainer.start()
    await trainer.publish()
    await generator.start()
    for _ in range(ANCHOR_EVERY):
        await trainer.learn(1, from_groups=False)
        await serves(generator, trainer)
    held = generator.agent.weight_server.held(trainer.node_id)
    [anchor] = [
        sealed.digest
        for manifest, sealed in generator.store.manifests(trainer.node_id)
        if manifest.base is None and manifest.version == trainer.version
    ]
    assert anchor in held


@scene(FaultPlan(bytes_per_s=1e6))
async def test_a_source_that_disappears_in_the_middle_costs_nothing_but_time(world: World) -> None:
    trainer, source = Trainer(world), Generator(world, 1, makes_groups=False)
    await trainer.start()
    trainer.weights = stepped_far(trainer.weights)
    await trainer.learn(1, from_groups=False)
    await source.start()
    await serves(source, trainer)
    await asyncio.sleep(6.0)
    late = Generator(world, 2, makes_groups=False)
    await late.start()
    await until(lambda: source.agent.weight_server.bytes_sent > 0, "the source is asked")
    await source.kill()
    await serves(late, trainer)
    assert late.engine.steps[-1] == 1


@scene()
async def test_a_trainer_that_is_away_stops_generation_and_its_return_starts_it_again(world: World) -> None:
    trainer, generator = Trainer(world), Generator(world, 1)
    await trainer.start()
    await trainer.publish()
    await generator.start()
    await trainer.learn(2)
    trainer.save()
    await trainer.kill()
    await asyncio.sleep(1.0)
    assert generator.agent.local.capacity() == 0
    status = follower_of(generator).status()
    assert not status["is_trainer_connected"] and status["credit"] == 0
    num_made = generator.num_made
    await asyncio.sleep(10.0)
    assert generator.num_made <= num_made + generator.config.generator.groups_per_batch
    await trainer.restart()
    await trainer.learn(3)
    await serves(generator, trainer)


@scene()
async def test_a_trainer_killed_in_the_middle_of_publishing_shows_nothing_of_it(world: World) -> None:
    trainer, generator = await trainer_and_follower(world)
    trainer.save()
    served = trainer.version
    trainer.weights, trainer.step = stepped(trainer.weights, "lost"), 1
    bodies = trainer.publisher.publish(trainer.version, trainer.weights)
    assert bodies, "its chunks are on the disk"
    await trainer.kill()  # before the agent knew of the manifests
    await trainer.restart()
    await asyncio.sleep(5.0)
    assert generator.engine.version == served and follower_of(generator).status()["newest_step"] == 0
    await trainer.learn(1, from_groups=False)
    await serves(generator, trainer)
    assert not generator.emitted(ApplyFailed)


@scene()
async def test_a_trainer_that_goes_back_to_its_checkpoint_is_followed_onto_its_new_branch(world: World) -> None:
    trainer, generator = Trainer(world), Generator(world, 1)
    await trainer.start()
    await trainer.publish()
    await generator.start()
    await trainer.learn(4)
    trainer.save()
    await trainer.learn(3)
    await serves(generator, trainer)
    old = trainer.version
    await trainer.kill()
    await trainer.restart()
    await serves(generator, trainer)
    assert generator.engine.version.step == 4
    await trainer.learn(4)
    await serves(generator, trainer)
    assert trainer.version.step == 8 and generator.engine.version.digest != old.digest
    assert {m.version.digest for m, _ in generator.store.manifests(trainer.node_id)}.isdisjoint({old.digest})
    for draw in trainer.emitted(GroupsDrawn):
        assert all(group.age_steps <= trainer.config.replay.max_age_steps for group in draw.groups)


@scene()
async def test_a_worker_that_goes_back_under_a_living_agent_is_followed_too(world: World) -> None:
    trainer, generator = Trainer(world), Generator(world, 1, makes_groups=False)
    await trainer.start()
    await trainer.learn(5, from_groups=False)
    await generator.start()
    await serves(generator, trainer)
    trainer.weights, trainer.step, trainer.life = initial(), 0, 1
    trainer.publisher = trainer._publisher()
    await trainer.publish()
    await serves(generator, trainer)
    await trainer.learn(2, from_groups=False)
    await serves(generator, trainer)
    assert generator.engine.version.step == 2


@scene()
async def test_a_generator_that_vanishes_leaves_its_credit_to_the_others(world: World) -> None:
    trainer, lives = Trainer(world), Generator(world, 1)
    dies = Generator(world, 2, seconds=1e6)
    await trainer.start()
    await trainer.publish()
    await dies.start()
    await until(
        lambda: dies.agent.weight_follower is not None and dies.agent.weight_follower.credit.num_left > 0,
        "it has credit",
    )
    await lives.start()
    await trainer.learn(2)
    assert trainer.agent.credit_ledger.followers == {lives.node_id, dies.node_id}
    await dies.kill()
    await asyncio.sleep(1.0)
    assert trainer.agent.credit_ledger.followers == {lives.node_id}
    await trainer.learn(3)


@pytest.mark.parametrize("seed", range(4))
def test_through_seeded_faults_a_trainer_keeps_learning_and_nobody_serves_mixed_weights(
    tmp_path: Path, seed: int
) -> None:
    async def scene(world: World) -> None:
        rng = random.Random(seed)
        trainer, generators = Trainer(world), [Generator(world, number) for number in (1, 2, 3)]
        await trainer.start()
        await trainer.publish()
        for generator in generators:
            await generator.start()
        for _ in range(6):
            await trainer.learn(rng.randrange(1, 3))
            if rng.random() < 0.5:
                trainer.save()
            victim = rng.choice([trainer, *generators])
            await victim.kill()
            await asyncio.sleep(rng.uniform(0.0, 3.0))
            if isinstance(victim, Trainer):
                await victim.restart()
            else:
                victim.engine = Engine()
                await victim.start()
        await trainer.learn(2)
        for generator in generators:
            await serves(generator, trainer, 120.0)
        assert not any(node.agent.num_failures for node in (trainer, *generators)), seed

    faults = FaultPlan(latency_s=0.02, jitter_s=0.02, drop_rate=0.01, bytes_per_s=5e6)
    play(tmp_path, scene, faults)
