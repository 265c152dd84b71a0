"""Followers among a node's neighbours: what they deliver beside the intake quota, and which are streamed from."""

import asyncio
import random
from dataclasses import replace
from typing import Any

from swarm.config import WeightsConfig
from swarm.exchange.agent import Agent
from swarm.identity import Identity
from swarm.interfaces import PeerAddress
from swarm.loops.choose_peers import choose_peers, unlisted_followers
from swarm.testing.builders import make_advert, make_group, make_identity, make_sealed
from swarm.types import (
    Advert,
    PolicyVersion,
    Role,
    ScoredGroup,
    VersionSpan,
)

from .neighbour_bench import FIRST, OURS, PRODUCER, SECOND, Bench, scene


async def make_full(bench: Bench) -> None:
    """The time between draws is known, and more external groups wait than a draw takes."""
    intake_quota: Any = bench.agent.ingest._intake_quota
    intake_quota.record_draw()
    await asyncio.sleep(10.0)
    intake_quota.record_draw()
    for number in range(5):
        await bench.agent.ingest.receive(bench.made(number), via=PRODUCER.node_id)


async def num_taken(bench: Bench, identity: Identity, count: int, version: PolicyVersion, first_task: int = 0) -> int:
    """Number of a peer's groups that are taken in, one after the other."""
    taken = 0
    for task_id in range(first_task, first_task + count):
        group = make_group(identity.node_id, task_id=task_id, created_at_s=bench.clock.now_s())
        spans = (VersionSpan(start=0, version=version),)
        rollouts = tuple(replace(r, trace=replace(r.trace, spans=spans)) for r in group.rollouts if r.trace)
        sealed = make_sealed(replace(group, policy_id=version.policy_id, rollouts=rollouts), identity)
        if bench.agent.ingest.is_wanted_from(identity.node_id):
            taken += 1
            assert isinstance(await bench.agent.ingest.receive(sealed, via=identity.node_id), ScoredGroup)
    return taken


@scene(weights=WeightsConfig(publish=True))
async def test_a_watch_opens_no_door_for_groups_that_need_no_leave(bench: Bench) -> None:
    await make_full(bench)
    before = await num_taken(bench, FIRST, 100, PolicyVersion(policy_id=FIRST.node_id, step=0))
    bench.agent.credit_ledger.open(SECOND.node_id, 1)
    after = await num_taken(bench, SECOND, 100, PolicyVersion(policy_id=SECOND.node_id, step=0))
    assert after <= before + 1


@scene(weights=WeightsConfig(publish=True))
async def test_a_follower_delivers_what_it_has_credit_for_whatever_the_intake_quota(bench: Bench) -> None:
    await asyncio.sleep(601.0)  # what was given before the start is long forgotten
    await make_full(bench)
    while bench.agent.ingest.is_wanted_from(FIRST.node_id):
        pass
    version = PolicyVersion(policy_id=OURS.node_id, step=0, digest=bytes(32))
    await bench.agent.local.publish(version)
    watch = bench.agent.credit_ledger.open(FIRST.node_id, 8)
    bench.agent.credit_ledger.grant(capacity=8)
    first = await num_taken(bench, FIRST, 1, version)
    bench.agent.credit_ledger.grant(capacity=8)
    assert (first, watch.num_outstanding) == (1, 2)
    assert await num_taken(bench, FIRST, 3, version, first_task=1) == 2


def streams(agent: Agent, adverts: list[Advert]) -> set[tuple[PeerAddress, bool]]:
    return choose_peers(agent, adverts, True, random.Random(0)).streams


@scene()
async def test_followers_that_bring_nothing_are_followed_only_as_far_as_there_could_be_credit_for_them(
    bench: Bench,
) -> None:
    generators = [make_identity(100 + number) for number in range(40)]
    for identity in generators:
        bench.agent.credit_ledger.open(identity.node_id, 1)
    roles = Role.GENERATOR, Role.RELAY
    adverts = [make_advert(identity.node_id, roles=roles) for identity in generators]
    assert len(streams(bench.agent, adverts)) == 20  # five steps of four groups
    bench.agent.credit_ledger.grant(capacity=8)
    status = bench.agent.credit_ledger.status()
    followed = {address.node_id for address, _ in streams(bench.agent, adverts)}
    assert {peer for peer, credit in status.items() if credit["granted"]} <= followed
    for identity in generators[:30]:
        bench.agent.peers.delivered_steps[identity.node_id] = 0
    chosen = streams(bench.agent, adverts)
    assert {identity.node_id for identity in generators[:30]} <= {address.node_id for address, _ in chosen}
    assert not any(relayed for _, relayed in chosen)


@scene()
async def test_a_follower_that_is_not_chosen_any_more_is_dropped(bench: Bench) -> None:
    bench.agent.credit_ledger.open(FIRST.node_id, 1)
    advert = make_advert(FIRST.node_id)
    key = (PeerAddress(node_id=FIRST.node_id, endpoint=advert.endpoints[0]), False)
    assert unlisted_followers(bench.agent, [key], []) == {key}
    assert unlisted_followers(bench.agent, [key], [advert]) == set()
