"""Node daemon: builds every part of a node's agent, starts them in order, and drains them in reverse.

Order: identity, store, tokenizer, sandbox, agent, transport (serve), directory, coordinator, loops, worker.
Invariant: whatever was started is stopped, also when a later part fails to start.
"""

import asyncio
import contextlib
import logging
import os
import random
import secrets
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from node.ailment_alerts import AilmentAlerts
from node.credential import OwnCredential
from node.disk_budget import within_budget
from node.manifest_refresh import ManifestRefresh
from node.pause import paused_since
from node.status import STATUS
from node.worker import only_cause
from node.worker_process import WorkerProcess
from swarm.addresses import advertised
from swarm.clock import SystemClock
from swarm.config import CoordinatorConfig, NodeConfig
from swarm.environments.determinism import examine, require_repeatable
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.environments.soundness import narrow_tokenizer
from swarm.errors import StorageFull, SwarmError
from swarm.events import NODE, Event, LoopFailed, NodeFinished, NodeStarted, StoreDamaged, VersionPublished
from swarm.exchange.agent import Agent
from swarm.exchange.group_store import SqliteGroupStore
from swarm.exchange.grpc_transport import GrpcTransport
from swarm.identity import Identity
from swarm.interfaces import CoordinatorClient, Tokenizer
from swarm.loops import hand_in_versions, run_agent, run_worker
from swarm.loops.reach import Reach
from swarm.loops.relayed_directory import RelayedDirectory
from swarm.loops.supervise import supervise
from swarm.node_context import NodeContext
from swarm.peers.address_book import KNOWN_PEERS, save_known_peers
from swarm.peers.entry import EntryRule
from swarm.peers.peer_clocks import PeerClocks
from swarm.peers.reputation import REPUTATION, save_reputation
from swarm.process import (
    Service,
    defer_gc,
    freeze_gc,
    load_or_create_identity,
    lock_directory,
    make_private,
    run_until_signal,
    stand_back,
    thread_limits,
    write_json,
    written_bytes_of_tree,
)
from swarm.relay.relay_servicer import RelayLimits
from swarm.telemetry import EventLog, Telemetry, make_sinks
from swarm.types import Correction, JsonDict, Role, short
from swarm.weights.store import WeightStore
from swarm.wire.held_manifest import Difference, differences, in_words, load_held, with_held
from swarm.wire.run_manifest import SignedManifest, write_toml

if TYPE_CHECKING:
    from swarm.peers.coordinator_client import GrpcCoordinatorClient
    from swarm.peers.discovery_dht import HivemindDirectory

logger = logging.getLogger(__name__)

STATUS_EVERY_S = 1.0
PAUSE_LOOK_S = 1.0
REMEMBER_EVERY_S = 10.0
PROGRESS_EVERY_S = 30.0
LEAVE_TIMEOUT_S = 3.0


