"""A trainer and the generators that follow it, on the in-memory network: whatever breaks, no weights are ever mixed."""

import asyncio
import errno
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.status import _following_problems
from swarm.clock import Clock
from swarm.config import ExchangeConfig, FollowConfig, GeneratorConfig, NodeConfig, ReplayConfig, WeightsConfig
from swarm.errors import WeightsRefused
from swarm.exchange.admit import Door
from swarm.exchange.agent import Agent
from swarm.exchange.checks import DoorLimits
from swarm.exchange.directory import MemoryDirectory
from swarm.exchange.faults import FaultPlan
from swarm.exchange.holders import MAX_FAILURES
from swarm.exchange.memory import MemoryTransport
from swarm.exchange.memory_network import MemoryNetwork
from swarm.exchange.memory_store import MemoryGroupStore
from swarm.exchange.replay import ReplayBuffer
from swarm.exchange.standing import Standing
from swarm.interfaces import StreamItem
from swarm.loops import run_agent
from swarm.loops.follow import whom_to_watch
from swarm.model import weights_digest
from swarm.simulate.virtual_loop import run_virtual
from swarm.testing import TOY_ENV, TOY_RUN_ID, ScriptedVerifier, ToyCodec, make_group, make_identity
from swarm.types import (
    Advert,
    Correction,
    Cursor,
    Digest,
    JsonDict,
    Leave,
    LoadReport,
    NodeId,
    PolicyVersion,
    Refused,
    Role,
    RolloutGroup,
    SealedGroup,
    SealedManifest,
    StepReport,
    TokenTrace,
    VersionSpan,
    Wanted,
)
from swarm.weights.apply import Applier
from swarm.weights.chunks import CHUNK_BYTES
from swarm.weights.publish import Held
from swarm.weights.publisher import Publisher
from swarm.weights.store import WeightStore
from swarm.weights.tensors import HostTensor, TensorSpec, published_digest
from swarm.wire.convert import seal_group

NUM_ELEMENTS = 1_300_000  # 2.6 MB of bf16: three chunks in full
FULL_BYTES = 2 * NUM_ELEMENTS
ANCHOR_EVERY = 4
TRAINER = make_identity(100)
Weights = dict[str, HostTensor]


def initial() -> Weights:
    bits = np.random.default_rng(0).integers(0x3C00, 0x3F00, NUM_ELEMENTS).astype("<u2")
    return {"w": HostTensor(spec=TensorSpec(name="w", dtype="bfloat16", shape=(NUM_ELEMENTS,)), bits=bits)}


def stepped(weights: Weights, seed: str) -> Weights:
    """A small step, another one for each seed; steps change much the same places, as those of training do."""
    bits = weights["w"].bits.copy()
    places = np.random.default_rng(random.Random(seed).randrange(2**32)).choice(3000, 2000, replace=False)
    bits[places] += 1
    return {"w": HostTensor(spec=weights["w"].spec, bits=bits)}


async def inline(function: Callable[..., Any], /, *arguments: object) -> Any:
    return function(*arguments)


class LoopClock:
    """The virtual loop's time as a node's clock."""

    def now_s(self) -> float:
        return 1_700_000_000.0 + self.monotonic_s()

    def monotonic_s(self) -> float:
        return asyncio.get_running_loop().time()


class Engine:
    """Takes whatever it is given, unless told to refuse; checks that weights and name agree."""

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
        self.directory = MemoryDirectory(is_parted=lambda: False)
        self.disks: dict[NodeId, MemoryGroupStore] = {}

    def config(self, number: int, roles: tuple[Role, ...], **sections: Any) -> NodeConfig:
        defaults: dict[str, Any] = {
            "replay": ReplayConfig(local_groups=4, external_groups=0, max_age_steps=2),
            "generator": GeneratorConfig(groups_per_batch=2),
            "weights": WeightsConfig(publish=Role.TRAINER in roles, anchor_every=ANCHOR_EVERY),
            "exchange": ExchangeConfig(lookup_every_s=0.5, advert_every_s=5.0),
        }
        return NodeConfig(dir=self.root / str(number), roles=roles, **{**defaults, **sections})


