"""World of the tests of following: trainers, generators and their disks on the in-memory network, in virtual time."""

import asyncio
import errno
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from scenes import Scene, make_test
from workers import make_report

from swarm.clock import Clock
from swarm.config import ExchangeConfig, GeneratorConfig, NodeConfig, ReplayConfig, WeightsConfig
from swarm.errors import WeightsRefused
from swarm.events import Event, Kind, events_of
from swarm.loops import run_agent
from swarm.model.version_digest import weights_digest
from swarm.simulate.virtual.directory import MemoryDirectory
from swarm.simulate.virtual.faults import FaultPlan
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.simulate.virtual.loop import run_virtual
from swarm.simulate.virtual.network import MemoryNetwork
from swarm.simulate.virtual.transport import MemoryTransport
from swarm.testing.builders import TOY_RUN_ID, make_group, make_identity
from swarm.testing.nodes import make_agent, make_context
from swarm.types import (
    LoadReport,
    NodeId,
    PolicyVersion,
    Role,
    RolloutGroup,
    TokenTrace,
    VersionSpan,
)
from swarm.weights.apply import Applier, VerifiedVersion
from swarm.weights.publish import Publisher, keep_anchor
from swarm.weights.store import WeightStore
from swarm.weights.tensors import HostTensor, TensorSpec, published_digest

NUM_ELEMENTS = 1_300_000  # 2.6 MB of bf16: three chunks in full
FULL_BYTES = 2 * NUM_ELEMENTS
ANCHOR_EVERY = 4
TRAINER = make_identity(100)
Weights = dict[str, HostTensor]


def initial() -> Weights:
    """The weights that every trainer and generator starts from."""
    bits = np.random.default_rng(0).integers(0x3C00, 0x3F00, NUM_ELEMENTS).astype("<u2")
    return {"w": HostTensor(spec=TensorSpec(name="w", dtype="bfloat16", shape=(NUM_ELEMENTS,)), bits=bits)}


def stepped(weights: Weights, seed: str) -> Weights:
    """A small step, another one for each seed; steps change much the same places, as those of training do."""
    bits = weights["w"].bits.copy()
    places = np.random.default_rng(random.Random(seed).randrange(2**32)).choice(3000, 2000, replace=False)
    bits[places] += 1
    return {"w": HostTensor(spec=weights["w"].spec, bits=bits)}


def stepped_far(weights: Weights) -> Weights:
    """Weights to which only a payload in full leads."""
    return {"w": replace(weights["w"], bits=weights["w"].bits[::-1].copy())}


class LoopClock:
    """The virtual loop's time as a node's clock."""

    def now_s(self) -> float:
        return 1_700_000_000.0 + self.monotonic_s()

    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time()


class Engine:
    """Takes whatever it is given, unless scripted to refuse; checks that weights and name agree."""

    def __init__(self) -> None:
        self.version = PolicyVersion(policy_id="", step=0)
        self.steps: list[int] = []
        self.refuses: Callable[[PolicyVersion], bool] = lambda version: False

    def load(self, version: PolicyVersion, weights: Any, **_: Any) -> LoadReport:
        assert weights_digest(weights) == version.digest, "mixed weights"
        if self.refuses(version):
            raise WeightsRefused("as scripted")
        self.version = version
        self.steps.append(version.step)
        return LoadReport()


class World:
    """The network, the directory, and every node's disk."""

    def __init__(self, root: Path, faults: FaultPlan | None = None) -> None:
        self.root = root
        self.clock: Clock = LoopClock()
        self.network = MemoryNetwork(1, faults or FaultPlan())
        self.directory = MemoryDirectory(self.clock, is_parted=lambda: False)
        self.disks: dict[NodeId, MemoryGroupStore] = {}

    def config(self, number: int, roles: tuple[Role, ...], **sections: Any) -> NodeConfig:
        defaults: dict[str, Any] = {
            "replay": ReplayConfig(local_groups=4, external_groups=0, max_age_steps=2),
            "generator": GeneratorConfig(groups_per_batch=2),
            "weights": WeightsConfig(publish=Role.TRAINER in roles),
            "exchange": ExchangeConfig(lookup_every_s=0.5, advert_every_s=5.0),
        }
        return NodeConfig(dir=self.root / str(number), roles=roles, **{**defaults, **sections})