class Daemon(Service):
    """A running node: its agent, servers and loops, and the worker beside them.

    Example:
        async with Daemon(config) as daemon:
            await daemon.run()
    """

    def __init__(self, config: NodeConfig, on_event: Callable[[Event], None] | None = None) -> None:
        """`on_event`: called with each event of the node, in its event loop."""
        super().__init__()
        self.config = config
        self._on_event = on_event
        self._own_entry = config.entry  # without what a manifest says
        self.clock = SystemClock()
        self._started_at_s = self.clock.now_s()
        self.agent: Agent
        self.directory: HivemindDirectory | None = None
        self.coordinator: GrpcCoordinatorClient | None = None
        self._worker = WorkerProcess(self._emit)
        self._is_finished = False  # every step is made
        self._has_version = False  # the learner has loaded its model
        self._peers: JsonDict = {}  # of the newest status: all are gone by the time that a stop is noted
        self._refresh: ManifestRefresh | None = None  # of a node that joined by a link
        self._differences: list[Difference] | None = None  # from the run's manifest; None: none is held

    async def run(self) -> None:
        """Runs every loop until cancelled, or until every step is made (`learner.at_end`).

        Raises:
            ConfigError: the worker cannot work with this configuration.
        """
        rng = random.Random(secrets.token_bytes(32))  # strangers are tried in an order that they cannot foresee
        try:
            async with asyncio.TaskGroup() as tasks:
                agent = run_agent(self.agent, self.transport, self._discovery(), self.coordinator, rng)
                running = [tasks.create_task(agent)]
                beside = {
                    "status": self._status_loop,
                    "pause": self._pause_loop,
                    "progress": self._progress_loop,
                    "credential": self._credential.keep,
                    "remember": self._remember_loop,
                    "reach": self.reach.keep,
                }
                if self._refresh is not None:
                    beside["manifest"] = self._refresh.keep
                if self.telemetry.takes_alerts:
                    beside["alerts"] = AilmentAlerts(config=self.config, alert=self.telemetry.alert).keep
                for name, loop in beside.items():
                    running.append(tasks.create_task(supervise(name, loop, self.agent, rng)))
                await self._run_worker()
                for task in running:
                    task.cancel()
            await self.agent.journal.stop()
            await asyncio.to_thread(write_json, self.config.dir / STATUS, self.status())
        except asyncio.CancelledError:
            await self.agent.journal.stop()
            with contextlib.suppress(OSError):  # else it reads as if it had been killed
                await asyncio.to_thread(write_json, self.config.dir / STATUS, self._status_at_stop())
            raise
        except BaseExceptionGroup as group:
            cause = only_cause(group)
            # for whoever asks the directory
            self._emit(LoopFailed(loop=NODE, error=f"{type(cause).__name__}: {cause}"))
            raise cause from group

    # --- start -----------------------------------------------------------------------------------

    async def _start(self) -> None:
        config = self.config
        make_private(config.dir)
        self._exit.callback(os.close, lock_directory(config.dir))
        try:
            await self._start_parts()
        except Exception as error:
            await asyncio.to_thread(note_end, config.dir, error)
            raise

    async def _start_parts(self) -> None:
        """All that needs the directory to be this process's own."""
        config = self.config = await asyncio.to_thread(within_budget, self.config)
        held = await asyncio.to_thread(load_held, config.dir, config.run_id)
        config = self.config = with_held(config, held)
        look = examine if config.is_alone else require_repeatable
        await look(config.environments, config.sandbox, narrow_tokenizer(config.model))
        (config.dir / STATUS).unlink(missing_ok=True)  # of the process before: this one is starting
        identity = load_or_create_identity(config.dir / "identity.key")
        await self._start_telemetry(config.name or short(identity.node_id))
        if held is not None:
            self._refresh = ManifestRefresh(config, identity, held, self.clock)
            config = self.config = with_held(config, await self._refresh.begin(), self._own_entry)
            self._compare(self._refresh.held)
        self.entry = EntryRule(config.entry, config.run_id, self.clock, config.coordinator.fingerprint)
        self._credential = OwnCredential(config, identity.node_id, self.entry, self.clock)
        await self._credential.prepare()
        is_advertise_set = config.exchange.advertise.rpartition(":")[2] not in ("", "0")  # join sets port 0
        advertise = await asyncio.to_thread(advertised, config.exchange.advertise, config.exchange.listen)
        exchange = config.exchange.model_copy(update={"advertise": advertise})
        self.config = config = config.model_copy(update={"exchange": exchange})
        logger.info("whose groups count in full", extra={"who": _who_counts(config)})
        self.agent = await self._build_agent(identity)
        self.peer_clocks = PeerClocks(self.clock, self.agent.parties)
        await asyncio.to_thread(self.agent.address_book.restore, config.dir / KNOWN_PEERS, self.entry.readmits)
        await asyncio.to_thread(self.agent.reputation.restore, config.dir / REPUTATION)
        await self._look_for_pause()
        await self.agent.restore()  # last: the groups that wait count as their producers do, of whom we know by now
        self.transport = GrpcTransport(
            identity,
            config.run_id,
            exchange,
            self.clock,
            require_allowed=self.agent.reputation.require_allowed,
            require_entry=self.entry.require,
            credential=self._credential.shown,
            standing=self.agent.standing,
            note_call=self.agent.peers.record_call,
            note_clock=self.peer_clocks.note,
            relay_limits=RelayLimits(places=exchange.relay_places, bytes_per_s=exchange.most_relayed_bytes_per_s),
            is_giver=self.agent.is_giver,
        )
        self._exit.push_async_callback(self.transport.stop)
        self.agent.endpoints = await self.transport.serve(self.agent.streams)
        self.agent.relay_places = lambda: self.transport.relay.free_places
        rng = random.Random(secrets.token_bytes(32))
        self.reach = Reach(self.agent, self.transport, rng, is_advertise_set=is_advertise_set)
        await self.reach.measure()
        self.directory = self.transport.directory = await self._start_directory(identity)
        self.coordinator = self._connect_coordinator(identity)
        if self._refresh is not None:
            self._refresh.on_change = self._on_manifest
        self._emit(NodeStarted(node_id=identity.node_id, endpoints=tuple(self.agent.endpoints), pid=os.getpid()))
        fields = {"node": short(identity.node_id), "endpoints": self.agent.endpoints, "bootstrap": self.maddrs}
        logger.info("node started", extra=fields)

    def _discovery(self) -> RelayedDirectory | None:
        if self.directory is None:
            return None
        return RelayedDirectory(
            self.directory, self.transport, lambda: self.reach.helpers, self.agent.context.identity, self.clock
        )

    @property
    def maddrs(self) -> list[str]:
        """Where others find this node in the DHT: what they write into `directory.bootstrap`."""
        return list(self.directory.visible_maddrs()) if self.directory is not None else []

    def _compare(self, signed: SignedManifest) -> None:
        """Notes, and says in the log, where this node is set otherwise than its run."""
        before, self._differences = self._differences, differences(self.config, signed.manifest)
        if self._differences and self._differences != before:
            logger.warning("this node is set otherwise than its run", extra={"how": in_words(self._differences)})

    def _on_manifest(self, signed: SignedManifest) -> None:
        """Follows who may take part, and the coordinator's key, as a newer manifest says."""
        self._compare(signed)
        before, config = self.config.entry, with_held(self.config, signed, self._own_entry)
        self.config = config
        if config.entry != before:
            numbers = {"kind": config.entry.kind, "members": len(config.entry.members)}
            logger.info("who may take part changed", extra=numbers | {"denied": [*map(short, config.entry.denied)]})
        self.entry.update(config.entry, signed.key)
        self.agent.parties.entry = None if config.is_private else self.entry  # listing members ends a private run
        self._credential.request_renewal()
        if self.coordinator is not None:
            self.coordinator.follow_key(signed.key)

    async def _start_telemetry(self, name: str) -> None:
        config = self.config
        self.events = await asyncio.to_thread(EventLog, config.dir / "events.jsonl")
        self._exit.callback(self.events.close)
        settings = config.model_dump(mode="json")
        sinks = await asyncio.to_thread(make_sinks, config.telemetry, config.dir, name, settings)
        self.telemetry = Telemetry(name, sinks)
        self._exit.callback(self.telemetry.close)
        if config.telemetry.metrics_listen:
            self._exit.callback(self.telemetry.serve(config.telemetry.metrics_listen))

    async def _build_agent(self, identity: Identity) -> Agent:
        """Opens group store, tokenizer and sandbox, and builds the agent on them."""
        config = self.config
        store = await SqliteGroupStore.open(config.dir / "groups.sqlite", self.clock, config.exchange.store_bytes)
        self._exit.push_async_callback(store.close)
        if store.moved_aside is not None:
            self._emit(StoreDamaged(moved_to=store.moved_aside.name))
        tokenizer = await asyncio.to_thread(_load_tokenizer, config)
        self._verifier = SandboxVerifier(config.environments, config.sandbox)
        self._exit.push_async_callback(self._verifier.close)
        context = NodeContext(config=config, identity=identity, clock=self.clock, emit=self._emit)
        agent = Agent(
            context,
            store=store,
            tokenizer=tokenizer,
            verifier=self._verifier,
            accounts=self._verifier.accounts,
            shapes=self._verifier.shapes,
            weights=await asyncio.to_thread(_open_weights, config),
            usable=await asyncio.to_thread(_usable_corrections, config),
            entry=self.entry,
        )
        agent.credential = self._credential.shown
        return agent

    async def _start_directory(self, identity: Identity) -> "HivemindDirectory | None":
        if self.config.directory.kind == "none":
            return None
        from swarm.peers.discovery_dht import HivemindDirectory

        directory = await HivemindDirectory.start(
            identity,
            self.config.run_id,
            self.config.directory,
            self.clock,
            self.config.dir / "peers.json",
            self.entry,
            is_client=not self.transport.is_dialable,
        )
        self._exit.push_async_callback(directory.stop)
        return directory

    def _connect_coordinator(self, identity: Identity) -> "GrpcCoordinatorClient | None":
        if not self.config.coordinator.address:
            return None
        from swarm.peers.coordinator_client import GrpcCoordinatorClient

        client = GrpcCoordinatorClient(
            self.config.coordinator,
            identity,
            self.config.run_id,
            credential=self._credential.shown,
            note_clock=self.peer_clocks.note_coordinator,
        )
        self._exit.push_async_callback(client.close)
        self._exit.push_async_callback(_leave, client, self.agent)
        return client

    # --- worker -----------------------------------------------------------------------------------

    async def _run_worker(self) -> None:
        await self.agent.resumed()  # a paused node that is started loads no model
        if not {Role.TRAINER, Role.GENERATOR} & set(self.config.roles):
            await asyncio.Event().wait()  # it passes on what others make, until it is stopped
        if self.config.worker == "inline":
            from node.build import build_worker  # imports torch, which no other agent needs

            worker = await asyncio.to_thread(
                build_worker, self.config, self.agent.node_id, self.agent, loop=asyncio.get_running_loop()
            )
            freeze_gc()
            try:
                await run_worker(worker)
            finally:
                await asyncio.to_thread(worker.close)
        else:
            freeze_gc()
            await self._worker.run(self.config, self.agent)
        self._is_finished = True
        self._emit(NodeFinished(step=self.agent.head.step))
        if self.config.learner.at_end == "serve":
            logger.info("every step is made; the node goes on serving", extra={"step": self.agent.head.step})
            await asyncio.Event().wait()
        logger.info("every step is made; the node ends", extra={"step": self.agent.head.step})

    # --- status and events ---------------------------------------------------------------------------

    def _emit(self, event: Event) -> None:
        if isinstance(event, VersionPublished) and not self._has_version:
            self._has_version = True
            took_s = round(self.clock.now_s() - self._started_at_s, 1)
            how = "resumed at its newest checkpoint" if event.step else "begun"
            logger.info("the model is loaded", extra={"training": how, "step": event.step, "after_s": took_s})
        self.events.write(event)
        self.telemetry.record(event)
        if self._on_event is not None:
            self._on_event(event)

    async def _status_loop(self) -> None:
        path, was_written = self.config.dir / STATUS, True
        while True:
            status = self.status()
            self._peers = {"peers": status["peers"], "standing": status["standing"]}
            self.telemetry.snapshot(status)
            self.events.flush()
            try:
                await asyncio.to_thread(write_json, path, status)
                was_written = True
            except StorageFull as error:
                if was_written:
                    logger.error("the status is not written until there is room", extra={"error": str(error)})
                was_written = False
            await asyncio.sleep(STATUS_EVERY_S)

    async def _pause_loop(self) -> None:
        """Follows what `swarm pause` and `swarm resume` say."""
        while True:
            await asyncio.sleep(PAUSE_LOOK_S)
            await self._look_for_pause()

    async def _look_for_pause(self) -> None:
        agent, since_s = self.agent, await asyncio.to_thread(paused_since, self.config.dir)
        if since_s is not None and not agent.is_paused:
            agent.pause(since_s)
            logger.warning("paused: no batch or step begins until: swarm resume", extra={"dir": str(self.config.dir)})
        elif since_s is None and agent.is_paused:
            agent.resume()
            logger.warning("goes on after a pause")

    async def _remember_loop(self) -> None:
        """Keeps on the disk the peers that answered, to be dialled after a restart, and those that were charged."""
        path, written = self.config.dir / KNOWN_PEERS, self.agent.address_book.to_remember()
        had_charged = True  # the file of the process before may name some
        while True:
            await asyncio.sleep(REMEMBER_EVERY_S)
            charged = self.agent.reputation.to_remember()
            if charged or had_charged:
                await asyncio.to_thread(save_reputation, self.config.dir / REPUTATION, charged)
            had_charged = bool(charged)
            peers = self.agent.address_book.to_remember()
            if peers and peers != written:  # a node that is cut off keeps what it knew
                written = peers
                await asyncio.to_thread(save_known_peers, path, peers)

    async def _progress_loop(self) -> None:
        """One line in the log now and then, until every step is made."""
        agent, tokens = self.agent, 0
        while not self._is_finished:
            await asyncio.sleep(PROGRESS_EVERY_S)
            made, tokens = agent.own_groups.tokens_generated - tokens, agent.own_groups.tokens_generated
            report = agent.node_report(made / PROGRESS_EVERY_S)
            num_groups = sum(edge.num_groups for edge in report.edges)
            fields = {
                "step": report.head.step,
                "reward": report.reward_mean,
                "local": report.num_local,
                "external": report.num_external,
                "age": sum(edge.age_mean_steps * edge.num_groups for edge in report.edges) / max(num_groups, 1),
                "tokens_per_s": report.tokens_per_s,
                "peers": len(agent.peers.connected),
            }
            logger.info("progress", extra=fields)
            if clock := self.peer_clocks.new_finding():
                logger.warning(clock)

    def _status_at_stop(self) -> JsonDict:
        """What is left for whoever asks why: with the peers that were there before."""
        return {**self.status(), **self._peers, "was_stopped": True}

    def status(self) -> JsonDict:
        """A snapshot for `swarm status` and the simulation."""
        agent = self.agent
        return {
            "node_id": agent.node_id,
            "name": self.config.name or short(agent.node_id),
            "run_id": self.config.run_id,
            "pid": os.getpid(),
            "at_s": self.clock.now_s(),
            "started_at_s": self._started_at_s,
            "is_loading": Role.TRAINER in self.config.roles and not self._has_version and agent.paused_since_s is None,
            "reward_mean": agent.own_groups.reward_mean.value,
            "step": agent.newest_version.step,
            "last_step_at_s": agent.last_step_at_s,
            "is_finished": self._is_finished,
            "paused_since_s": agent.paused_since_s,
            "written_bytes": written_bytes_of_tree(),
            "endpoints": list(agent.endpoints),
            "dht": self.maddrs,
            "reach": self.reach.status(),
            "relayed": self.transport.relay.status(),
            "peers": sorted(agent.peers.connected),
            "known_peers": len(agent.address_book.known),
            "dials": {"answered": agent.address_book.num_answered, "failed": agent.address_book.num_failed},
            "num_put": agent.own_groups.num_put,
            "is_store_full": agent.own_groups.is_full,
            "num_admitted": agent.ingest.num_admitted,
            "num_local_used": agent.journal.num_local,
            "num_external_used": agent.journal.num_external,
            "num_set_aside": agent.journal.num_set_aside,
            "tokens_generated": agent.own_groups.tokens_generated,
            "bytes_sent": agent.streams.bytes_sent,
            "bytes_received": agent.ingest.bytes_received,
            "refusals": {str(reason): count for reason, count in agent.ingest.refusals.items()},
            "newest_refusals": {str(reason): newest for reason, newest in agent.ingest.newest_refusals.items()},
            "evaluations": agent.coordinator_view.evaluations,
            "replay_groups": agent.replay.num_groups,
            "replay_bytes": agent.replay.num_bytes,
            "num_failures": agent.num_failures,
            "num_entry_refused": self.entry.num_refused,
            "differs_from_run": self._differences,
            "who_counts": _who_counts(self.config),
            "environments": {each.name: each.exchange for each in self.config.environments},
            "standing": {peer: agent.parties.standing_of(peer) for peer in sorted(agent.peers.connected)},
            "max_disk_bytes": self.config.disk.max_bytes,
            "num_events_lost": self.events.num_lost,
            "restarts": {
                "worker": self._worker.num_restarts,
                "p2pd": self.directory.num_restarts if self.directory is not None else 0,
                "sandbox": self._verifier.num_replaced,
            },
            "guard": dict(agent.idle_figures),
            **_awaited(self.config, agent),
            "advice": agent.coordinator_view.advice.state,
            **_weights_status(agent),
            **({"is_coordinator_reachable": self.coordinator.is_connected} if self.coordinator is not None else {}),
            "clock": self.peer_clocks.finding(),
            "coordinator_refusal": agent.coordinator_view.refusal,
        }


