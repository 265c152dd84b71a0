"""Versions that a disk or an engine cannot take: the old one keeps serving, and following goes on."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from swarm.config import FollowConfig, WeightsConfig
from swarm.errors import StorageFull
from swarm.events import ApplyFailed, DiskFull, VersionUnpublished
from swarm.types import Digest, PolicyVersion

from .following_world import (
    ANCHOR_EVERY,
    FULL_BYTES,
    Generator,
    Node,
    Trainer,
    World,
    follower_of,
    play,
    scene,
    serves,
    stepped,
    stepped_far,
    trainer_and_follower,
    until,
)


@scene()
async def test_a_damaged_chunk_on_the_disk_is_fetched_again_and_never_loaded(world: World) -> None:
    trainer, generator = await trainer_and_follower(world)
    put, damaged = generator.store.put_chunk, list[Digest]()

    def put_and_damage(digest: Digest, data: bytes) -> None:
        put(digest, data)
        if not damaged:
            damaged.append(digest)
            path = generator.config.dir / "weights" / "chunks" / digest.hex()
            path.write_bytes(bytes([data[0] ^ 1]) + data[1:])

    generator.store.put_chunk = put_and_damage  # type: ignore[method-assign, assignment]
    await trainer.learn(1, from_groups=False)
    await serves(generator, trainer)
    [failed] = generator.emitted(ApplyFailed)
    assert failed.step == 1 and "wrong_chunk" in failed.error
    assert follower_of(generator).status()["last_error"] == ""


@scene()
async def test_a_full_disk_keeps_the_old_version_serving_and_following_goes_on_when_there_is_room(world: World) -> None:
    trainer, generator = Trainer(world), Generator(world, 1)
    await trainer.start()
    await trainer.publish()
    await generator.start()
    await trainer.learn(1)
    await serves(generator, trainer)
    served, generator.is_disk_full = trainer.version, True
    await trainer.learn(1)
    num_made = generator.num_made
    await until(lambda: bool(generator.emitted(DiskFull)), "it is reported")
    await asyncio.sleep(3.0)
    assert generator.engine.version == served and generator.num_made > num_made
    generator.is_disk_full = False
    await serves(generator, trainer)
    await trainer.learn(2)
    await serves(generator, trainer)


@scene()
async def test_a_full_disk_of_the_trainer_shows_nothing_half_and_the_next_version_is_followed(world: World) -> None:
    trainer, generator = await trainer_and_follower(world)
    served = trainer.version
    trainer.weights, trainer.step = stepped(trainer.weights, "one"), 1
    bodies = trainer.publisher.publish(trainer.version, trainer.weights)
    trainer.is_disk_full = True  # the chunks are there, the manifest finds no room
    await trainer.agent.local.publish(trainer.version, bodies)
    await asyncio.sleep(3.0)
    assert generator.engine.version == served and trainer.emitted(VersionUnpublished)[0].step == 1
    trainer.is_disk_full = False
    await trainer.learn(1, from_groups=False)
    await trainer.learn(ANCHOR_EVERY, from_groups=False)
    await serves(generator, trainer)


@scene()
async def test_what_a_trainer_cannot_serve_does_not_stay_on_its_disk(world: World) -> None:
    budget = WeightsConfig(publish=True, store_bytes=FULL_BYTES - 1)
    trainer = Trainer(world, weights=budget)
    await trainer.start()
    await trainer.publish()
    await trainer.learn(2 * ANCHOR_EVERY + 1, from_groups=False)
    assert [event.step for event in trainer.emitted(VersionUnpublished)] == [0, 4, 8]
    assert trainer.agent.weight_server.head_step(trainer.node_id) == 9
    assert bytes_on_disk(trainer) < FULL_BYTES / 10


def test_chunks_of_a_version_that_found_no_room_make_room_for_the_next_one(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        trainer = Trainer(world)
        await trainer.start()
        await trainer.publish()
        before = bytes_on_disk(trainer)
        trainer.weights, trainer.step = stepped_far(trainer.weights), 1
        put, num_put = trainer.store.put_chunk, 0

        def put_twice(digest: Digest, data: bytes) -> None:
            nonlocal num_put
            trainer.is_disk_full, num_put = num_put == 2, num_put + 1
            put(digest, data)

        trainer.publisher._put = put_twice  # type: ignore[assignment]
        with pytest.raises(StorageFull):
            trainer.publisher.publish(trainer.version, trainer.weights)
        assert bytes_on_disk(trainer) > before
        await trainer.agent.local.publish(trainer.version)  # as the worker does then
        assert bytes_on_disk(trainer) == before
        assert not trainer.store.missing(trainer.store.manifests(trainer.node_id)[0][0].chunks)

    play(tmp_path, scene)


def bytes_on_disk(node: Node) -> int:
    return sum(path.stat().st_size for path in (node.config.dir / "weights" / "chunks").iterdir())


@scene()
async def test_a_version_that_found_no_room_is_taken_when_there_is_some_though_no_newer_one_comes(world: World) -> None:
    trainer = Trainer(world)
    generator = Generator(world, 1, makes_groups=False, follow=FollowConfig(mode="pull"))
    await trainer.start()
    await trainer.publish()
    await generator.start()
    await serves(generator, trainer)
    generator.is_disk_full = True
    await trainer.learn(1, from_groups=False)
    await until(lambda: bool(generator.emitted(DiskFull)), "it is reported")
    await generator.agent.tidy(2**30)
    assert follower_of(generator).status()["newest_step"] == 1
    generator.is_disk_full = False
    await serves(generator, trainer)
    await generator.agent.tidy(2**30)
    assert follower_of(generator).capacity() > 0
    assert max(m.version.step for m, _ in generator.store.manifests(trainer.node_id)) == 1


@scene()
async def test_what_is_published_while_the_disk_is_tidied_is_served(world: World) -> None:
    trainer = Trainer(world)
    await trainer.start()
    await trainer.publish()
    publishing, store = trainer.agent.version_publisher, trainer.store
    assert publishing is not None
    manifests, waiting = store.manifests, asyncio.Event()

    async def slow(function: Callable[..., Any], /, *arguments: object) -> Any:
        found = function(*arguments)
        if function == manifests:
            await waiting.wait()
        return found

    publishing._offload = slow
    tidying = asyncio.create_task(publishing.tidy())
    await asyncio.sleep(0)
    await trainer.learn(1, from_groups=False)
    waiting.set()
    await tidying
    assert trainer.agent.weight_server.head_step(trainer.node_id) == 1


@scene()
async def test_a_version_that_the_engine_refuses_is_reported_and_the_next_one_is_taken(world: World) -> None:
    trainer, generator = Trainer(world), Generator(world, 1)
    generator.engine.refuses = lambda version: version.step == 2
    await trainer.start()
    await trainer.publish()
    await generator.start()
    await trainer.learn(2)
    await until(lambda: len(generator.emitted(ApplyFailed)) == 2, "it is tried twice")
    await asyncio.sleep(5.0)
    assert len(generator.emitted(ApplyFailed)) == 2 and generator.engine.version.step == 1
    status = follower_of(generator).status()
    assert status["last_error"] == "step 2: as scripted" and status["num_apply_failed"] == 2
    await trainer.learn(3)
    await serves(generator, trainer)
    assert 2 not in generator.engine.steps and follower_of(generator).status()["last_error"] == ""
    assert len(generator.emitted(ApplyFailed)) == 2, "not a third time"
    assert follower_of(generator).bytes_fetched < FULL_BYTES / 50, "what was refused is staged on the way"


@scene()
async def test_an_engine_that_fails_with_an_unforeseen_error_is_reported_and_follows_on(world: World) -> None:
    def fail(version: PolicyVersion) -> bool:
        if version.step == 2:
            raise RuntimeError("out of memory")
        return False

    trainer, generator = Trainer(world), Generator(world, 1)
    generator.engine.refuses = fail
    await trainer.start()
    await trainer.publish()
    await generator.start()
    await trainer.learn(2)
    await until(lambda: len(generator.emitted(ApplyFailed)) == 2, "it is tried twice")
    assert follower_of(generator).status()["last_error"] == "step 2: RuntimeError: out of memory"
    assert generator.engine.version.step == 1
    await trainer.learn(3)
    await serves(generator, trainer)
