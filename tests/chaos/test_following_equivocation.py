"""A trainer that shows its followers different weights for one step is proven to lie, and followed no longer."""

import asyncio
from collections.abc import AsyncIterator, Collection
from dataclasses import replace

import pytest

from swarm.events import OwnerEquivocated
from swarm.loops.own_advert import own_advert
from swarm.simulate.virtual.transport import MemoryTransport
from swarm.testing.builders import TOY_RUN_ID, HoldsNothing, make_advert, make_identity
from swarm.types import Credit, NodeId, PolicyVersion, Role, SealedManifest
from swarm.weight_sync.equivocation import FILE
from swarm.weight_sync.follower import FollowerState
from swarm.weights.manifest import Manifest, seal_body, with_branch
from swarm.weights.publish import Publisher
from swarm.weights.tensors import published_digest

from . import following_world
from .following_world import (
    ANCHOR_EVERY,
    TRAINER,
    Generator,
    Trainer,
    World,
    follower_of,
    scene,
    serves,
    stepped,
    trainer_and_follower,
    until,
)

NUM_FOLLOWERS = 100
LOOKUP_S = 0.5 * 1.2  # of World, at most


@pytest.fixture(autouse=True)
def small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred disks are kept here."""
    monkeypatch.setattr(following_world, "NUM_ELEMENTS", 4000)


class TwoFaced(Trainer):
    """Shows some followers other weights of one step than all others."""

    def __init__(self, world: World, victims: Collection[NodeId]) -> None:
        super().__init__(world)
        self.victims, self.lies, self.forked_at = victims, list[SealedManifest](), -1

    async def start(self) -> None:
        await super().start()
        server = self.agent.weight_server
        watch = server.watch

        async def watch_either(peer: NodeId, policy_id: str, window: int) -> AsyncIterator[SealedManifest | Credit]:
            async for item in watch(peer, policy_id, window):
                opened = self.store.open(item) if isinstance(item, SealedManifest) else None
                if peer in self.victims and isinstance(opened, Manifest) and opened.version.step == self.forked_at:
                    for lie in self.lies:
                        yield lie
                else:
                    yield item

        server.watch = watch_either  # type: ignore[method-assign]

    async def fork(self, branches_on: int = 0) -> None:
        """Publishes a step, and for the victims another one of the same number."""
        other = Publisher(self.store.put_chunk, anchor_every=ANCHOR_EVERY)
        other.publish(self.version, self.weights)
        weights, self.forked_at = stepped(self.weights, "for the victims"), self.step + 1
        version = PolicyVersion(policy_id=self.node_id, step=self.forked_at, digest=published_digest(weights))
        for body in other.publish(version, weights):
            self.lies.append(seal_body(with_branch(body, branch_of(self) + branches_on), TRAINER))
        await self.learn(1, from_groups=False)


def branch_of(trainer: Trainer) -> int:
    """The branch of what a trainer published last."""
    return max(manifest.branch for manifest, _ in trainer.store.manifests(trainer.node_id))


def has_ended(generator: Generator) -> bool:
    return follower_of(generator).state is FollowerState.ENDED


async def forked_swarm(world: World, num_followers: int, num_victims: int) -> tuple[TwoFaced, list[Generator]]:
    """Followers that all serve a version, and then one step of which some are shown another version."""
    generators = [Generator(world, number, makes_groups=False) for number in range(1, num_followers + 1)]
    trainer = TwoFaced(world, {generator.node_id for generator in generators[:num_victims]})
    await trainer.start()
    await trainer.publish()
    for generator in generators:
        await generator.start()
    for generator in generators:
        await serves(generator, trainer)
    await trainer.fork()
    return trainer, generators


async def known_to_all_after_s(generators: list[Generator], most_s: float) -> float:
    """Seconds until every follower knows; more than `most_s` where not all do."""
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    while not all(map(has_ended, generators)) and loop.time() - begin_s <= most_s:  # noqa: ASYNC110 - virtual time
        await asyncio.sleep(0.05)
    return loop.time() - begin_s


@scene()
async def test_equivocation_between_2_of_100_followers_is_known_to_all_within_2_lookups(world: World) -> None:
    trainer, generators = await forked_swarm(world, NUM_FOLLOWERS, 2)
    seconds = await known_to_all_after_s(generators, 60.0)
    assert seconds <= 2 * LOOKUP_S, seconds
    for generator in generators:
        (event,) = generator.emitted(OwnerEquivocated)
        assert (event.policy_id, event.step) == (trainer.node_id, trainer.forked_at)
        assert not generator.agent.reputation.is_allowed(trainer.node_id)
        assert generator.agent.local.capacity() == 0
    steps = {generator.number: len(generator.engine.steps) for generator in generators}
    await trainer.learn(3, from_groups=False)
    await asyncio.sleep(20)
    assert steps == {generator.number: len(generator.engine.steps) for generator in generators}, "nobody follows"


@scene()
async def test_one_victim_of_two_followers_is_enough(world: World) -> None:
    _, generators = await forked_swarm(world, 2, 1)
    assert await known_to_all_after_s(generators, 60.0) <= 2 * LOOKUP_S


@scene()
async def test_it_is_remembered_over_a_restart_and_shown_to_a_newcomer(world: World) -> None:
    trainer, generators = await forked_swarm(world, 3, 1)
    await known_to_all_after_s(generators, 60.0)
    await generators[0].kill()
    await generators[0].start()
    await until(lambda: has_ended(generators[0]), "the restarted one knows")
    assert own_advert(generators[0].agent).equivocator == trainer.node_id[:16]
    newcomer = Generator(world, 9, makes_groups=False)
    await newcomer.start()
    await until(lambda: has_ended(newcomer), "the newcomer is shown")
    assert (newcomer.config.dir / FILE).exists()


@scene()
async def test_a_fork_under_another_branch_does_not_go_on(world: World) -> None:
    """No proof: it looks like a restart. But everybody stays with the newest branch that anybody was shown."""
    generators = [Generator(world, number, makes_groups=False) for number in range(1, 7)]
    trainer = TwoFaced(world, {generators[0].node_id})
    await trainer.start()
    await trainer.publish()
    for generator in generators:
        await generator.start()
    for generator in generators:
        await serves(generator, trainer)
    await trainer.fork(branches_on=1)
    await asyncio.sleep(5)
    served = [len(generator.engine.steps) for generator in generators]
    await trainer.learn(5, from_groups=False)
    await asyncio.sleep(20)
    assert served[1:] == [len(generator.engine.steps) for generator in generators[1:]]


# --- honest trainers ---------------------------------------------------------------------------


@scene()
async def test_a_trainer_that_makes_steps_again_after_a_crash_is_not_accused(world: World) -> None:
    """With other weights, three times."""
    trainer, generator = await trainer_and_follower(world)
    late = Generator(world, 2, makes_groups=False)
    await late.start()
    for _ in range(3):
        trainer.save()
        await trainer.learn(3, from_groups=False)
        await until(lambda: generator.engine.version.step >= trainer.step - 1, "followed", 30)
        await trainer.kill()
        await asyncio.sleep(1.0)
        await trainer.restart()
        await trainer.learn(2, from_groups=False)
        await asyncio.sleep(3.0)
    await serves(generator, trainer)
    assert not has_ended(generator) and not generator.emitted(OwnerEquivocated)
    assert generator.agent.reputation.is_allowed(trainer.node_id)


class Accuser(HoldsNothing):
    """A peer that announces a proof, and shows what it has."""

    def __init__(self, manifests: list[SealedManifest]) -> None:
        self.manifests, self.num_asked = manifests, 0

    async def watch(self, peer: NodeId, policy_id: str, window: int) -> AsyncIterator[SealedManifest | Credit]:
        self.num_asked += 1
        for sealed in self.manifests:
            yield sealed


async def accuse(world: World, number: int, manifests: list[SealedManifest]) -> Accuser:
    identity, accuser = make_identity(300 + number), Accuser(manifests)
    endpoints = await MemoryTransport(world.network, identity.node_id).serve(accuser)
    advert = make_advert(
        identity.node_id,
        endpoints=endpoints,
        roles=(Role.GENERATOR,),
        equivocator=TRAINER.node_id[:16],
        expires_at_s=world.clock.now_s() + 250,
    )
    await world.directory.view(identity, TOY_RUN_ID, world.clock).announce(advert)
    return accuser


@scene()
async def test_nobody_can_be_accused_falsely(world: World) -> None:
    trainer, generator = await trainer_and_follower(world)
    await trainer.learn(2, from_groups=False)
    (manifest, sealed), *_ = [
        pair for pair in trainer.store.manifests(trainer.node_id) if pair[0].version.step == trainer.step
    ]
    eve = make_identity(300)
    forged = seal_body(sealed.body, eve)
    bent = replace(sealed, body=sealed.body[:-1] + b"x")
    accusers = [await accuse(world, number, shown) for number, shown in enumerate(([forged], [bent], [sealed] * 2))]
    accusers += [await accuse(world, 10 + number, []) for number in range(20)]
    assert manifest.branch
    await until(lambda: all(accuser.num_asked for accuser in accusers[:3]), "each accuser is asked", 120)
    await trainer.learn(2, from_groups=False)
    await serves(generator, trainer)
    assert not has_ended(generator)
