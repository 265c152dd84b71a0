"""Virtual swarm: all nodes in one process on virtual time, with a faulty network and scripted learners.

Invariant: the same arguments and seed give the same event log, bit for bit. Only model, network, directory and disk are
replaced (in a large swarm also signatures); agent, admission, replay, loops and coordinator core are the real ones.
"""

import asyncio
import hashlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from swarm.clock import Clock
from swarm.config import MAX_MEMBERS, EntryConfig, NodeConfig
from swarm.environments.load import build_environments
from swarm.events import (
    Event,
    GroupAdmitted,
    GroupPut,
    GroupRefused,
    GroupsDrawn,
    LoopFailed,
    NodeFinished,
    NodeKilled,
    NodeRestarted,
    StepMade,
    StoreDamaged,
)
from swarm.exchange.admission import MAX_CONCURRENT
from swarm.exchange.agent import Agent
from swarm.identity import Identity, Verify, verify
from swarm.interfaces import CoordinatorClient
from swarm.loops import KEPT_SHARE, run_agent, run_worker
from swarm.loops.notices import MAX_AT_ONCE
from swarm.loops.reach import Reach, ReachKind
from swarm.loops.supervise import supervise
from swarm.node_context import NodeContext
from swarm.peers.coordinator_client import MAX_PENDING_VERSIONS
from swarm.peers.peer_table import MAX_IN_USE, MAX_PEERS
from swarm.relay.reservation_table import RelayLimits
from swarm.report.invariants import LEARNED, TRAINED, TURNS, WHOLE_EPISODES, Invariants
from swarm.simulate.virtual.author import Author
from swarm.simulate.virtual.coordinator import CoreClient, VirtualCoordinator, observe
from swarm.simulate.virtual.directory import MemoryDirectory
from swarm.simulate.virtual.episode_plan import episode_environments
from swarm.simulate.virtual.faults import Crash, DiskDamage, DiskFault, FaultPlan, Turncoat
from swarm.simulate.virtual.first_steps import FirstSteps
from swarm.simulate.virtual.forged_episodes import CLAIMS, LyingVerifier
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.simulate.virtual.hostile_node import HostileNode
from swarm.simulate.virtual.network import MemoryNetwork
from swarm.simulate.virtual.node import STEP_S, Disk, Parts, ScriptedNode
from swarm.simulate.virtual.reach_checks import ReachChecks
from swarm.simulate.virtual.relay import MemoryRelay
from swarm.simulate.virtual.scale import Scale, scale_of, virtual_config
from swarm.simulate.virtual.seam_faults import NodeClock, SeamFaults
from swarm.simulate.virtual.shared_work import (
    HashIdentity,
    KeptVerifier,
    kept_environments,
    offload_in_place,
    verify_hash,
)
from swarm.simulate.virtual.transport import MemoryTransport
from swarm.testing.builders import ToyTokenizer
from swarm.types import Advert, Draw, NodeId, SealedGroup
from swarm.wire.reports import MAX_EDGES

SECONDS_PER_STEP = 4.0  # virtual; a node of middling pace makes one or two steps in it
TIGHT_TIDY_S = 2.0  # virtual seconds between two tidyings of a store that the fault plan made tight
NUM_OBSERVERS = 2  # clients that call the coordinator, in a swarm that is not large
ADDRESS = "10.0.0.1"  # of every machine, in its own network
LONGEST_STEP_S = 16.0  # of the slowest node: generation and step at half speed, twice