class Node:
    """One node over a directory that outlives it: an agent with its loops, and what the worker would do."""

    def __init__(self, world: World, number: int, roles: tuple[Role, ...], **sections: Any) -> None:
        self.world, self.number, self.roles, self.sections = world, number, roles, sections
        self.identity = TRAINER if Role.TRAINER in roles and number == 0 else make_identity(100 + number)
        self.node_id = self.identity.node_id
        self.events: list[Event] = []
        self.is_disk_full = False
        self.config = world.config(number, roles, **sections)
        self.store = WeightStore(
            self.config.dir / "weights",
            self.config.weights.store_bytes,
            clock=world.clock,
            before_write=self._before_write,
        )
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        world, config = self.world, self.config
        groups = world.disks.setdefault(self.node_id, MemoryGroupStore(world.clock, 2**26))
        context = make_context(
            config,
            self.identity,
            clock=world.clock,
            emit=self.events.append,
        )
        self.agent = make_agent(context, groups, weights=self.store)
        await self.agent.restore()
        self.transport = MemoryTransport(world.network, self.node_id)
        self.agent.endpoints = await self.transport.serve(self.agent.streams)
        self._running = asyncio.create_task(self._run())

    async def _run(self) -> None:
        directory = self.world.directory.view(self.identity, TOY_RUN_ID, self.world.clock)
        async with asyncio.TaskGroup() as tasks:
            for work in (
                run_agent(self.agent, self.transport, directory, None, random.Random(self.number)),
                self.work(),
            ):
                tasks.create_task(work)

    async def work(self) -> None:
        """The worker; see subclasses."""

    async def kill(self) -> None:
        """As kill -9 would: without a message, and the disk stays as it is."""
        self.world.network.crash(self.node_id)
        await self.stop()

    async def stop(self) -> None:
        """Ends its loops; its transport is there."""
        assert self._running is not None
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    def emitted(self, kind: type[Kind]) -> list[Kind]:
        return events_of(kind, self.events)

    def _before_write(self, num_bytes: int) -> None:
        if self.is_disk_full:
            raise OSError(errno.ENOSPC, "no room")


class Trainer(Node):
    """Learns on demand; what it learned since its checkpoint is lost with it."""

    def __init__(self, world: World, number: int = 0, **sections: Any) -> None:
        super().__init__(world, number, (Role.TRAINER,), **sections)
        self.weights, self.step, self.life = initial(), 0, 0
        self.checkpoint = (self.weights, 0)
        self.publisher = self._publisher()

    def _publisher(self) -> Publisher:
        return Publisher(self.store.put_chunk, anchor_every=ANCHOR_EVERY)

    @property
    def version(self) -> PolicyVersion:
        return PolicyVersion(policy_id=self.node_id, step=self.step, digest=published_digest(self.weights))

    async def publish(self) -> None:
        version = self.version
        await self.agent.local.publish(version, self.publisher.publish(version, self.weights))

    async def learn(self, num_steps: int, from_groups: bool = True) -> None:
        """Steps; without groups where nobody has to make any."""
        for _ in range(num_steps):
            draw = await self.agent.local.draw(self.version) if from_groups else None
            self.weights, self.step = stepped(self.weights, f"{self.life} {self.step}"), self.step + 1
            await self.publish()
            if draw is not None:
                await self.agent.local.report_step(make_report(self.version, draw_step=draw.step))

    def save(self) -> None:
        self.checkpoint = (self.weights, self.step)

    async def restart(self) -> None:
        """Goes on from the checkpoint, and makes other weights than before."""
        (self.weights, self.step), self.life = self.checkpoint, self.life + 1
        self.publisher = self._publisher()
        await self.start()
        await self.publish()