def note_end(directory: Path, error: Exception) -> None:
    """What ended a node, in its events, for whoever asks `swarm why` (blocking)."""
    line = str(error).partition("\n")[0]
    with contextlib.suppress(SwarmError, OSError):  # a disk that takes no line must not hide the error itself
        log = EventLog(directory / "events.jsonl")
        log.write(LoopFailed(loop=NODE, error=f"{type(error).__name__}: {line}"))
        log.close()


def write_config(config: NodeConfig | CoordinatorConfig, path: Path) -> None:
    """Writes a configuration as TOML, so that it can be read back equal."""
    write_toml(config.model_dump(mode="json"), path)


async def run_daemon(config: NodeConfig) -> None:
    """Runs a node until SIGTERM or Ctrl-C; a second Ctrl-C forces."""

    async def run() -> None:
        async with Daemon(config) as daemon:
            await daemon.run()

    defer_gc()
    os.environ.update(thread_limits(config.num_threads))  # for the DHT's process, too
    stand_back(config.niceness)
    os.umask(0o077)  # whatever this process and its children write is for this user
    try:
        if await run_until_signal(run()):
            logger.info("node stopped")
    finally:
        freeze_gc()  # also where it failed to start


def _awaited(config: NodeConfig, agent: Agent) -> JsonDict:
    """Whose groups the learner of this node waits for, and what came of them since its newest step."""
    if Role.TRAINER not in config.roles:
        return {}
    if Role.GENERATOR in config.roles and config.replay.local_groups:
        return {"own_since_step": asdict(agent.own_groups.since_step)}
    return {"learns_from_others": True}