class EventDigest:
    """Counts and hashes events: equal runs have equal digests.

    An event is hashed when it happens and then forgotten, so that a run of millions of events needs no memory for them.
    The hash covers the `repr` of each event: fields hold plain values only.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self.num_events = 0
        self.refusals: Counter[str] = Counter()  # by reason, over all nodes

    def add(self, at_s: float, node: str, event: Event) -> None:
        """Counts and hashes an event that happened at a node at a virtual second."""
        self._hash.update(repr((at_s, node, event)).encode())
        self.num_events += 1
        if isinstance(event, GroupRefused):
            self.refusals[event.reason] += 1

    @property
    def digest(self) -> str:
        """SHA-256 of all events so far, hexadecimal."""
        return self._hash.hexdigest()


async def _find_address() -> str:
    return ADDRESS


class VirtualSwarm:
    """Virtual nodes with their network and disks, and the digest of everything that happens."""

    def __init__(
        self,
        num_nodes: int,
        seed: int,
        num_rounds: int,
        plan: FaultPlan,
        clock: Clock,
        parts: Parts | None = None,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        """Builds the swarm; `run` starts it. `on_progress` is called with the finished share of the run, in [0, 1]."""
        self.clock = clock
        self.plan = plan
        self.seed = seed
        scale = scale_of(num_nodes)
        self.scale: Scale = replace(scale, store_bytes=plan.store_bytes) if plan.store_bytes else scale
        self.parts = parts or Parts()
        is_real = self.scale.has_real_signatures
        self._verify: Verify = verify if is_real else verify_hash
        self._identity = (Identity if is_real else HashIdentity).from_seed
        self.coordinator = VirtualCoordinator(clock, plan.coordinator_write_s, f"{seed}", self.parts.coordinator)
        self.log = EventDigest()
        self.network = MemoryNetwork(seed, plan)
        self.num_nodes = num_nodes  # honest ones; turncoats are numbered after them
        self.identities = [
            self._identity(hashlib.sha256(f"virtual {seed} {index}".encode()).digest())
            for index in range(num_nodes + len(plan.turncoats))
        ]
        honest = [identity.node_id for identity in self.identities[:num_nodes]]
        turned = zip(self.identities[num_nodes:], plan.turncoats, strict=True)
        ids = (*honest, *(identity.node_id for identity, turncoat in turned if turncoat.is_member))
        self._entry = EntryConfig(members=ids if len(ids) <= MAX_MEMBERS else ())  # all others are newcomers
        self.directory = MemoryDirectory(
            clock,
            can_see=lambda a, b: not self.network.is_cut(a, b),
            is_parted=self.network.is_parted,
            verify=self._verify,
        )
        episodes = plan.episodes
        self.environments = kept_environments() if episodes is None else episode_environments(episodes)
        self._verifier = KeptVerifier(self.environments)
        self._fresh_environments = {} if episodes is None else build_environments(episodes.configs)  # for judging
        self.tokenizer = ToyTokenizer()
        self.invariants = Invariants(
            repeats_exactly=True, members=frozenset(self._entry.members), honest=frozenset(honest)
        )
        self.longest_step_s = LONGEST_STEP_S if episodes is None else 4 * (episodes.longest_s + STEP_S)
        self._first_steps = FirstSteps(self.longest_step_s)
        self.agents: dict[int, Agent] = {}
        self.reaches: dict[NodeId, Reach] = {}
        self.num_rounds = num_rounds
        self._on_progress = on_progress or (lambda share: None)
        self._num_steps = 0
        self._honest = frozenset(honest)
        self._observers = 0  # of the coordinator
        self._names = [f"n{index}" for index in range(len(self.identities))]
        wrong = {clock.node: clock for clock in plan.wrong_clocks}
        self._clocks = [NodeClock(clock, wrong.get(index)) for index in range(len(self.identities))]
        last_fault_s = 0.75 * num_rounds * SECONDS_PER_STEP
        self._seams = [
            SeamFaults(plan.seams, f"{seed} {index}", clock, last_fault_s) for index in range(len(self.identities))
        ]
        self._disks = {
            index: Disk(open_store=partial(self._open_store, index), checkpoints=self.parts.checkpoints())
            for index in range(len(self.identities))
        }
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._unfinished = set(range(num_nodes))
        self._all_finished = asyncio.Event()
        for identity in self.identities:
            self.network.add(identity.node_id)
        self._reach_checks: ReachChecks | None = None
        self._relay_id = self._identity(hashlib.sha256(f"coordinator {seed}".encode()).digest()).node_id
        self.directory.inspect = self._inspect_advert
        self.directory.note_lookup = partial(self.network.count, "look_up")
        if plan.outward_share is not None:
            self.network.outward = frozenset(
                identity.node_id for index, identity in enumerate(self.identities) if plan.is_outward(index)
            )
            self._reach_checks = ReachChecks(self.network, self.invariants, self._honest)
            self._start_coordinator_relay()
        if not self.scale.ends_by_steps:  # every item and every call is remembered: for short runs
            self.network.inspect = self._inspect
            self._observers = NUM_OBSERVERS

    def _inspect(self, node: NodeId, sealed: SealedGroup) -> None:
        if node in self._honest:
            self.invariants.sent(node, sealed)

    def _inspect_advert(self, advert: Advert, size_bytes: int) -> None:
        self.network.count("advert", size_bytes)
        if self._reach_checks is not None:
            self._reach_checks.check_advert(advert)

    def _start_coordinator_relay(self) -> None:
        """Makes the coordinator a relay, which also dials back, for nodes that have no other one."""
        self.network.add(self._relay_id)
        self.network.name(self._relay_id)
        table = self.parts.reservations(RelayLimits())
        self.network.relays[self._relay_id] = MemoryRelay(
            self.network, self._relay_id, self.clock, table, is_open=lambda: True
        )

    def _make_relay(self, index: int, agent: Agent, is_open: Callable[[], bool]) -> MemoryRelay:
        limits, most = RelayLimits(reservations=agent.config.exchange.relay_reservations), self.plan.relay_reservations
        if most:
            limits = replace(limits, reservations=most, connections=2 * most)
        faults = tuple(fault for fault in self.plan.relay_faults if fault.node == index)
        table = self.parts.reservations(limits, agent.standing)
        return MemoryRelay(self.network, agent.node_id, self.clock, table, is_open, faults)

    async def _measure_reach(self, agent: Agent, transport: MemoryTransport, incarnation: str) -> Reach:
        """Measures and returns the reach of a node, as the daemon does before it announces itself."""
        relay = transport.relay
        assert relay is not None
        agent.relay_reservations = lambda: relay.free_reservations
        reach = self.parts.reach(
            agent,
            transport,
            random.Random(f"reach {incarnation}"),
            is_advertise_set=False,
            find_address=_find_address,
        )
        await reach.measure()
        return reach

    async def _probe(self) -> None:
        """Checks that nodes that nobody can dial are reached through relays, unless deceived or with a wrong clock."""
        assert self._reach_checks is not None
        live = {node_id: self.network.handler(node_id) for node_id in sorted(self._honest & self.network.outward)}
        # a node that a majority of liars called dialable asks again in ten minutes
        deceived = {node_id for node_id in self.network.lied_to if not self._is_outward(node_id)}
        # a node with a wrong clock sees expired adverts, and its own is refused
        aside = {
            identity.node_id for identity, clock in zip(self.identities, self._clocks, strict=True) if clock.is_off
        }
        excused = deceived | aside
        handlers = {node_id: handler for node_id, handler in live.items() if handler and node_id not in excused}
        agents = {agent.node_id: agent for agent in self.agents.values()}
        await self._reach_checks.probe(handlers, lambda node_id: agents[node_id].endpoints)

    def _is_outward(self, node_id: NodeId) -> bool:
        reach = self.reaches.get(node_id)
        return reach is not None and reach.state.kind is ReachKind.OUTWARD

    def _open_store(self, index: int, epoch: str) -> MemoryGroupStore:
        clock, seams = self._clocks[index], self._seams[index]
        store = self.parts.store(clock, self.scale.disk_bytes, seams.before_write, epoch=f"disk {index} {epoch}")
        if DiskDamage(node=index, fault=DiskFault.POWER_CUT) in self.plan.damages:
            store.remember_states()
        return store

    async def run(self) -> None:
        """Runs all nodes under the plan's faults until the rounds are over, then checks the invariants of the end."""
        for index in range(len(self.identities)):
            self._start(index)
        others = [asyncio.create_task(self._crash(crash)) for crash in self.plan.crashes]
        if self.plan.coordinator_crash is not None:
            others.append(asyncio.create_task(self._crash_coordinator(self.plan.coordinator_crash)))
        others += [asyncio.create_task(self._hostile(number)) for number in range(self.plan.num_hostile)]
        others += [asyncio.create_task(self._observe(number)) for number in range(self._observers)]
        try:
            await (self._until_all_finished() if self.scale.ends_by_steps else self._until_time_is_over())
            if self._reach_checks is not None:
                await self._probe()
            history, judge = self.coordinator.history, self.parts.judge_coordinator
            if self._observers and judge is not None:
                self.invariants.coordinator(judge(history), history.num_calls)
        finally:
            for task in (*others, *self._tasks.values()):
                task.cancel()
            results = await asyncio.gather(*others, *self._tasks.values(), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
                raise result
        steps = {self.identities[index].node_id: self.agents[index].head.step for index in range(self.num_nodes)}
        excused = self._first_steps.excused(self.clock.monotonic_s(), list(steps))
        self.invariants.finish(steps, excused=frozenset() if self.scale.ends_by_steps else excused)

    async def _until_time_is_over(self) -> None:
        """Waits for the time of all rounds; if the last quarter is long enough, every node has to make a step in it.

        The last quarter is free of faults: safety is checked all the time, and liveness after all faults have healed.
        """
        duration_s = self.num_rounds * SECONDS_PER_STEP
        for quarter in range(4):
            if quarter == 3 and 0.25 * duration_s >= self.longest_step_s:
                self.invariants.healed()
            await asyncio.sleep(0.25 * duration_s)
            self._on_progress(0.25 * (quarter + 1))

    async def _until_all_finished(self) -> None:
        """Waits until every node has made all its steps; at the time limit, records LoopFailed for each late node."""
        try:
            async with asyncio.timeout((self.num_rounds + 10) * self.longest_step_s):
                await self._all_finished.wait()
        except TimeoutError:
            for index in sorted(self._unfinished):
                made = self.agents[index].head.step
                self._note(index, LoopFailed(loop="run", error=f"{made} of {self.num_rounds} steps made"))

    def _start(self, index: int) -> None:
        self._tasks[index] = asyncio.create_task(self._node(index))

    async def _crash(self, crash: Crash) -> None:
        index = crash.node
        await asyncio.sleep(crash.at_s)
        self._note(index, NodeKilled())
        self.network.crash(self.identities[index].node_id)
        self._tasks[index].cancel()
        await asyncio.gather(self._tasks[index], return_exceptions=True)
        await asyncio.sleep(crash.down_s)
        rng = random.Random(f"disk {self.seed} {index}")
        faults = [damage.fault for damage in self.plan.damages if damage.node == index]
        for fault in faults:
            self._disks[index].damage(fault, rng)
        self._note(index, NodeRestarted())
        if DiskFault.LOST_STORE in faults:
            self._note(index, StoreDamaged(moved_to="memory"))  # as the daemon announces it
        self._start(index)

    async def _crash_coordinator(self, crash: Crash) -> None:
        await asyncio.sleep(crash.at_s)
        self.log.add(self.clock.monotonic_s(), "coordinator", NodeKilled())
        self.coordinator.crash()
        self.network.crash(self._relay_id)
        await asyncio.sleep(crash.down_s)
        self.log.add(self.clock.monotonic_s(), "coordinator", NodeRestarted())
        await self.coordinator.restart()
        if self.plan.outward_share is not None:
            self._start_coordinator_relay()

    async def _observe(self, number: int) -> None:
        rng = random.Random(f"observer {self.seed} {number}")
        await observe(self.coordinator, f"observer {number}", [i.node_id for i in self.identities], rng)

    async def _hostile(self, number: int) -> None:
        identity = self._identity(hashlib.sha256(f"hostile {self.seed} {number}".encode()).digest())
        config = self._config(number)
        author = self._author(identity, config, self.clock)
        node = HostileNode(identity, author, lambda: [disk.store for disk in self._disks.values()])
        transport = MemoryTransport(self.network, identity.node_id)
        directory = self.directory.view(identity, config.run_id, self.clock)
        await node.run(transport, directory)

    def _note(self, index: int, event: Event) -> None:
        self.log.add(self.clock.monotonic_s(), self._names[index], event)
        if index >= self.num_nodes and not isinstance(event, GroupPut):
            return  # an adversary promises nothing, but others may learn from its groups
        self.invariants.check(self.identities[index].node_id, event)
        self._first_steps.note(self.clock.monotonic_s(), self.identities[index].node_id, event)
        if isinstance(event, GroupPut | GroupAdmitted) and self._observers:
            at = self._disks[index].store.position_of(event.digest)
            if at is not None:
                self.invariants.placed(self.identities[index].node_id, at, event.digest)
        elif isinstance(event, GroupsDrawn):
            self._check_bounds(self.agents[index])
        elif isinstance(event, StepMade) and self.scale.ends_by_steps:
            self._num_steps += 1
            total = self.num_nodes * self.num_rounds
            if self._num_steps * 100 // total != (self._num_steps - 1) * 100 // total:
                self._on_progress(min(1.0, self._num_steps / total))

    def _judge(self, index: int, draw: Draw) -> bytes:
        """Checks the groups of others in a draw, which admission let pass; returns bytes for the learner's digest."""
        if index >= self.num_nodes:
            return b""
        if self.plan.episodes is not None:
            return self._judge_episodes(index, draw)
        most, wrong = self.agents[index].config.generator.max_new_tokens, list[str]()
        for drawn in draw.groups:
            for rollout in () if drawn.scored.is_made_here else drawn.scored.group.rollouts:
                ids = [] if rollout.trace is None else rollout.trace.token_ids.tolist()
                if len(ids) > most:
                    wrong.append(f"a row of {len(ids)} tokens, {most} are allowed")
                if rollout.trace is not None and self.tokenizer.encode_response(rollout.text) != ids:
                    wrong.append("tokens that the answer does not show")
        self.invariants.learned(self.identities[index].node_id, draw.step, LEARNED, wrong)
        return b""

    def _judge_episodes(self, index: int, draw: Draw) -> bytes:
        """Checks a draw of episodes, own ones included, and its batch; returns the digest of the coefficients."""
        from swarm.simulate.virtual.episode_step import EpisodeStep  # with torch

        node_id = self.identities[index].node_id
        step = EpisodeStep(
            config=self.agents[index].config, tokenizer=self.tokenizer, environments=self._fresh_environments
        )
        digest, found = step.make(draw, node_id)
        for name in (WHOLE_EPISODES, TRAINED, TURNS):
            self.invariants.learned(node_id, draw.step, name, [what for broken, what in found if broken == name])
        return digest

    def _check_bounds(self, agent: Agent) -> None:
        bounds = {
            "replay fill": (agent.replay.fill, 1.0),
            "known heads": (len(agent.peers.heads), MAX_PEERS),
            "delivered steps": (len(agent.peers.delivered_steps), MAX_PEERS),
            "lineages in use": (len(agent.peers.in_use), MAX_IN_USE),
            "edges": (len(agent.coordinator_view.edges), MAX_EDGES),
            # A stream that has lost its place ends after the admission that it is in.
            "connections": (len(agent.peers.connected), agent.config.exchange.max_neighbours + MAX_CONCURRENT),
            "fetches": (len(agent.ingest.fetching), (1 + MAX_AT_ONCE) * agent.config.exchange.max_neighbours),
            "versions kept": (len(agent.coordinator_view.pending_versions), MAX_PENDING_VERSIONS),
        }
        for what, (value, limit) in bounds.items():
            self.invariants.bound(agent.node_id, what, value, limit)

    async def _node(self, index: int) -> None:
        identity, disk = self.identities[index], self._disks[index]
        config = self._config(index)
        agent = self._agent(index, identity, disk, config)
        await agent.restore()
        make_relay = partial(self._make_relay, index, agent) if self.plan.outward_share is not None else None
        transport = MemoryTransport(self.network, identity.node_id, make_relay)
        agent.endpoints = await transport.serve(agent.streams)
        directory = self.directory.view(identity, config.run_id, self._clocks[index])
        client: CoordinatorClient = CoreClient(self.coordinator, identity.node_id)
        incarnation = f"{self.seed} {index} {self.log.num_events}"
        node = ScriptedNode(
            exchange=agent.local,
            author=self._author(identity, config, self._clocks[index]),
            disk=disk,
            paces=self.scale.paces,
            incarnation=incarnation,
            seams=self._seams[index],
            judge=partial(self._judge, index),
            turncoat=self._turncoat(index),
            episodes=self.plan.episodes,
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                if self.plan.outward_share is not None:
                    reach = self.reaches[identity.node_id] = await self._measure_reach(agent, transport, incarnation)
                    rng = random.Random(f"reach loop {incarnation}")
                    tasks.create_task(supervise("reach", reach.keep, agent, rng), name="reach")
                tasks.create_task(run_agent(agent, transport, directory, client, random.Random(incarnation)))
                if self.plan.store_bytes:
                    tasks.create_task(_tidy_often(agent))
                await run_worker(node.worker())
                self._note(index, NodeFinished(step=agent.head.step))
                self._unfinished.discard(index)
                if not self._unfinished:
                    self._all_finished.set()
        finally:
            await transport.stop()

    def _author(self, identity: Identity, config: NodeConfig, clock: Clock) -> Author:
        return Author(
            node_id=identity.node_id,
            config=config,
            tokenizer=self.tokenizer,
            environments=self.environments,
            clock=clock,
        )

    def _turncoat(self, index: int) -> Turncoat | None:
        number = index - self.num_nodes
        if number < 0:
            return None
        episodes, turncoat = self.plan.episodes, self.plan.turncoats[number]
        attacks = () if episodes is None else episodes.attacks
        attack = attacks[number % len(attacks)] if attacks else ""
        return replace(turncoat, attack=attack or turncoat.attack)

    def _config(self, index: int) -> NodeConfig:
        num_steps = self.num_rounds if self.scale.ends_by_steps else 0
        config = virtual_config(index, self.seed, self.scale, num_steps, self.plan.settings, self.plan.episodes)
        if self.plan.outward_share is not None:  # not loopback: there would be nothing to measure
            exchange = config.exchange.model_copy(update={"listen": f"{ADDRESS}:1"})
            link = config.coordinator.model_copy(
                update={"address": self.network.endpoint_of(self._relay_id), "fingerprint": self._relay_id}
            )
            config = config.model_copy(update={"exchange": exchange, "coordinator": link})
        return config.model_copy(update={"entry": self._entry})

    def _agent(self, index: int, identity: Identity, disk: Disk, config: NodeConfig) -> Agent:
        context = NodeContext(
            config=config,
            identity=identity,
            clock=self._clocks[index],
            emit=partial(self._note, index),
            offload=self._seams[index].offload(offload_in_place(self._verify)),
            in_place_bytes=0,
        )
        verifier, turncoat = self._seams[index].verifier(self._verifier), self._turncoat(index)
        if turncoat is not None and turncoat.attack in CLAIMS:
            verifier = LyingVerifier(verifier, turncoat.attack)
        agent = Agent(
            context,
            store=disk.store,
            tokenizer=self.tokenizer,
            verifier=verifier,
            environments=frozenset(self.environments),
            replay_type=self.parts.replay,
            admission_type=self.parts.admission,
        )
        if index >= self.num_nodes:  # an adversary sends what it likes
            agent.own_groups.check_own = lambda group, verdict: None
        self.agents[index] = agent
        return agent


async def _tidy_often(agent: Agent) -> None:
    """Tidies a store that has hardly any room every TIGHT_TIDY_S; the pause of `tidy_loop` outlasts a short run."""
    while True:
        await asyncio.sleep(TIGHT_TIDY_S)
        await agent.tidy(int(KEPT_SHARE * agent.config.exchange.store_bytes))