class Generator(Node):
    """Follows, and makes groups as far as it has credit."""

    def __init__(
        self, world: World, number: int, makes_groups: bool = True, seconds: float = 0.2, **sections: Any
    ) -> None:
        super().__init__(world, number, (Role.GENERATOR,), **sections)
        self.engine, self.makes_groups, self.seconds = Engine(), makes_groups, seconds
        self.num_made = 0

    async def work(self) -> None:
        self.applier = self.start_applier()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take_versions())
            if self.makes_groups:
                tasks.create_task(self._generate())

    def start_applier(self) -> Applier:
        """As a worker does when it starts: the engine has the base model."""
        start = VerifiedVersion(
            version=PolicyVersion(policy_id="", step=0, digest=published_digest(initial())), weights=initial()
        )
        keep = partial(keep_anchor, self.store)
        return Applier(self.engine, start, self.store.chunk, keep=keep)  # type: ignore[arg-type]

    @property
    def pulls(self) -> bool:
        return self.makes_groups and self.config.follow.mode == "pull"

    async def _take_versions(self) -> None:
        while True:
            await self._take(wait=True)
            if self.pulls:
                return
            await asyncio.sleep(0.05)

    async def _take(self, wait: bool) -> None:
        chain = await self.agent.local.next_update(self.applier.version, wait=wait)
        if chain is not None:
            report = self.applier.apply(chain)
            await self.agent.local.report_update(report)
            await asyncio.sleep(0.5 if report.error else 0.0)

    async def _generate(self) -> None:
        while True:
            count = min(await self.agent.local.wait_capacity(), self.config.generator.groups_per_batch)
            if self.pulls:
                await self._take(wait=False)
            version = self.engine.version
            await asyncio.sleep(self.seconds)
            for _ in range(count):
                self.num_made += 1
                await self.agent.local.put(made_by(self, version, task_id=1000 * self.number + self.num_made))


def made_by(node: Node, version: PolicyVersion, task_id: int) -> RolloutGroup:
    """A group that a follower made with its trainer's weights, just now."""

    def renamed(trace: TokenTrace) -> TokenTrace:
        return replace(trace, spans=(VersionSpan(start=0, version=version),))

    group = make_group(node.node_id, task_id=task_id, created_at_s=node.world.clock.now_s())
    rollouts = tuple(replace(r, trace=renamed(r.trace)) for r in group.rollouts if r.trace is not None)
    return replace(group, policy_id=version.policy_id, rollouts=rollouts)


def follower_of(node: Node) -> Any:
    """The follower part of a node's agent."""
    assert node.agent.weight_follower is not None
    return node.agent.weight_follower


async def until(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Lets virtual time pass until something holds."""
    end_s = asyncio.get_running_loop().time() + seconds
    while not holds():
        assert asyncio.get_running_loop().time() < end_s, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.05)


async def serves(generator: Generator, trainer: Trainer, seconds: float = 60.0) -> None:
    """Waits until a generator serves the trainer's newest version."""
    await until(lambda: generator.engine.version == trainer.version, f"step {trainer.version.step} serves", seconds)


async def trainer_and_follower(world: World) -> tuple[Trainer, Generator]:
    """A trainer that published, and a generator that serves its version, and makes no groups."""
    trainer, generator = Trainer(world), Generator(world, 1, makes_groups=False)
    await trainer.start()
    await trainer.publish()
    await generator.start()
    await serves(generator, trainer)
    return trainer, generator


def play(root: Path, scene: Callable[[World], Awaitable[None]], faults: FaultPlan | None = None) -> None:
    """Runs a scene in virtual time, its nodes' directories below `root`."""

    async def main() -> None:
        await scene(World(root, faults))

    run_virtual(main())


def scene(faults: FaultPlan | None = None) -> Callable[[Scene], Scene]:
    """Makes a test of a coroutine: a scene over the test's own directory."""

    def run(acts: Callable[[World], Awaitable[None]], tmp_path: Path) -> None:
        play(tmp_path, acts, faults)

    return lambda acts: make_test(acts, run, ("tmp_path",), num_given=1)
