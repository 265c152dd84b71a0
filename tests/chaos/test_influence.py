"""Attacks by free keys on what a node learns from, carried out over the in-memory network against whole agents.

The attackers follow every rule: their groups are admissible, fresh and many.
"""

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from workers import make_report

from swarm.config import CoordinatorLink, EntryConfig, ReplayConfig
from swarm.events import GroupsDrawn
from swarm.testing.builders import TOY_RUN_ID, make_group, make_identity
from swarm.types import NodeId, PolicyVersion, Role
from swarm.wire.credentials import Credential, seal_invitation

from .following_world import Generator, Node, Trainer, World, scene, until

BOTH = (Role.TRAINER, Role.GENERATOR)
COORDINATOR = make_identity(99)
GROUPS = ReplayConfig(local_groups=2, external_groups=2, max_age_steps=4)


class Peer(Node):
    """Trains and generates: `seconds` for a batch of its own groups; without `learns` it only sends them."""

    def __init__(
        self, world: World, number: int, members: Sequence[int], seconds: float = 1.0, learns: bool = True
    ) -> None:
        entry = EntryConfig(members=tuple(make_identity(100 + member).node_id for member in members))
        sections: dict[str, Any] = {"replay": GROUPS, "entry": entry}
        link = CoordinatorLink(fingerprint=COORDINATOR.node_id)
        super().__init__(world, number, BOTH, coordinator=link, **sections)
        self.identity = make_identity(100 + number)
        self.node_id = self.identity.node_id
        self.seconds, self.learns = seconds, learns
        self.num_made = 0
        self.step = 0

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(policy_id=self.node_id, step=self.step, digest=bytes([self.step % 256]) * 32)

    async def work(self) -> None:
        await self.agent.local.publish(self.version)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._generate())
            if self.learns:
                tasks.create_task(self._learn())

    async def _generate(self) -> None:
        while True:
            await asyncio.sleep(self.seconds)
            for _ in range(GROUPS.local_groups):
                self.num_made += 1
                task_id = 10_000 * self.number + self.num_made
                now_s = self.world.clock.now_s()
                await self.agent.local.put(
                    make_group(self.node_id, task_id=task_id, step=self.step, created_at_s=now_s)
                )

    async def _learn(self) -> None:
        while True:
            draw = await self.agent.local.draw(self.version)
            self.step += 1
            await self.agent.local.publish(self.version)
            await self.agent.local.report_step(make_report(self.version, draw_step=draw.step))

    def drawn(self, after: int = 0) -> Counter[NodeId]:
        """Groups of others in its draws after the first few, by producer."""
        uses = [use for event in self.emitted(GroupsDrawn)[after:] for use in event.groups]
        return Counter(use.producer for use in uses if use.producer != self.node_id)


def share_of(nodes: Sequence[Node], drawn: Counter[NodeId]) -> float:
    """Of the groups drawn, those of these nodes."""
    return sum(drawn[node.node_id] for node in nodes) / max(1, sum(drawn.values()))


@pytest.mark.sweep
@scene()
async def test_six_free_keys_of_eight_have_an_eighth_of_the_draws(world: World) -> None:
    honest = [Peer(world, number, members=(1, 2, 3)) for number in (1, 2, 3)]
    hostile = [Peer(world, 10 + number, members=(), seconds=0.5, learns=False) for number in range(6)]
    for node in (*honest, *hostile):
        await node.start()
    await until(lambda: all(node.step >= 64 for node in honest), "64 steps", seconds=400.0)
    for node in honest:
        drawn = node.drawn()
        nominal = 2 * len(node.emitted(GroupsDrawn))
        assert sum(drawn[other.node_id] for other in hostile) <= nominal / 8 + 8
        assert sum(drawn.values()) >= 0.9 * nominal, "nothing of what members bring is lost"
    for node in (*honest, *hostile):
        await node.kill()


@scene()
async def test_eight_free_keys_that_follow_a_trainer_have_an_eighth_of_its_groups(world: World) -> None:
    honest = [Generator(world, number, seconds=0.5) for number in (1, 2)]
    hostile = [Generator(world, 10 + number, seconds=0.1) for number in range(8)]
    entry = EntryConfig(members=tuple(node.node_id for node in honest))
    trainer = Trainer(world, entry=entry)
    await trainer.start()
    await trainer.publish()
    for node in (*honest, *hostile):
        await node.start()
    await asyncio.wait_for(trainer.learn(32), 400.0)
    uses = [use for event in trainer.emitted(GroupsDrawn) for use in event.groups]
    share = share_of(hostile, Counter(use.producer for use in uses))
    assert share <= 1 / 8 + 0.01
    for node in (trainer, *honest, *hostile):
        await node.kill()


@pytest.mark.sweep
@scene()
async def test_a_newcomer_that_is_invited_has_its_full_share_within_minutes(world: World) -> None:
    members = [Peer(world, number, members=(1, 2, 3)) for number in (1, 2, 3)]
    newcomer = Peer(world, 4, members=(1, 2, 3))
    for node in (*members, newcomer):
        await node.start()
    await asyncio.sleep(120.0)
    before = [node.drawn() for node in members]
    assert all(
        drawn[newcomer.node_id] <= 2 * len(node.emitted(GroupsDrawn)) / 8 + 8
        for node, drawn in zip(members, before, strict=True)
    )
    for node in members:
        rule = node.agent.parties.entry
        assert rule is not None
        invitation = seal_invitation(COORDINATOR, TOY_RUN_ID, newcomer.node_id, world.clock.now_s() + 86_400)
        rule.require(newcomer.node_id, Credential(invitation=invitation).to_bytes())
    counts = [len(node.emitted(GroupsDrawn)) for node in members]

    def has_full_share(node: Peer) -> bool:  # of what the last 32 steps drew of others
        drawn = node.drawn(after=len(node.emitted(GroupsDrawn)) - 32)
        return share_of([newcomer], drawn) > 0.9 / 3

    async with asyncio.timeout(600.0):
        while not all(map(has_full_share, members)):  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(5.0)
    print(f"full share {world.clock.monotonic_s() - 120.0:.0f} s after the invitation")
    await asyncio.sleep(300.0)
    for node, count in zip(members, counts, strict=True):
        drawn = node.drawn(after=count)
        assert 0.75 / 3 < share_of([newcomer], drawn) < 1.25 / 3, drawn
    for node in (*members, newcomer):
        await node.kill()