class Node:
    """One node over a directory that outlives it: an agent with its loops, and what the worker would do."""

    def __init__(self, world: World, number: int, roles: tuple[Role, ...], **sections: Any) -> None:
        self.world, self.number, self.roles, self.sections = world, number, roles, sections
        self.identity = TRAINER if Role.TRAINER in roles and number == 0 else make_identity(100 + number)
        self.node_id = self.identity.node_id
        self.events: list[tuple[str, JsonDict]] = []
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
        verifier = ScriptedVerifier()
        door = Door(
            run_id=TOY_RUN_ID,
            node_id=self.node_id,
            codec=ToyCodec(),
            verifier=verifier,
            store=groups,
            clock=world.clock,
            limits=DoorLimits.from_config(config),
            head_of=lambda policy_id: self.agent.head_of(policy_id),
            environments=frozenset({TOY_ENV}),
            standing=Standing(world.clock, groups_per_minute=6000),
            offload=inline,
        )
        self.agent = Agent(
            config=config,
            identity=self.identity,
            store=groups,
            replay=ReplayBuffer(config.replay, self.node_id, 0, world.clock),
            door=door,
            verifier=verifier,
            tokenizer_digest=ToyCodec().digest,
            clock=world.clock,
            emit=lambda kind, fields: self.events.append((kind, fields)),
            weights=self.store,
            offload=inline,
        )
        await self.agent.restore()
        self.transport = MemoryTransport(world.network, self.node_id)
        self.agent.endpoints = await self.transport.serve(self.agent.serving)
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
        """What the worker does; see subclasses."""

    async def kill(self) -> None:
        """As kill -9 would: nothing is said, and the disk stays as it is."""
        self.world.network.crash(self.node_id)
        assert self._running is not None
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    def told(self, kind: str) -> list[JsonDict]:
        return [fields for name, fields in self.events if name == kind]

    def _before_write(self, num_bytes: int) -> None:
        if self.is_disk_full:
            raise OSError(errno.ENOSPC, "no room")


class Trainer(Node):
    """Learns when told to; what it learned since its checkpoint is lost with it."""

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
        await self.agent.publish(version, self.publisher.publish(version, self.weights))

    async def learn(self, num_steps: int, from_groups: bool = True) -> None:
        """Steps; without groups where nobody has to make any."""
        for _ in range(num_steps):
            draw = await self.agent.draw(self.version) if from_groups else None
            self.weights, self.step = stepped(self.weights, f"{self.life} {self.step}"), self.step + 1
            await self.publish()
            if draw is not None:
                await self.agent.report(report_of(self.version, draw.step))

    def save(self) -> None:
        self.checkpoint = (self.weights, self.step)

    async def restart(self) -> None:
        """Goes on from the checkpoint, and makes other weights than before."""
        (self.weights, self.step), self.life = self.checkpoint, self.life + 1
        self.publisher = self._publisher()
        await self.start()
        await self.publish()


class Generator(Node):
    """Follows, and makes groups as far as it has leave."""

    def __init__(
        self, world: World, number: int, makes_groups: bool = True, seconds: float = 0.2, **sections: Any
    ) -> None:
        super().__init__(world, number, (Role.GENERATOR,), **sections)
        self.engine, self.makes_groups, self.seconds = Engine(), makes_groups, seconds
        self.num_made = 0

    async def work(self) -> None:
        start = Held(version=PolicyVersion(policy_id="", step=0, digest=published_digest(initial())), weights=initial())
        self.applier = Applier(self.engine, start, self.store.chunk)  # type: ignore[arg-type]
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._take_versions())
            if self.makes_groups:
                tasks.create_task(self._generate())

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
        way = await self.agent.next_way(self.applier.version, wait=wait)
        if way is not None:
            report = self.applier.apply(way)
            await self.agent.applied(report)
            await asyncio.sleep(0.5 if report.error else 0.0)

    async def _generate(self) -> None:
        while True:
            count = min(await self.agent.wait_capacity(), self.config.generator.groups_per_batch)
            if self.pulls:
                await self._take(wait=False)
            version = self.engine.version
            await asyncio.sleep(self.seconds)
            for _ in range(count):
                self.num_made += 1
                await self.agent.put(made_by(self, version, task_id=1000 * self.number + self.num_made))


