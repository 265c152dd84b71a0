"""Sources that lie or stall: nothing of theirs is loaded, and the version comes from others."""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest

from swarm.interfaces import StreamItem
from swarm.loops.fetch_weights import choose_sources
from swarm.simulate.virtual.transport import MemoryTransport
from swarm.testing.builders import TOY_RUN_ID, make_advert, make_identity
from swarm.types import (
    Credit,
    Cursor,
    Digest,
    NodeId,
    PolicyVersion,
    Role,
    SealedGroup,
    SealedManifest,
    StreamFilter,
)
from swarm.weight_sync.chunk_fetch import MAX_FAILURES, ChunkRequest, Outcome

from .following_world import TRAINER, Generator, Trainer, World, follower_of, scene, serves, stepped_far, until


class Liar:
    """A peer that claims to hold the trainer's lineage and serves a script."""

    def __init__(self, world: World, number: int, manifests: Callable[[], list[SealedManifest]]) -> None:
        self.world, self.identity, self.manifests = world, make_identity(200 + number), manifests
        self.num_asked = self.num_watched = 0
        self.repeats_for_ever = False
        self.chunk_of: Callable[[Digest], bytes | None] = lambda digest: b"garbage" * 1000

    async def start(self, step: int) -> None:
        transport = MemoryTransport(self.world.network, self.identity.node_id)
        endpoints = await transport.serve(self)
        now_s = self.world.clock.now_s()
        advert = make_advert(
            self.identity.node_id,
            endpoints=endpoints,
            roles=(Role.GENERATOR,),
            head=PolicyVersion(policy_id=TRAINER.node_id, step=step),
            expires_at_s=now_s + 250,
        )
        await self.world.directory.view(self.identity, TOY_RUN_ID, self.world.clock).announce(advert)

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        await asyncio.Event().wait()
        yield  # type: ignore[misc]

    async def fetch(self, peer: NodeId, digest: Digest) -> SealedGroup:
        raise AssertionError("nobody asks")

    async def watch(self, peer: NodeId, policy_id: str, window: int) -> AsyncIterator[SealedManifest | Credit]:
        self.num_watched += 1
        for sealed in self.manifests():
            yield sealed
        yield Credit(head_step=10**6, granted=10**6)  # only the trainer can grant credit
        while self.repeats_for_ever:
            await asyncio.sleep(0)
            yield self.manifests()[0]
        await asyncio.Event().wait()

    async def chunk(self, peer: NodeId, digest: Digest) -> bytes:
        self.num_asked += 1
        data = self.chunk_of(digest)
        assert data is not None
        return data


class Staller(Liar):
    """Holds the true manifests, and never sends a chunk."""

    async def chunk(self, peer: NodeId, digest: Digest) -> bytes:
        self.num_asked += 1
        await asyncio.Event().wait()
        raise AssertionError


@scene()
async def test_sources_that_stall_cost_seconds_and_soon_make_room_for_others(world: World) -> None:
    trainer = Trainer(world)
    await trainer.start()
    trainer.weights = stepped_far(trainer.weights)
    await trainer.learn(1, from_groups=False)
    stallers = [Staller(world, n, lambda: [s for _, s in trainer.store.manifests(TRAINER.node_id)]) for n in (0, 1)]
    for staller in stallers:
        await staller.start(step=1)
    generator = Generator(world, 1, makes_groups=False)
    await generator.start()
    await serves(generator, trainer, 10.0)
    assert sum(staller.num_asked for staller in stallers) > 0
    sources = follower_of(generator).sources
    for staller in stallers:  # each new version gives it another chance until it is banned
        for _ in range(MAX_FAILURES):
            request = ChunkRequest(staller.identity.node_id, b"", world.clock.monotonic_s())
            sources.end(request, Outcome.FAILED)
    adverts = await world.directory.view(generator.identity, TOY_RUN_ID, world.clock).lookup()
    watched = choose_sources(generator.agent, follower_of(generator), adverts)
    assert {address.node_id for address in watched} == {trainer.node_id}


@pytest.mark.parametrize("kind", ["forged chunks", "forged manifests", "endless manifests"])
@scene()
async def test_a_hostile_source_is_dropped_for_long_and_the_version_comes_from_others(world: World, kind: str) -> None:
    trainer, generator = Trainer(world), Generator(world, 1, makes_groups=False)
    await trainer.start()
    trainer.weights = stepped_far(trainer.weights)
    await trainer.learn(1, from_groups=False)

    def manifests() -> list[SealedManifest]:
        true = [sealed for _, sealed in trainer.store.manifests(TRAINER.node_id)]
        return [replace(sealed, body=sealed.body + b"?") for sealed in true] if kind == "forged manifests" else true

    liar = Liar(world, 0, manifests)
    if kind == "endless manifests":
        liar.repeats_for_ever, liar.chunk_of = True, trainer.store.chunk  # nothing else is wrong with it
    await liar.start(step=1)
    await generator.start()
    await serves(generator, trainer)
    await until(lambda: follower_of(generator).sources.is_banned(liar.identity.node_id), "it is dropped")
    asked, watched = liar.num_asked, liar.num_watched
    await trainer.learn(3, from_groups=False)
    await serves(generator, trainer)
    await asyncio.sleep(60.0)
    assert (liar.num_asked, liar.num_watched) == (asked, watched)
    assert follower_of(generator).credit.head_step == trainer.version.step
    assert generator.agent.num_failures == 0


@scene()
async def test_a_source_cannot_lead_back_onto_an_abandoned_branch(world: World) -> None:
    trainer = Trainer(world)
    await trainer.start()
    await trainer.publish()
    trainer.save()
    await trainer.learn(6, from_groups=False)
    abandoned = [sealed for _, sealed in trainer.store.manifests(TRAINER.node_id)]
    await trainer.kill()
    await trainer.restart()
    await trainer.learn(2, from_groups=False)
    liar = Liar(world, 0, lambda: abandoned)
    await liar.start(step=6)
    generator = Generator(world, 1, makes_groups=False)
    await generator.start()
    await serves(generator, trainer)
    await trainer.learn(2, from_groups=False)
    await serves(generator, trainer)
    assert max(generator.engine.steps) == 4 and liar.num_watched > 0
