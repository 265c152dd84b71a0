"""A whole swarm in one process on virtual time: the nodes' own code, a faulty network, scripted learners.

Invariant: everything is a function of the seed: the same seed gives the same event log bit for bit.
Only model, network, directory and disk are replaced; agent, door, replay, loops and ledger are the real ones.
"""

import asyncio
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from coordinator.core import CoordinatorCore
from coordinator.store import MemoryCoordinatorStore
from swarm.clock import Clock
from swarm.config import (
    CoordinatorLink,
    EnvironmentConfig,
    EvaluationConfig,
    ExchangeConfig,
    GeneratorConfig,
    LearnerConfig,
    NodeConfig,
    ReplayConfig,
)
from swarm.errors import Unavailable
from swarm.exchange.admit import Door
from swarm.exchange.agent import MAX_EDGES, MAX_PENDING_VERSIONS, Agent
from swarm.exchange.checks import DoorLimits
from swarm.exchange.directory import MemoryDirectory
from swarm.exchange.faults import Crash, FaultPlan
from swarm.exchange.memory import MemoryNetwork, MemoryTransport
from swarm.exchange.memory_store import MemoryGroupStore
from swarm.exchange.peers import MAX_PEERS
from swarm.exchange.replay import ReplayBuffer
from swarm.exchange.standing import Standing
from swarm.identity import Identity
from swarm.interfaces import CoordinatorClient, Environment, Result
from swarm.loops import Worker, run_agent, run_worker
from swarm.simulate.invariants import Invariants
from swarm.simulate.virtual_hostile import HostileNode
from swarm.tasks.build import build_environments
from swarm.tasks.inline import InlineVerifier
from swarm.tasks.mixture import TaskMixture
from swarm.testing import ToyCodec
from swarm.types import (
    Advice,
    Draw,
    FinishReason,
    JsonDict,
    NodeReport,
    PolicyVersion,
    Rollout,
    RolloutGroup,
    Sampling,
    StepReport,
    Task,
    TokenTrace,
    VersionSpan,
)

GENERATE_S = 2.0  # virtual seconds of one generation call of a node of speed 1
STEP_S = 2.0  # virtual seconds of one optimizer step
LONGEST_STEP_S = 16.0  # of the slowest node: generation and step at half speed, twice
CHECKPOINT_EVERY = 5
STORE_BYTES = 64 * 2**20


class ScriptedLearner:
    """A learner whose weights are the hash of everything it learned from; its disk survives a crash."""

    def __init__(self, policy_id: str, disk: dict[str, tuple[PolicyVersion, int]]) -> None:
        self._disk = disk
        self.version, self.next_draw = disk.get(
            "checkpoint", (PolicyVersion(policy_id=policy_id, step=0, digest=hashlib.sha256(b"initial").digest()), 1)
        )

    def step(self, draw: Draw) -> StepReport:
        """Mixes the drawn digests into the version's digest."""
        digests = b"".join(drawn.scored.digest for drawn in draw.groups)
        self.version = PolicyVersion(
            policy_id=self.version.policy_id,
            step=self.version.step + 1,
            digest=hashlib.sha256(self.version.digest + digests).digest(),
        )
        self.next_draw = draw.step + 1
        local = sum(drawn.scored.is_local for drawn in draw.groups)
        return StepReport(
            version=self.version,
            loss=0.0,
            grad_norm=0.0,
            num_tokens=len(digests),
            was_skipped=False,
            diagnostics={},
            seconds={},
            ages_steps=tuple(drawn.age_steps for drawn in draw.groups),
            num_local=local,
            num_external=len(draw.groups) - local,
        )

    def snapshot(self) -> tuple[PolicyVersion, object]:
        """The version is all there is."""
        return self.version, None

    def save(self) -> None:
        """Writes the in-memory disk."""
        self._disk["checkpoint"] = (self.version, self.next_draw)


