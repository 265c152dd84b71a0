"""A swarm of real agents, tiny models and attackers on virtual time, for the benchmark of hostile keys.

Invariant: agents, admission, loops, learners, engines, weights and the coordinator's core are the product's own;
network, directory and clocks are those of the virtual swarm. A run is a function of its job on one machine.
"""

import asyncio
import hashlib
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from benchmarks._hostile_workers import LyingClient, hostile_worker, in_place, undefended
from coordinator.core import CoordinatorCore
from node.build import build_worker, open_weight_store
from swarm.config import EntryConfig, NodeConfig
from swarm.environments.curriculum import evaluation_tasks
from swarm.environments.environment import AnswerEnvironment
from swarm.environments.load import build_environments
from swarm.environments.replay import replay
from swarm.events import Event, GroupRefused, GroupsDrawn, OthersSetAside
from swarm.exchange.agent import Agent
from swarm.identity import Identity
from swarm.interfaces import CoordinatorClient, Result
from swarm.loops import Worker, run_agent, run_worker
from swarm.loops.own_advert import own_advert, own_report
from swarm.model.network import load_model
from swarm.node_context import NodeContext
from swarm.peers.entry import EntryRule
from swarm.peers.parties import Parties
from swarm.simulate.presets import SimulationOptions, node_configs
from swarm.simulate.virtual.adversaries import ADMISSIBLE, ATTACKS
from swarm.simulate.virtual.coordinator import CoreClient, VirtualCoordinator
from swarm.simulate.virtual.directory import MemoryDirectory
from swarm.simulate.virtual.faults import FaultPlan
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.simulate.virtual.loop import LoopClock, run_virtual
from swarm.simulate.virtual.network import MemoryNetwork
from swarm.simulate.virtual.node import FLOOD_PACE, GENERATE_S, STEP_S
from swarm.simulate.virtual.transport import MemoryTransport
from swarm.testing.builders import InlineVerifier
from swarm.types import (
    Advert,
    Cursor,
    NodeId,
    Role,
)

PRESETS: Final = ("tiny", "echo-tiny")
PRIVATE: Final = "private"  # everybody is established
ENTRIES: Final = ("newcomers", "members", PRIVATE)
SIDE_ATTACKS: Final = ("dead_adverts", "lies")  # 15 and 17 of the list of attacks: not by groups
HONEST: Final = "honest"
ALL: Final = "all"
CASES: Final = (HONEST, *ATTACKS, *SIDE_ATTACKS, ALL)

