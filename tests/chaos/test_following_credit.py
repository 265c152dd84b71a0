"""Choice of a trainer, and credit to begin: trainers that come, go, or are slow to reach."""

import asyncio
from dataclasses import replace

import pytest

from swarm.config import FollowConfig, ReplayConfig, WeightsConfig
from swarm.diagnosis import Snapshot, status_findings
from swarm.events import GroupsDrawn
from swarm.interfaces import PeerAddress, PeerClient
from swarm.simulate.virtual.faults import FaultPlan
from swarm.types import JsonDict, NodeId, RefusalReason
from swarm.weight_sync.follower import FollowerState

from .following_world import (
    TRAINER,
    Generator,
    Node,
    Trainer,
    World,
    follower_of,
    made_by,
    scene,
    serves,
    stepped_far,
    trainer_and_follower,
    until,
)


def following_claims(following: JsonDict) -> list[str]:
    return [found.claim for found in status_findings(Snapshot(now_s=0.0, status={"following": following}))]


@scene()
async def test_between_two_trainers_a_generator_waits_and_says_which_key_names_one(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = Trainer(world, 0), Trainer(world, 5)
    for trainer in (first, second):
        await trainer.start()
        await trainer.publish()
    await asyncio.sleep(1.0)
    torn = Generator(world, 1)
    await torn.start()
    named = Generator(world, 2, follow=FollowConfig(policy=second.node_id))
    await named.start()
    await serves(named, second)
    await asyncio.sleep(20.0)
    status = follower_of(torn).status()
    assert set(status["candidates"]) == {first.node_id, second.node_id} and not status["policy"]
    assert torn.engine.steps == [] and torn.agent.local.capacity() == 0
    assert [record.message for record in caplog.records if "follow.policy" in record.message]
    problems = following_claims(status)
    assert "follow.policy" in problems[0] and first.node_id[:8] in problems[0]
    world.directory.adverts = {key: a for key, a in world.directory.adverts.items() if key[1] != second.node_id}
    await asyncio.sleep(3.0)  # a look-up or some that miss it
    assert follower_of(torn).state is FollowerState.SEARCHING
    await second.kill()
    await serves(torn, first)


@scene()
async def test_a_trainer_that_publishes_nothing_is_not_chosen_and_the_status_says_what_is_missing(world: World) -> None:
    alone = ReplayConfig(local_groups=0, external_groups=4)
    plain = [Trainer(world, number, replay=alone, weights=WeightsConfig()) for number in (5, 6)]
    for trainer in plain:
        await trainer.start()
        await trainer.publish()
    waiting = Generator(world, 1)
    named = Generator(world, 2, follow=FollowConfig(policy=plain[0].node_id))
    for generator in (waiting, named):
        await generator.start()
    await asyncio.sleep(20.0)
    (problem,) = following_claims(follower_of(waiting).status())
    assert "no trainer publishes" in problem and "weights.publish=true" in problem
    assert plain[0].node_id[:8] in problem and plain[1].node_id[:8] in problem
    (problem,) = following_claims(follower_of(named).status())
    assert f"{plain[0].node_id[:8]} publishes no weights" in problem and "weights.publish=true" in problem
    trainer = Trainer(world)
    await trainer.start()
    await asyncio.sleep(1.0)
    at_s = world.clock.now_s()
    await trainer.publish()
    await serves(waiting, trainer)
    assert world.clock.now_s() - at_s < 2.0, "its first version is announced at once"
    assert not follower_of(waiting).status()["candidates"]


@scene()
async def test_whoever_was_followed_is_followed_after_a_restart_whoever_else_came(world: World) -> None:
    trainer, generator = await trainer_and_follower(world)
    await generator.kill()
    hostile = Trainer(world, 5)
    await hostile.start()
    await hostile.publish()
    await trainer.learn(1, from_groups=False)
    await asyncio.sleep(1.0)
    again = Generator(world, 1, makes_groups=False)
    await again.start()
    await serves(again, trainer)
    assert follower_of(again).policy_id == trainer.node_id and not follower_of(again).status()["candidates"]


@scene()
async def test_look_ups_that_miss_the_trainer_or_a_follower_end_neither_watch_nor_credit(world: World) -> None:
    trainer, generator = Trainer(world), Generator(world, 1, makes_groups=False)
    other = Generator(world, 2, makes_groups=False)
    await trainer.start()
    await trainer.publish()
    for node in (generator, other):
        await node.start()
        await serves(node, trainer)
    await until(lambda: len(trainer.agent.peers.connected) == 2, "their groups are taken")
    ended = list[str]()
    for node in (trainer, generator):
        watch_ends(node, ended)
    world.directory.adverts = {k: advert for k, advert in world.directory.adverts.items() if k[1] == other.node_id}
    world.directory.put = lambda run_id, advert: None  # type: ignore[method-assign]
    await asyncio.sleep(5.0)
    assert ended == [] and follower_of(generator).credit.num_left > 0


@scene()
async def test_a_trainer_whose_relays_change_places_stays_connected(world: World) -> None:
    trainer, generator = await trainer_and_follower(world)
    await until(lambda: follower_of(generator).credit.num_left > 0, "it has credit")
    ended, (endpoint,) = list[str](), trainer.agent.endpoints
    watch_ends(generator, ended)
    for endpoints in ((endpoint, "nobody:1"), ("nobody:1", endpoint), (endpoint,)):
        trainer.agent.endpoints = endpoints
        await asyncio.sleep(12.0)  # adverts and look-ups
    assert ended == [] and follower_of(generator).credit.num_left > 0
    trainer.agent.endpoints = ("nobody:1",)  # it moved
    await until(lambda: ended == ["watch"], "where it is not advertised any more it is not asked")


@scene()
async def test_a_trainer_that_only_our_relays_can_dial_is_reached_through_one_and_stays_so(world: World) -> None:
    trainer, generator = Trainer(world), Generator(world, 1, makes_groups=False)
    await trainer.start()
    await trainer.publish()
    (endpoint,) = trainer.agent.endpoints
    trainer.agent.endpoints = ("nobody:1",)  # as its address is to a network that lets out port 443 alone
    await generator.start()
    relay, connect = PeerAddress(node_id="f" * 64, endpoint="relay:443"), generator.transport.connect
    dialled = list[str]()

    async def through(address: PeerAddress, timeout_s: float) -> PeerClient:
        if address.node_id != trainer.node_id:
            return await connect(address, timeout_s)
        dialled.append(address.endpoint)
        is_reached = address.relay == relay
        return await connect(replace(address, endpoint=endpoint) if is_reached else address, timeout_s)

    generator.transport.connect = through  # type: ignore[method-assign]
    generator.agent.address_book.relays = (relay,)
    await serves(generator, trainer)
    await asyncio.sleep(300.0)  # any pause of the other address is over
    assert dialled[-1].startswith("relay:443/") and "nobody:1" in dialled
    assert sum(each.startswith("relay:443/") for each in dialled) == 1, "it stays connected"
    assert follower_of(generator).credit.num_left > 0


@scene(FaultPlan(bytes_per_s=15e3))  # 70 s for a chunk
async def test_over_a_slow_link_the_trainer_stays_connected_and_its_version_comes(world: World) -> None:
    trainer, generator = await trainer_and_follower(world)
    await until(lambda: follower_of(generator).credit.num_left > 0, "it has credit")
    ended = list[str]()
    watch_ends(generator, ended)
    trainer.weights = stepped_far(trainer.weights)
    await trainer.learn(1, from_groups=False)
    await until(lambda: generator.engine.version.step == 1, "it comes", 1800.0)
    assert ended == [] and follower_of(generator).sources.scores[trainer.node_id].num_failures > 0


def watch_ends(node: Node, ended: list[str]) -> None:
    """Notes it when a node loses its trainer, or ceases to follow a neighbour."""
    set_connected = node.agent.peers.set_connected

    def noted(peer: NodeId, is_connected: bool) -> None:
        ended.extend([] if is_connected else ["neighbour"])
        set_connected(peer, is_connected)

    node.agent.peers.set_connected = noted  # type: ignore[method-assign]
    if node.agent.weight_follower is not None:
        on_disconnected = node.agent.weight_follower.on_disconnected

        def noted_end(peer: NodeId, client: PeerClient) -> None:
            ended.extend(["watch"] if peer == TRAINER.node_id else [])
            on_disconnected(peer, client)

        node.agent.weight_follower.on_disconnected = noted_end  # type: ignore[method-assign]


@scene(FaultPlan(bytes_per_s=1e6))
async def test_in_pull_mode_no_batch_begins_while_a_newer_version_is_on_its_way(world: World) -> None:
    trainer = Trainer(world)
    generator = Generator(world, 1, makes_groups=False, follow=FollowConfig(mode="pull"))
    await trainer.start()
    await trainer.publish()
    await generator.start()
    await serves(generator, trainer)
    await until(lambda: follower_of(generator).capacity() > 0, "it may begin")
    trainer.weights = stepped_far(trainer.weights)
    await trainer.learn(1, from_groups=False)
    await until(lambda: follower_of(generator).credit.head_step == 1, "it knows of it")
    assert follower_of(generator).capacity() == 0 and follower_of(generator).credit.num_left > 0
    await serves(generator, trainer)
    assert follower_of(generator).capacity() > 0


@scene()
async def test_with_a_barrier_everybody_makes_an_equal_share_of_each_round_with_its_version(world: World) -> None:
    replay = ReplayConfig(local_groups=4, external_groups=0, max_age_steps=2, barrier=True)
    follow = FollowConfig(mode="pull")
    trainer = Trainer(world, replay=replay)
    generators = [
        Generator(world, 1, replay=replay, follow=follow),
        Generator(world, 2, seconds=3.0, replay=replay, follow=follow),
    ]
    await trainer.start()
    await trainer.publish()
    for generator in generators:
        await generator.start()
    await until(lambda: len(trainer.agent.credit_ledger.followers) == 2, "both are there")
    await trainer.learn(1)
    before = [generator.num_made for generator in generators]
    await trainer.learn(5)
    made = [generator.num_made - count for generator, count in zip(generators, before, strict=True)]
    assert abs(made[0] - made[1]) <= 2, made
    assert {group.age_steps for draw in trainer.emitted(GroupsDrawn)[1:] for group in draw.groups} == {0}


@scene()
async def test_a_group_made_before_the_connection_broke_does_not_use_up_the_credit_of_the_next_one(
    world: World,
) -> None:
    trainer, generator = await trainer_and_follower(world)
    follower = follower_of(generator)
    await until(lambda: follower.credit.num_left > 0, "it has credit")
    group = made_by(generator, generator.engine.version, task_id=1)  # its scoring takes long, say
    await trainer.learn(3, from_groups=False)
    await follower.fetcher.clients[trainer.node_id].close()
    await until(lambda: follower.credit.num_left == 0, "the connection has ended")
    await until(lambda: follower.credit.num_left > 0, "there is another one")
    await generator.agent.local.put(group)
    refusals = trainer.agent.ingest.refusals
    await until(lambda: refusals.get(RefusalReason.TOO_OLD) == 1, "it came, too late")
    await asyncio.sleep(5.0)
    assert follower.credit.num_left > 0, "else nothing is begun for minutes"