class ScriptedGenerator:
    """Answers rightly with a probability that grows with the version's step."""

    def __init__(
        self, version: PolicyVersion, codec: ToyCodec, environments: Mapping[str, Environment], seed: str
    ) -> None:
        self.version = version
        self._codec = codec
        self._environments = environments
        self._rng = random.Random(seed)

    def load(self, version: PolicyVersion, weights: object) -> None:
        """Takes the version."""
        self.version = version

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        sampling: Sampling,
        numbers: Sequence[int] | None = None,
    ) -> list[list[Rollout]]:
        """Never called: `group` knows the task, a prompt alone does not tell the right answer."""
        raise AssertionError("the scripted generator answers tasks, not prompts")

    def greedy(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[str]:
        """Never called: the virtual swarm does not evaluate."""
        raise AssertionError("the virtual swarm does not evaluate")

    def rollouts(self, task: Task, count: int, sampling: Sampling) -> tuple[Rollout, ...]:
        """`count` answers, some right."""
        skill = min(0.9, 0.3 + 0.01 * self.version.step)
        right = self._environments[task.env].reference(task.task_id)
        made: list[Rollout] = []
        for _ in range(count):
            text = right if self._rng.random() < skill else right[::-1] + "#"
            ids = np.asarray(self._codec.encode_response(text), dtype=np.int32)
            made.append(
                Rollout(
                    text=text,
                    trace=TokenTrace(
                        token_ids=ids,
                        action_mask=np.ones(len(ids), dtype=np.bool_),
                        logprobs=np.full(len(ids), -0.5, dtype=np.float32),
                        turn_ids=np.zeros(len(ids), dtype=np.int16),
                        spans=(VersionSpan(start=0, version=self.version),),
                    ),
                    sampling=sampling,
                    finish=FinishReason.STOP,
                    claimed_reward=float("nan"),
                )
            )
        return tuple(made)


class VirtualCoordinator:
    """The coordinator's pure core; what its store holds survives a crash, the rest does not."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._store = MemoryCoordinatorStore()
        self.core: CoordinatorCore | None = CoordinatorCore(clock, self._store)

    def crash(self) -> None:
        """It answers nobody until `restart`."""
        self.core = None

    async def restart(self) -> None:
        """A new core over the same store."""
        core = CoordinatorCore(self._clock, self._store)
        await core.restore()
        self.core = core


class CoreClient:
    """The coordinator as a node calls it, without a network; unavailable while it is down."""

    def __init__(self, coordinator: VirtualCoordinator, node_id: str) -> None:
        self._coordinator = coordinator
        self._node_id = node_id

    @property
    def _core(self) -> CoordinatorCore:
        if self._coordinator.core is None:
            raise Unavailable("the coordinator is down")
        return self._coordinator.core

    async def heartbeat(self, report: NodeReport) -> Advice:
        """Renews the lease."""
        return await self._core.heartbeat(self._node_id, report)

    async def record_version(self, version: PolicyVersion) -> None:
        """Adds to the ledger."""
        await self._core.record_version(self._node_id, version)

    async def leave(self) -> None:
        """Ends the lease."""
        await self._core.leave(self._node_id)

    async def close(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the nodes are built of; a test puts a broken one here to see that an invariant turns red."""

    replay: Callable[[ReplayConfig, str, int, Clock], ReplayBuffer] = ReplayBuffer
    door: type[Door] = Door
    store: type[MemoryGroupStore] = MemoryGroupStore


@dataclass
class Disk:
    """What survives a crash of one node."""

    store: MemoryGroupStore
    learner: dict[str, tuple[PolicyVersion, int]] = field(default_factory=dict[str, tuple[PolicyVersion, int]])


class VirtualSwarm:
    """N nodes, their network, their disks, and the log of everything that happened."""

    def __init__(self, num_nodes: int, seed: int, plan: FaultPlan, clock: Clock, parts: Parts | None = None) -> None:
        self.clock = clock
        self.plan = plan
        self.seed = seed
        self.parts = parts or Parts()
        self.coordinator = VirtualCoordinator(clock)
        self.log: list[tuple[float, str, str, JsonDict]] = []  # virtual seconds, node, event, fields
        self.network = MemoryNetwork(seed, plan)
        self.identities = [
            Identity.from_seed(hashlib.sha256(f"virtual {seed} {index}".encode()).digest())
            for index in range(num_nodes)
        ]
        self.directory = MemoryDirectory(can_see=lambda a, b: a == b or not self.network.is_cut(a, b))
        self.environments = build_environments(VIRTUAL_ENVIRONMENTS)
        self.codec = ToyCodec()
        self.invariants = Invariants(repeats_exactly=True)
        self.agents: dict[int, Agent] = {}
        self._transports: dict[int, MemoryTransport] = {}
        self._disks = {
            index: Disk(store=self.parts.store(clock, max_bytes=STORE_BYTES, epoch=f"disk {index}"))
            for index in range(num_nodes)
        }
        self._tasks: dict[int, asyncio.Task[None]] = {}
        for identity in self.identities:
            self.network.add(identity.node_id)

    async def run(self, duration_s: float) -> None:
        """Runs every node, carries out the plan's crashes, stops all after `duration_s` virtual seconds.

        The last quarter is free of faults; where it is long enough, every node has to make a step in it.
        """
        for index in range(len(self.identities)):
            self._start(index)
        others = [asyncio.create_task(self._crash(crash)) for crash in self.plan.crashes]
        if self.plan.coordinator_crash is not None:
            others.append(asyncio.create_task(self._crash_coordinator(self.plan.coordinator_crash)))
        others += [asyncio.create_task(self._hostile(number)) for number in range(self.plan.num_hostile)]
        try:
            await asyncio.sleep(0.75 * duration_s)
            if 0.25 * duration_s >= LONGEST_STEP_S:
                self.invariants.healed()
            await asyncio.sleep(0.25 * duration_s)
        finally:
            for task in (*others, *self._tasks.values()):
                task.cancel()
            results = await asyncio.gather(*others, *self._tasks.values(), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result
        self.invariants.finish({i.node_id: self.agents[n].head.step for n, i in enumerate(self.identities)})

    def _start(self, index: int) -> None:
        self._tasks[index] = asyncio.create_task(self._node(index))

    async def _crash(self, crash: Crash) -> None:
        index = crash.node
        await asyncio.sleep(crash.at_s)
        self._note(index, "crash", {})
        self.network.crash(self.identities[index].node_id)
        self._tasks[index].cancel()
        await asyncio.gather(self._tasks[index], return_exceptions=True)
        await asyncio.sleep(crash.down_s)
        self._note(index, "restart", {})
        self._start(index)

    async def _crash_coordinator(self, crash: Crash) -> None:
        await asyncio.sleep(crash.at_s)
        self.log.append((self.clock.monotonic_s(), "coordinator", "crash", {}))
        self.coordinator.crash()
        await asyncio.sleep(crash.down_s)
        self.log.append((self.clock.monotonic_s(), "coordinator", "restart", {}))
        await self.coordinator.restart()

    async def _hostile(self, number: int) -> None:
        identity = Identity.from_seed(hashlib.sha256(f"hostile {self.seed} {number}".encode()).digest())
        config = virtual_config(number, self.seed)
        node = HostileNode(
            identity, config, self.codec, self.environments, self.clock, lambda: [d.store for d in self._disks.values()]
        )
        transport = MemoryTransport(self.network, identity.node_id)
        directory = self.directory.view(identity, config.run_id, self.clock)
        await node.run(transport, directory)

    def _note(self, index: int, kind: str, fields: JsonDict) -> None:
        self.log.append((self.clock.monotonic_s(), f"n{index}", kind, fields))
        self.invariants.check(self.identities[index].node_id, kind, fields)
        if kind == "draw":
            self._check_bounds(self.agents[index])

    def _check_bounds(self, agent: Agent) -> None:
        bounds = {
            "replay fill": (agent.replay.statistics().fill, 1.0),
            "known heads": (len(agent.peers.heads), MAX_PEERS),
            "delivered steps": (len(agent.peers.delivered_steps), MAX_PEERS),
            "edges": (len(agent.edges), MAX_EDGES),
            "connections": (len(agent.peers.connected), agent.config.exchange.max_neighbours),
            "fetches": (len(agent.fetching), agent.config.exchange.max_neighbours),
            "versions kept": (len(agent.pending_versions), MAX_PENDING_VERSIONS),
        }
        for what, (value, limit) in bounds.items():
            self.invariants.bound(agent.node_id, what, value, limit)

    async def _node(self, index: int) -> None:
        identity, disk = self.identities[index], self._disks[index]
        config = virtual_config(index, self.seed)
        agent = self._agent(index, identity, disk, config)
        await agent.restore()
        transport = MemoryTransport(self.network, identity.node_id)
        agent.endpoints = await transport.serve(agent.serving)
        directory = self.directory.view(identity, config.run_id, self.clock)
        client: CoordinatorClient = CoreClient(self.coordinator, identity.node_id)
        rng = random.Random(f"{self.seed} {index} {len(self.log)}")
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(run_agent(agent, transport, directory, client, rng))
                await run_worker(self._worker(index, agent, config, disk))
                self._note(index, "finished", {"step": agent.head.step})
        finally:
            await transport.stop()

    def _agent(self, index: int, identity: Identity, disk: Disk, config: NodeConfig) -> Agent:
        async def inline(function: Callable[..., Result], /, *arguments: object) -> Result:
            return function(*arguments)

        verifier = InlineVerifier(self.environments)
        door = self.parts.door(
            run_id=config.run_id,
            node_id=identity.node_id,
            codec=self.codec,
            verifier=verifier,
            store=disk.store,
            clock=self.clock,
            limits=DoorLimits.from_config(config),
            head_of=lambda node_id: self.agents[index].peers.heads.get(node_id),
            environments=frozenset(self.environments),
            standing=Standing(self.clock, groups_per_minute=config.exchange.groups_per_minute),
            offload=inline,
        )
        agent = Agent(
            config=config,
            identity=identity,
            store=disk.store,
            replay=self.parts.replay(config.replay, identity.node_id, config.seed, self.clock),
            door=door,
            verifier=verifier,
            tokenizer_digest=self.codec.digest,
            clock=self.clock,
            emit=lambda kind, fields: self._note(index, kind, fields),
        )
        self.agents[index] = agent
        return agent

    def _worker(self, index: int, agent: Agent, config: NodeConfig, disk: Disk) -> Worker:
        learner = ScriptedLearner(agent.node_id, disk.learner)
        incarnation = len(self.log)
        generator = ScriptedGenerator(
            learner.version, self.codec, self.environments, f"{self.seed} {index} {incarnation}"
        )
        mixture = TaskMixture(self.environments, dict.fromkeys(self.environments, 1.0), seed=self.seed * 1000 + index)
        sampling = Sampling(temperature=1.0, max_new_tokens=config.generator.max_new_tokens)
        pace = random.Random(f"pace {self.seed} {index}").choice([0.5, 1.0, 1.0, 2.0])

        def produce(first_number: int, count: int) -> list[RolloutGroup]:
            return [
                RolloutGroup(
                    run_id=config.run_id,
                    producer=agent.node_id,
                    policy_id=agent.node_id,
                    env=task.env,
                    task_id=task.task_id,
                    tokenizer_digest=self.codec.digest,
                    prompt_ids=np.asarray(self.codec.encode_prompt(task), dtype=np.int32),
                    rollouts=generator.rollouts(task, config.generator.group_size, sampling),
                    verifier="unscored",
                    created_at_s=self.clock.now_s(),
                )
                for task in mixture.tasks(first_number, count)
            ]

        async def take_time(function: Callable[..., Result], /, *arguments: object) -> Result:
            seconds = {"produce": GENERATE_S, "step": STEP_S}.get(getattr(function, "__name__", ""), 0.0)
            await asyncio.sleep(seconds * pace)
            return function(*arguments)

        return Worker(
            config=config,
            exchange=agent,
            generator=generator,
            produce=produce,
            evaluate=lambda tasks: [],
            learner=learner,
            codec=self.codec,
            evaluation_tasks={},
            clock=self.clock,
            offload=take_time,
        )


VIRTUAL_ENVIRONMENTS = tuple(
    EnvironmentConfig(name=task, kind="char", dataset=task, seed=1) for task in ("reverse", "sort")
)


def virtual_config(index: int, seed: int) -> NodeConfig:
    """An ordinary node configuration with intervals that fit a short virtual run."""
    return NodeConfig(
        name=f"n{index}",
        run_id="virtual",
        seed=seed * 1000 + index,
        environments=VIRTUAL_ENVIRONMENTS,
        generator=GeneratorConfig(group_size=2, groups_per_batch=2, max_new_tokens=16),
        replay=ReplayConfig(local_groups=2, external_groups=2, max_groups=256),
        learner=LearnerConfig(checkpoint_every=CHECKPOINT_EVERY),
        exchange=ExchangeConfig(lookup_every_s=2.0, advert_every_s=10.0, max_neighbours=4),
        coordinator=CoordinatorLink(heartbeat_s=5.0),
        evaluation=EvaluationConfig(every_steps=0),
    )