def _weights_status(agent: Agent) -> JsonDict:
    """Weights that the node serves, the credit it granted, and the policy it follows."""
    status: JsonDict = {"weights_sent_bytes": agent.weight_server.bytes_sent}
    if agent.version_publisher is not None:
        status["published_step"] = agent.weight_server.head_step(agent.node_id)
        status["followers"] = agent.credit_ledger.status()
    if agent.weight_follower is not None:
        status["following"] = agent.weight_follower.status()
    return status


def _who_counts(config: NodeConfig) -> str:
    """Whose groups count in full; those of all others together fill an eighth of a step."""
    if config.is_private:
        return "everybody"
    return "members and whom they invited" if config.entry.members else "nobody but whom the coordinator invited"


def _open_weights(config: NodeConfig) -> WeightStore | None:
    """Where a node that publishes or follows keeps weights; its worker opens the same directory."""
    follows = Role.TRAINER not in config.roles and Role.GENERATOR in config.roles
    if not config.weights.publish and not follows:
        return None
    return WeightStore(config.dir / "weights", config.weights.store_bytes)


def _usable_corrections(config: NodeConfig) -> frozenset[Correction]:
    """What the recipes may learn from: anything else is refused before it can reach the learner."""
    from swarm.objectives.methods import load_recipes

    return load_recipes(config.learner).usable


def _load_tokenizer(config: NodeConfig) -> Tokenizer:
    from swarm.model.tokenizer import load_tokenizer

    return load_tokenizer(config.model)


async def _leave(client: CoordinatorClient, agent: Agent) -> None:
    """Hands in what the ledger lacks and ends the lease; a coordinator that is away does not hold us up."""
    with contextlib.suppress(SwarmError, TimeoutError):
        async with asyncio.timeout(LEAVE_TIMEOUT_S):
            await hand_in_versions(agent, client)
            await client.leave()