def made_by(node: Node, version: PolicyVersion, task_id: int) -> RolloutGroup:
    """A group that a follower made with its trainer's weights, just now."""

    def renamed(trace: TokenTrace) -> TokenTrace:
        return replace(trace, spans=(VersionSpan(start=0, version=version),))

    group = make_group(node.node_id, task_id=task_id, created_at_s=node.world.clock.now_s())
    rollouts = tuple(replace(r, trace=renamed(r.trace)) for r in group.rollouts if r.trace is not None)
    return replace(group, policy_id=version.policy_id, rollouts=rollouts)


def report_of(version: PolicyVersion, draw_step: int) -> StepReport:
    return StepReport(
        version=version,
        loss=0.0,
        grad_norm=0.0,
        num_tokens=1,
        was_skipped=False,
        diagnostics={},
        seconds={},
        draw_step=draw_step,
    )


async def until(holds: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Lets virtual time pass until something holds."""
    end_s = asyncio.get_running_loop().time() + seconds
    while not holds():
        assert asyncio.get_running_loop().time() < end_s, f"not within {seconds} s: {what}"
        await asyncio.sleep(0.05)


async def serves(generator: Generator, trainer: Trainer, seconds: float = 60.0) -> None:
    """Waits until a generator serves the trainer's newest version."""
    await until(lambda: generator.engine.version == trainer.version, f"step {trainer.version.step} serves", seconds)


def play(root: Path, scene: Callable[[World], Awaitable[None]], faults: FaultPlan | None = None) -> None:
    async def main() -> None:
        await scene(World(root, faults))

    run_virtual(main())


# --- the usual course ------------------------------------------------------------------------------


def test_a_trainer_learns_from_those_who_follow_it_and_every_token_names_a_version_that_existed(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
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
            assert generator.agent.advert().head == trainer.version
            assert len(generator.told("applied")) == len(generator.engine.steps)
        drawn = Counter(group["producer"] for draw in trainer.told("draw") for group in draw["groups"])
        assert drawn.keys() == {generator.node_id for generator in generators}
        refused = [fields["reason"] for fields in trainer.told("refused")]  # only the slow one is overtaken at times
        assert set(refused) <= {"too_old"} and len(refused) <= 0.15 * sum(drawn.values())
        most = (trainer.config.replay.max_age_steps + 1) * trainer.config.replay.local_groups
        assert trainer.agent.leaves.num_outstanding + trainer.agent.replay.num_local <= most
        assert not any(node.agent.num_failures for node in (trainer, *generators))

    play(tmp_path, scene)


def test_a_patch_is_fetched_where_the_weights_are_held_and_nothing_where_they_are_the_same(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        trainer, generator = Trainer(world), Generator(world, 1, makes_groups=False)
        await trainer.start()
        await trainer.publish()
        await generator.start()
        await serves(generator, trainer)
        assert generator.agent.following is not None and generator.agent.following.bytes_fetched == 0
        await trainer.learn(3, from_groups=False)
        await serves(generator, trainer)
        assert 0 < generator.agent.following.bytes_fetched < FULL_BYTES / 50

    play(tmp_path, scene)


def test_who_comes_later_is_served_by_those_who_came_before(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        trainer = Trainer(world)
        others = [Generator(world, number, makes_groups=False) for number in (1, 2)]
        await trainer.start()
        await trainer.learn(1, from_groups=False)
        for node in others:
            await node.start()
            await serves(node, trainer)
        await asyncio.sleep(2.0)
        before = trainer.agent.holding.bytes_sent
        late = Generator(world, 3, makes_groups=False)
        await late.start()
        await asyncio.sleep(0.4)
        await serves(late, trainer)
        await trainer.learn(2, from_groups=False)
        await serves(late, trainer)
        assert sum(node.agent.holding.bytes_sent for node in others) > 0
        assert late.agent.following is not None
        assert trainer.agent.holding.bytes_sent - before < 3 * late.agent.following.bytes_fetched

    play(tmp_path, scene)


def test_a_trainer_takes_groups_from_all_who_have_its_leave_whatever_the_overlay_says(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        few = ExchangeConfig(lookup_every_s=0.5, advert_every_s=5.0, max_neighbours=1)
        trainer = Trainer(world, exchange=few)
        generators = [Generator(world, number, exchange=few) for number in (1, 2, 3, 4)]
        await trainer.start()
        await trainer.publish()
        for generator in generators:
            await generator.start()
        await trainer.learn(12)
        drawn = Counter(group["producer"] for draw in trainer.told("draw") for group in draw["groups"])
        assert drawn.keys() == {generator.node_id for generator in generators}
        assert all(not generator.agent.peers.connected for generator in generators), "they take nobody's groups"

    play(tmp_path, scene)


def test_groups_that_are_refused_give_their_leave_back_and_forged_ones_do_not(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        trainer, generator = Trainer(world), Generator(world, 1, makes_groups=False)
        await trainer.start()
        await trainer.publish()
        await generator.start()
        await serves(generator, trainer)
        leaves = trainer.agent.leaves
        await until(lambda: leaves.num_outstanding > 0, "it has leave")
        [watch] = leaves.status().values()
        given = watch["limit"]
        stranger = make_identity(300)
        forged = seal_group(made_by(generator, trainer.version, task_id=5), generator.identity)
        await trainer.agent.receive(replace(forged, signature=bytes(64)), via=stranger.node_id)
        assert leaves.status()[generator.node_id]["arrived"] == 0
        old = replace(trainer.version, digest=bytes(32))  # never existed
        refused = await trainer.agent.receive(
            seal_group(made_by(generator, old, task_id=6), generator.identity), via=generator.node_id
        )
        assert isinstance(refused, Refused) and leaves.status()[generator.node_id]["arrived"] == 1
        await trainer.agent.receive(forged, via=stranger.node_id)  # the true one, handed on
        again = await trainer.agent.receive(forged, via=generator.node_id)
        assert isinstance(again, Refused) and leaves.status()[generator.node_id]["arrived"] == 2
        await until(lambda: leaves.status()[generator.node_id]["limit"] > given, "it gets more")

    play(tmp_path, scene)


def test_a_laggard_catches_up_with_fewer_bytes_than_replaying_every_step(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
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
        assert steady.agent.following is not None
        before = steady.agent.following.bytes_fetched
        for _ in range(ANCHOR_EVERY):  # up to the next anchor, one step at a time
            await trainer.learn(1, from_groups=False)
            await serves(steady, trainer)
        replayed = steady.agent.following.bytes_fetched - before
        again = Restarted(generator)
        await again.start()
        await serves(again, trainer)
        assert again.agent.following is not None
        caught_up = again.agent.following.bytes_fetched
        assert caught_up < 0.75 * replayed, (caught_up, replayed)
        assert again.engine.steps[-1] == 2 * ANCHOR_EVERY and len(again.engine.steps) <= 2

    play(tmp_path, scene)


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


# --- what breaks -------------------------------------------------------------------------------------


def test_a_generator_killed_in_the_middle_of_a_download_goes_on_with_what_it_has(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        trainer = Trainer(world)
        await trainer.start()
        trainer.weights = {
            "w": replace(trainer.weights["w"], bits=trainer.weights["w"].bits[::-1].copy())
        }  # a long way
        await trainer.learn(1, from_groups=False)
        generator = Generator(world, 1, makes_groups=False)
        await generator.start()
        await until(lambda: following_of(generator).bytes_fetched >= CHUNK_BYTES, "the first chunk comes")
        assert generator.engine.steps == []
        fetched = following_of(generator).bytes_fetched
        await generator.kill()
        again = Generator(world, 1, makes_groups=False)
        await again.start()
        await serves(again, trainer)
        assert again.engine.steps == [1]
        assert fetched + following_of(again).bytes_fetched < 1.05 * FULL_BYTES + CHUNK_BYTES

    play(tmp_path, scene, FaultPlan(bytes_per_s=0.5e6))


def following_of(node: Node) -> Any:
    assert node.agent.following is not None
    return node.agent.following


def test_a_holder_that_disappears_in_the_middle_costs_nothing_but_time(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        trainer, holder = Trainer(world), Generator(world, 1, makes_groups=False)
        await trainer.start()
        trainer.weights = stepped_far(trainer.weights)
        await trainer.learn(1, from_groups=False)
        await holder.start()
        await serves(holder, trainer)
        await asyncio.sleep(6.0)
        late = Generator(world, 2, makes_groups=False)
        await late.start()
        await until(lambda: holder.agent.holding.bytes_sent > 0, "the holder is asked")
        await holder.kill()
        await serves(late, trainer)
        assert late.engine.steps[-1] == 1

    play(tmp_path, scene, FaultPlan(bytes_per_s=1e6))


def stepped_far(weights: Weights) -> Weights:
    """Weights to which only a payload in full leads."""
    return {"w": replace(weights["w"], bits=weights["w"].bits[::-1].copy())}


def test_a_trainer_that_is_away_stops_generation_and_its_return_starts_it_again(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        trainer, generator = Trainer(world), Generator(world, 1)
        await trainer.start()
        await trainer.publish()
        await generator.start()
        await trainer.learn(2)
        trainer.save()
        await trainer.kill()
        await asyncio.sleep(1.0)
        assert await generator.agent.capacity() == 0
        status = following_of(generator).status()
        assert not status["is_trainer_connected"] and status["leave"] == 0
        num_made = generator.num_made
        await asyncio.sleep(10.0)
        assert generator.num_made <= num_made + generator.config.generator.groups_per_batch
        await trainer.restart()
        await trainer.learn(3)
        await serves(generator, trainer)

    play(tmp_path, scene)


def test_a_trainer_killed_in_the_middle_of_publishing_shows_nothing_of_it(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        trainer, generator = Trainer(world), Generator(world, 1, makes_groups=False)
        await trainer.start()
        await trainer.publish()
        await generator.start()
        await serves(generator, trainer)
        trainer.save()
        served = trainer.version
        trainer.weights, trainer.step = stepped(trainer.weights, "lost"), 1
        bodies = trainer.publisher.publish(trainer.version, trainer.weights)
        assert bodies, "its chunks are on the disk"
        await trainer.kill()  # before the agent heard of the manifests
        await trainer.restart()
        await asyncio.sleep(5.0)
        assert generator.engine.version == served and following_of(generator).status()["newest_step"] == 0
        await trainer.learn(1, from_groups=False)
        await serves(generator, trainer)
        assert not generator.told("apply_failed")

    play(tmp_path, scene)


def test_a_trainer_that_goes_back_to_its_checkpoint_is_followed_onto_its_new_branch(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
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
        for draw in trainer.told("draw"):
            assert all(group["age"] <= trainer.config.replay.max_age_steps for group in draw["groups"])

    play(tmp_path, scene)


def test_a_worker_that_goes_back_under_a_living_agent_is_followed_too(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
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

    play(tmp_path, scene)


def test_a_damaged_chunk_on_the_disk_is_fetched_again_and_never_loaded(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        trainer, generator = Trainer(world), Generator(world, 1, makes_groups=False)
        await trainer.start()
        await trainer.publish()
        await generator.start()
        await serves(generator, trainer)
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
        [failed] = generator.told("apply_failed")
        assert failed["step"] == 1 and "wrong_chunk" in failed["error"]
        assert following_of(generator).status()["last_error"] == ""

    play(tmp_path, scene)


def test_a_full_disk_keeps_the_old_version_serving_and_following_goes_on_when_there_is_room(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        trainer, generator = Trainer(world), Generator(world, 1)
        await trainer.start()
        await trainer.publish()
        await generator.start()
        await trainer.learn(1)
        await serves(generator, trainer)
        served, generator.is_disk_full = trainer.version, True
        await trainer.learn(1)
        num_made = generator.num_made
        await until(lambda: bool(generator.told("storage_full")), "it is told")
        await asyncio.sleep(3.0)
        assert generator.engine.version == served and generator.num_made > num_made
        generator.is_disk_full = False
        await serves(generator, trainer)
        await trainer.learn(2)
        await serves(generator, trainer)

    play(tmp_path, scene)


def test_a_full_disk_of_the_trainer_shows_nothing_half_and_the_next_version_is_followed(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        trainer, generator = Trainer(world), Generator(world, 1, makes_groups=False)
        await trainer.start()
        await trainer.publish()
        await generator.start()
        await serves(generator, trainer)
        served = trainer.version
        trainer.weights, trainer.step = stepped(trainer.weights, "one"), 1
        bodies = trainer.publisher.publish(trainer.version, trainer.weights)
        trainer.is_disk_full = True  # the chunks are there, the manifest finds no room
        await trainer.agent.publish(trainer.version, bodies)
        await asyncio.sleep(3.0)
        assert generator.engine.version == served and trainer.told("unpublished")[0]["step"] == 1
        trainer.is_disk_full = False
        await trainer.learn(1, from_groups=False)
        await trainer.learn(ANCHOR_EVERY, from_groups=False)
        await serves(generator, trainer)

    play(tmp_path, scene)


def test_a_version_that_the_engine_refuses_is_told_and_the_next_one_is_taken(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        trainer, generator = Trainer(world), Generator(world, 1)
        generator.engine.refuses = lambda version: version.step == 2
        await trainer.start()
        await trainer.publish()
        await generator.start()
        await trainer.learn(2)
        await until(lambda: len(generator.told("apply_failed")) == 2, "it is tried twice")
        await asyncio.sleep(5.0)
        assert len(generator.told("apply_failed")) == 2 and generator.engine.version.step == 1
        status = following_of(generator).status()
        assert status["last_error"] == "step 2: as scripted" and status["num_apply_failed"] == 2
        await trainer.learn(3)
        await serves(generator, trainer)
        assert 2 not in generator.engine.steps and following_of(generator).status()["last_error"] == ""

    play(tmp_path, scene)


def test_a_generator_that_vanishes_leaves_its_leave_to_the_others(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        trainer, lives = Trainer(world), Generator(world, 1)
        dies = Generator(world, 2, seconds=1e6)
        await trainer.start()
        await trainer.publish()
        await dies.start()
        await until(
            lambda: dies.agent.following is not None and dies.agent.following.leave.num_left > 0, "it has leave"
        )
        await lives.start()
        await trainer.learn(2)
        assert trainer.agent.leaves.followers == {lives.node_id, dies.node_id}
        await dies.kill()
        await asyncio.sleep(1.0)
        assert trainer.agent.leaves.followers == {lives.node_id}
        await trainer.learn(3)

    play(tmp_path, scene)


# --- who lies ------------------------------------------------------------------------------------------


class Liar:
    """Says that it holds the trainer's lineage. What it serves is scripted."""

    def __init__(self, world: World, number: int, manifests: Callable[[], list[SealedManifest]]) -> None:
        self.world, self.identity, self.manifests = world, make_identity(200 + number), manifests
        self.num_asked = self.num_watched = 0
        self.talks_for_ever = False

    async def start(self, step: int) -> None:
        transport = MemoryTransport(self.world.network, self.identity.node_id)
        endpoints = await transport.serve(self)
        now_s = self.world.clock.now_s()
        advert = Advert(
            node_id=self.identity.node_id,
            run_id=TOY_RUN_ID,
            endpoints=endpoints,
            roles=(Role.GENERATOR,),
            tokenizer_digest=ToyCodec().digest,
            head=PolicyVersion(policy_id=TRAINER.node_id, step=step),
            oldest_step=0,
            num_groups=0,
            reward_mean=0.0,
            reward_std=0.0,
            correction=Correction.EXACT,
            held_bytes=0,
            cursor=Cursor(),
            expires_at_s=now_s + 250,
        )
        await self.world.directory.view(self.identity, TOY_RUN_ID, self.world.clock).announce(advert)

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: Wanted) -> AsyncIterator[StreamItem]:
        await asyncio.Event().wait()
        yield  # type: ignore[misc]

    async def fetch(self, peer: NodeId, digest: Digest) -> SealedGroup:
        raise AssertionError("nobody asks")

    async def watch(self, peer: NodeId, policy_id: str, window: int) -> AsyncIterator[SealedManifest | Leave]:
        self.num_watched += 1
        for sealed in self.manifests():
            yield sealed
        yield Leave(head_step=10**6, limit=10**6)  # only the trainer can give leave
        while self.talks_for_ever:
            await asyncio.sleep(0)
            yield self.manifests()[0]
        await asyncio.Event().wait()

    async def chunk(self, peer: NodeId, digest: Digest) -> bytes:
        self.num_asked += 1
        return b"garbage" * 1000


class Staller(Liar):
    """Holds the true manifests, and never sends a chunk."""

    async def chunk(self, peer: NodeId, digest: Digest) -> bytes:
        self.num_asked += 1
        await asyncio.Event().wait()
        raise AssertionError


def test_holders_that_stall_cost_seconds_and_soon_make_room_for_others(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
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
        holders = following_of(generator).holders
        for staller in stallers:  # each new version gives it another chance until it is banned
            for _ in range(MAX_FAILURES):
                holders.failed(staller.identity.node_id, world.clock.monotonic_s())
        adverts = await world.directory.view(generator.identity, TOY_RUN_ID, world.clock).lookup()
        watched = whom_to_watch(generator.agent, following_of(generator), adverts)
        assert {address.node_id for address in watched} == {trainer.node_id}

    play(tmp_path, scene)


def test_over_a_slow_link_the_trainer_stays_connected_and_its_version_comes(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        trainer, generator = Trainer(world), Generator(world, 1, makes_groups=False)
        await trainer.start()
        await trainer.publish()
        await generator.start()
        await serves(generator, trainer)
        await until(lambda: following_of(generator).leave.num_left > 0, "it has leave")
        ended = list[str]()
        watch_ends(generator, ended)
        trainer.weights = stepped_far(trainer.weights)
        await trainer.learn(1, from_groups=False)
        await until(lambda: generator.engine.version.step == 1, "it comes", 1800.0)
        assert ended == [] and following_of(generator).holders.scores[trainer.node_id].num_failures > 0

    play(tmp_path, scene, FaultPlan(bytes_per_s=15e3))  # 70 s for a chunk


def test_a_version_that_found_no_room_is_taken_when_there_is_some_though_no_newer_one_comes(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        trainer = Trainer(world)
        generator = Generator(world, 1, makes_groups=False, follow=FollowConfig(mode="pull"))
        await trainer.start()
        await trainer.publish()
        await generator.start()
        await serves(generator, trainer)
        generator.is_disk_full = True
        await trainer.learn(1, from_groups=False)
        await until(lambda: bool(generator.told("storage_full")), "it is told")
        await generator.agent.tidy(2**30)
        assert following_of(generator).status()["newest_step"] == 1
        generator.is_disk_full = False
        await serves(generator, trainer)
        await generator.agent.tidy(2**30)
        assert following_of(generator).capacity() > 0
        assert max(m.version.step for m, _ in generator.store.manifests(trainer.node_id)) == 1

    play(tmp_path, scene)


def test_what_is_published_while_the_disk_is_tidied_is_served(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        trainer = Trainer(world)
        await trainer.start()
        await trainer.publish()
        publishing, store = trainer.agent.publishing, trainer.store
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
        assert trainer.agent.holding.head_step(trainer.node_id) == 1

    play(tmp_path, scene)


@pytest.mark.parametrize("kind", ["forged chunks", "forged manifests", "endless talk"])
def test_a_hostile_holder_is_dropped_for_long_and_the_version_comes_from_others(tmp_path: Path, kind: str) -> None:
    async def scene(world: World) -> None:
        trainer, generator = Trainer(world), Generator(world, 1, makes_groups=False)
        await trainer.start()
        trainer.weights = stepped_far(trainer.weights)
        await trainer.learn(1, from_groups=False)

        def manifests() -> list[SealedManifest]:
            true = [sealed for _, sealed in trainer.store.manifests(TRAINER.node_id)]
            return [replace(sealed, body=sealed.body + b"?") for sealed in true] if kind == "forged manifests" else true

        liar = Liar(world, 0, manifests)
        liar.talks_for_ever = kind == "endless talk"
        await liar.start(step=1)
        await generator.start()
        await serves(generator, trainer)
        await until(lambda: following_of(generator).holders.is_banned(liar.identity.node_id), "it is dropped")
        asked, watched = liar.num_asked, liar.num_watched
        await trainer.learn(3, from_groups=False)
        await serves(generator, trainer)
        await asyncio.sleep(60.0)
        assert (liar.num_asked, liar.num_watched) == (asked, watched)
        assert following_of(generator).leave.head_step == trainer.version.step
        assert generator.agent.num_failures == 0

    play(tmp_path, scene)


def test_a_holder_cannot_lead_back_onto_a_branch_that_is_no_more(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
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

    play(tmp_path, scene)


# --- whom to follow, and when ------------------------------------------------------------------------------


def test_between_two_trainers_a_generator_waits_and_says_which_key_names_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scene(world: World) -> None:
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
        status = following_of(torn).status()
        assert set(status["rivals"]) == {first.node_id, second.node_id} and not status["policy"]
        assert torn.engine.steps == [] and await torn.agent.capacity() == 0
        assert [record.message for record in caplog.records if "follow.policy" in record.message]
        problems = _following_problems(status)
        assert "follow.policy" in problems[0] and first.node_id[:8] in problems[0]
        world.directory.adverts = {key: a for key, a in world.directory.adverts.items() if key[1] != second.node_id}
        await asyncio.sleep(3.0)  # a look-up or some that miss it
        assert not following_of(torn).is_found
        await second.kill()
        await serves(torn, first)

    play(tmp_path, scene)


def test_whoever_was_followed_is_followed_after_a_restart_whoever_else_came(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        trainer, generator = Trainer(world), Generator(world, 1, makes_groups=False)
        await trainer.start()
        await trainer.publish()
        await generator.start()
        await serves(generator, trainer)
        await generator.kill()
        hostile = Trainer(world, 5)
        await hostile.start()
        await hostile.publish()
        await trainer.learn(1, from_groups=False)
        await asyncio.sleep(1.0)
        again = Generator(world, 1, makes_groups=False)
        await again.start()
        await serves(again, trainer)
        assert following_of(again).policy_id == trainer.node_id and not following_of(again).status()["rivals"]

    play(tmp_path, scene)


def test_look_ups_that_miss_the_trainer_or_a_follower_end_neither_watch_nor_leave(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
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
        assert ended == [] and following_of(generator).leave.num_left > 0

    play(tmp_path, scene)


def watch_ends(node: Node, ended: list[str]) -> None:
    """Notes it when a node loses its trainer, or ceases to follow a neighbour."""
    set_connected = node.agent.set_connected

    async def noted(peer: NodeId, is_connected: bool) -> None:
        ended.extend([] if is_connected else ["neighbour"])
        await set_connected(peer, is_connected)

    node.agent.set_connected = noted  # type: ignore[method-assign]
    if node.agent.following is not None:
        disconnected = node.agent.following.disconnected

        def noted_end(peer: NodeId) -> None:
            ended.extend(["watch"] if peer == TRAINER.node_id else [])
            disconnected(peer)

        node.agent.following.disconnected = noted_end  # type: ignore[method-assign]


def test_in_pull_mode_no_batch_begins_while_a_newer_version_is_on_its_way(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
        trainer = Trainer(world)
        generator = Generator(world, 1, makes_groups=False, follow=FollowConfig(mode="pull"))
        await trainer.start()
        await trainer.publish()
        await generator.start()
        await serves(generator, trainer)
        await until(lambda: following_of(generator).capacity() > 0, "it may begin")
        trainer.weights = stepped_far(trainer.weights)
        await trainer.learn(1, from_groups=False)
        await until(lambda: following_of(generator).leave.head_step == 1, "it heard of it")
        assert following_of(generator).capacity() == 0 and following_of(generator).leave.num_left > 0
        await serves(generator, trainer)
        assert following_of(generator).capacity() > 0

    play(tmp_path, scene, FaultPlan(bytes_per_s=1e6))


def test_with_a_barrier_everybody_makes_an_equal_share_of_each_round_with_its_version(tmp_path: Path) -> None:
    async def scene(world: World) -> None:
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
        await until(lambda: len(trainer.agent.leaves.followers) == 2, "both are there")
        await trainer.learn(1)
        before = [generator.num_made for generator in generators]
        await trainer.learn(5)
        made = [generator.num_made - count for generator, count in zip(generators, before, strict=True)]
        assert abs(made[0] - made[1]) <= 2, made
        assert {group["age"] for draw in trainer.told("draw")[1:] for group in draw["groups"]} == {0}

    play(tmp_path, scene)


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
            elif isinstance(victim, Generator):
                victim.engine = Engine()
                await victim.start()
        await trainer.learn(2)
        for generator in generators:
            await serves(generator, trainer, 120.0)
        assert not any(node.agent.num_failures for node in (trainer, *generators)), seed

    faults = FaultPlan(latency_s=0.02, jitter_s=0.02, drop_rate=0.01, bytes_per_s=5e6)
    play(tmp_path, scene, faults)