NUM_ADVERTS: Final = 341  # of dead addresses, all hostile keys together
NUM_SYBILS: Final = 231  # keys that only report to the coordinator
ADVERT_EVERY_S: Final = 60.0
LIE_EVERY_S: Final = 5.0
PROBLEMS_AT_END: Final = 100  # held out, of each task
LONGEST_STEP_S: Final = 60.0  # virtual; a swarm that is slower by far has been stopped


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The parameters that all runs of a table share."""

    num_nodes: int = 10
    num_hostile: int = 3
    num_steps: int = 50  # of every honest trainer
    latency_s: float = 0.02
    is_defended: bool = True  # else every key counts in full, and nothing is checked of tokens, clipped, or guarded


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The attack, preset and seed of one run."""

    setting: Setting
    preset: str
    attack: str
    # of the hostile keys: newcomers from the start, members who turn after a third of the steps, or strangers who come
    # to a private run after a fifth of them, and make groups as fast as they can
    entry: str
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The figures of one run."""

    job: Job
    accuracy: float  # held-out greedy at the end, mean over tasks and honest trainers
    start: float  # the same of the warm start
    least_step: int  # of the honest trainers: all `num_steps` unless the attack stopped one
    hostile_share: float  # of the groups of others that honest trainers drew after the turn
    num_honest_drawn: int  # groups of honest others that honest trainers drew, from the start
    virtual_s: float
    refusals: dict[str, int]  # of groups that hostile keys made, by reason, at honest nodes
    num_held: int  # times that a learner's guard set the others aside
    seconds: float


@dataclass(kw_only=True)
class _Node:
    number: int
    config: NodeConfig
    identity: Identity
    is_hostile: bool
    agent: Agent
    worker: Worker
    store: MemoryGroupStore

    @property
    def trains(self) -> bool:
        """True for the nodes whose accuracy counts."""
        return not self.is_hostile and Role.TRAINER in self.config.roles


def run(job: Job) -> Outcome:
    """One run (blocking; sets torch to one thread)."""
    torch.set_num_threads(1)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:

        async def main() -> Outcome:
            return await HostileWorld(job, Path(folder), LoopClock(asyncio.get_running_loop())).play()

        with nullcontext() if job.setting.is_defended else undefended():
            return replace(run_virtual(main()), seconds=time.monotonic() - start_s)


class HostileWorld:
    """Honest and hostile nodes of one run. The last `num_hostile` nodes are the hostile ones."""

    def __init__(self, job: Job, folder: Path, clock: LoopClock) -> None:
        self.job, self.clock, self.folder = job, clock, folder
        setting = job.setting
        if job.entry == PRIVATE and job.attack == HONEST:  # beside the same honest nodes, without the others
            setting = replace(setting, num_nodes=setting.num_nodes - setting.num_hostile, num_hostile=0)
        self.setting = setting
        self.network = MemoryNetwork(job.seed, FaultPlan(latency_s=setting.latency_s))
        self.directory = MemoryDirectory(clock)
        self.identities = [_identity(f"{job.seed} node {number}") for number in range(setting.num_nodes)]
        self.num_honest = setting.num_nodes - setting.num_hostile
        honest = self.identities if job.attack == HONEST else self.identities[: self.num_honest]
        members = self.identities if job.entry == "members" else honest
        self.honest = frozenset(identity.node_id for identity in honest)
        self.entry = EntryConfig(members=tuple(identity.node_id for identity in members))
        if not setting.is_defended or job.entry == PRIVATE:
            self.entry = EntryConfig(established="everybody")
        self.configs = [self._config(config) for config in self._preset_configs()]
        rule = EntryRule(self.entry, self.configs[0].run_id, clock)
        self.coordinator = VirtualCoordinator(clock)
        self.coordinator.core = CoordinatorCore(clock, parties=Parties(rule))
        self.environments = {
            name: environment
            for name, environment in build_environments(self.configs[0].environments).items()
            if isinstance(environment, AnswerEnvironment)
        }
        self.problems = [
            (environment, task)
            for environment in self.environments.values()
            for task in evaluation_tasks(environment, "held_out", PROBLEMS_AT_END, seed=7)
        ]
        self.nodes: list[_Node] = []
        self.refusals = Counter[str]()
        self.drawn = Counter[bool]()  # of others' groups after the turn: whether a hostile key made it
        self.num_held = self.num_honest_drawn = 0
        self.turned = asyncio.Event()

    def _preset_configs(self) -> list[NodeConfig]:
        setting = self.setting
        options = SimulationOptions(
            preset=self.job.preset, nodes=setting.num_nodes, rounds=setting.num_steps, seed=self.job.seed
        )
        return node_configs(options, self.folder)

    def _config(self, config: NodeConfig) -> NodeConfig:
        """Everybody has the same curriculum: what attackers know is no loss to the others."""
        every_steps, num_problems = (10, 40) if self.job.entry == PRIVATE else (20, 20)
        changes: dict[str, Any] = {
            "entry": self.entry,
            "generator": config.generator.model_copy(update={"env_weights": {}}),
            "evaluation": config.evaluation.model_copy(
                update={"every_steps": every_steps * self.setting.is_defended, "num_problems": num_problems}
            ),
            "learner": config.learner.model_copy(update={"checkpoint_every": 0}),
        }
        if not self.setting.is_defended:
            changes["guard"] = config.guard.model_copy(update={"enabled": False})
        return config.model_copy(update=changes)

    @property
    def has_turned(self) -> bool:
        """True once the hostile nodes attack."""
        if self.job.attack == HONEST:
            return False
        steps = [node.agent.head.step for node in self.nodes if node.trains]
        before = self.setting.num_steps // (5 if self.job.entry == PRIVATE else 3)
        return self.job.entry == "newcomers" or min(steps, default=0) >= before

    def _does(self, attack: str) -> bool:
        return self.has_turned and self.job.attack in (attack, ALL)

    def _attacks_by_groups(self) -> list[str]:
        attacks = [*ADMISSIBLE] if self.job.attack == ALL else [self.job.attack]
        return ["invented" if attack in SIDE_ATTACKS else attack for attack in attacks]

    # --- nodes ---------------------------------------------------------------------------------------

    def _make_node(self, number: int) -> _Node:
        config, identity = self.configs[number], self.identities[number]
        is_hostile = identity.node_id not in self.honest
        if is_hostile and self.job.attack in ("flood", ALL) and Role.TRAINER in config.roles:
            replay = config.replay.model_copy(update={"local_groups": 8})
            config = config.model_copy(update={"replay": replay})
        config.dir.mkdir(parents=True, exist_ok=True)  # its worker keeps some steps and episodes there
        store = MemoryGroupStore(self.clock, 2**28, epoch=f"disk {number}")
        context = NodeContext(
            config=config,
            identity=identity,
            clock=self.clock,
            emit=lambda event: self._note(identity.node_id, event),
            offload=in_place,
        )
        follows = Role.TRAINER not in config.roles
        agent = Agent(
            context,
            store=store,
            tokenizer=load_model(config.model).tokenizer,
            verifier=InlineVerifier(self.environments),
            weights=open_weight_store(config) if follows or config.weights.publish else None,
        )
        if is_hostile:
            worker = hostile_worker(
                config,
                agent,
                store,
                attacks=self._attacks_by_groups(),
                environments=self.environments,
                clock=self.clock,
                has_turned=lambda: self.has_turned,
            )
        else:
            worker = build_worker(config, identity.node_id, agent.local, self.clock)
        worker = replace(worker, offload=self._offload(number, is_hostile))
        return _Node(
            number=number,
            config=config,
            identity=identity,
            is_hostile=is_hostile,
            agent=agent,
            worker=worker,
            store=store,
        )

    def _offload(self, number: int, is_hostile: bool) -> Callable[..., object]:
        pace = random.Random(f"pace {self.job.seed} {number}").choice([0.5, 1.0, 1.0, 2.0])

        async def take_time(function: Callable[..., Result], /, *arguments: object) -> Result:
            seconds = {"produce": GENERATE_S, "step": STEP_S}.get(getattr(function, "__name__", ""), 0.0)
            if seconds:
                is_fast = self.job.entry == PRIVATE or not self.setting.is_defended
                floods = is_hostile and (self._does("flood") or (self.has_turned and is_fast))
                await asyncio.sleep(seconds * (FLOOD_PACE if floods else pace))
            return function(*arguments)

        return take_time

    # --- the run -------------------------------------------------------------------------------------

    async def play(self) -> Outcome:
        """Until every honest trainer has made its steps, or had far more time than it needs."""
        self.nodes = [self._make_node(number) for number in range(len(self.identities))]
        start_s, first = self.clock.monotonic_s(), next(node for node in self.nodes if node.trains)
        start = self._accuracy(first.worker)
        finished = {node.number: asyncio.Event() for node in self.nodes if node.trains}
        tasks = [asyncio.create_task(self._live(node, finished.get(node.number))) for node in self.nodes]
        tasks += [asyncio.create_task(self._advertise()), asyncio.create_task(self._lie())]
        over = asyncio.gather(*(event.wait() for event in finished.values()))
        try:
            async with asyncio.timeout(self.setting.num_steps * LONGEST_STEP_S):
                await asyncio.wait([over, *tasks], return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()  # a node ended: the run is void
        except TimeoutError:
            pass
        finally:
            for task in (over, *tasks):
                task.cancel()
            await asyncio.gather(over, *tasks, return_exceptions=True)
        trainers = [node for node in self.nodes if node.trains]
        total = self.drawn.total()
        outcome = Outcome(
            job=self.job,
            accuracy=float(np.mean([self._accuracy(node.worker) for node in trainers])),
            start=start,
            least_step=min(node.agent.head.step for node in trainers),
            hostile_share=self.drawn[True] / total if total else 0.0,
            num_honest_drawn=self.num_honest_drawn,
            virtual_s=self.clock.monotonic_s() - start_s,
            refusals=dict(self.refusals),
            num_held=self.num_held,
            seconds=0.0,
        )
        for node in self.nodes:
            node.worker.close()
        return outcome

    async def _live(self, node: _Node, finished: asyncio.Event | None) -> None:
        if node.is_hostile and self.job.entry == PRIVATE:
            await self.turned.wait()
        await node.agent.restore()
        transport = MemoryTransport(self.network, node.identity.node_id)
        node.agent.endpoints = await transport.serve(node.agent.streams)
        directory = self.directory.view(node.identity, node.config.run_id, self.clock)
        client: CoordinatorClient = CoreClient(self.coordinator, node.identity.node_id)
        if node.is_hostile and self.job.attack in ("lies", ALL):
            client = LyingClient(self.coordinator, node.identity.node_id, sorted(self.honest))
        async with asyncio.TaskGroup() as tasks:
            rng = random.Random(f"{self.job.seed} {node.number}")
            tasks.create_task(run_agent(node.agent, transport, directory, client, rng))
            await run_worker(node.worker)
            if finished is not None:
                finished.set()

    async def _advertise(self) -> None:
        """Fresh keys at addresses where nobody answers, again before they expire."""
        number = 0
        while True:
            if self._does("dead_adverts"):
                advert = own_advert(self.nodes[-1].agent)
                for _ in range(NUM_ADVERTS):
                    number += 1
                    identity = _identity(f"{self.job.seed} dead {number}")
                    view = self.directory.view(identity, self.configs[0].run_id, self.clock)
                    await view.announce(self._dead(advert, identity.node_id, number))
            await asyncio.sleep(ADVERT_EVERY_S)

    def _dead(self, advert: Advert, node_id: NodeId, number: int) -> Advert:
        head = replace(advert.head, policy_id=node_id)
        endpoint = f"198.51.{number // 250 % 250}.{number % 250}:4100"
        return replace(advert, node_id=node_id, endpoints=(endpoint,), head=head, cursor=Cursor(), num_groups=10**6)

    async def _lie(self) -> None:
        """Keys that do nothing but report to the coordinator."""
        sybils = [_identity(f"{self.job.seed} sybil {number}").node_id for number in range(NUM_SYBILS)]
        while True:
            await asyncio.sleep(LIE_EVERY_S)
            if self._does("lies"):
                report = own_report(self.nodes[-1].agent, 1.0)
                for sybil in sybils:
                    client = LyingClient(self.coordinator, sybil, sorted(self.honest))
                    await client.heartbeat(replace(report, node_id=sybil))

    # --- what it gave --------------------------------------------------------------------------------

    def _note(self, node_id: NodeId, event: Event) -> None:
        if node_id not in self.honest:
            return
        if isinstance(event, GroupRefused) and event.producer not in self.honest:
            self.refusals[event.reason] += 1
        elif isinstance(event, GroupsDrawn):
            are_hostile = [group.producer not in self.honest for group in event.groups if group.producer != node_id]
            self.num_honest_drawn += are_hostile.count(False)
            if self.has_turned:
                self.turned.set()
                self.drawn.update(are_hostile)
        elif isinstance(event, OthersSetAside) and not event.is_over:
            self.num_held += 1

    def _accuracy(self, worker: Worker) -> float:
        """Held-out greedy accuracy of a trainer's newest weights, mean over tasks."""
        tries = worker.evaluate([task for _, task in self.problems])
        rewards = [
            replay(environment, task.task_id, actions).reward
            for (environment, task), (actions,) in zip(self.problems, tries, strict=True)
        ]
        return float(np.mean(rewards))


def _identity(name: str) -> Identity:
    return Identity.from_seed(hashlib.sha256(name.encode()).digest())
