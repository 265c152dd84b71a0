"""Node daemon: builds every part of a node's agent, starts the parts in order, and stops them in reverse.

Order: identity, store, tokenizer, sandbox, agent, transport (serve), directory, coordinator, loops, worker. Invariant:
every started part is stopped, also when a later part fails to start.
"""

import asyncio
import contextlib
import logging
import os
import random
import secrets
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING

from node.ailment_alerts import AilmentAlerts
from node.credential import OwnCredential
from node.daemon_loops import PROGRESS_EVERY_S, follow_pause, log_progress, look_for_pause, remember_peers, write_status
from node.disk_budget import within_budget
from node.manifest_refresh import ManifestRefresh
from node.status_figures import STATUS, agent_figures, who_counts
from node.worker import errors_in_words, only_cause
from node.worker_process import WorkerProcess
from swarm.addresses import advertised
from swarm.clock import SystemClock
from swarm.config import CoordinatorConfig, NodeConfig
from swarm.environments.determinism import examine, require_repeatable
from swarm.environments.sandbox.confinement_check import require_confinement
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.environments.soundness import narrow_tokenizer
from swarm.errors import SwarmError, Unavailable
from swarm.events import NODE, Event, LoopFailed, NodeFinished, NodeStarted, StoreDamaged, VersionPublished
from swarm.exchange.agent import Agent
from swarm.exchange.group_store import SqliteGroupStore
from swarm.exchange.grpc_transport import PeerHooks
from swarm.identity import Identity
from swarm.interfaces import CoordinatorClient, Tokenizer
from swarm.loops import hand_in_versions, run_agent, run_worker
from swarm.loops.own_advert import own_advert
from swarm.loops.reach import Reach
from swarm.loops.relayed_directory import RelayedDirectory
from swarm.loops.report_activity import reporting
from swarm.loops.supervise import supervise
from swarm.node_context import NodeContext
from swarm.peers.address_book import KNOWN_PEERS
from swarm.peers.entry import EntryRule
from swarm.peers.peer_clocks import PeerClocks
from swarm.peers.reputation import REPUTATION
from swarm.process import (
    Service,
    defer_gc,
    freeze_gc,
    load_or_create_identity,
    lock_directory,
    make_private,
    release_words,
    run_until_signal,
    stand_back,
    thread_limits,
    write_json,
)
from swarm.relay.relaying_transport import RelayingTransport
from swarm.relay.reservation_table import RelayLimits
from swarm.telemetry import EventLog, Telemetry, WarningLog, drop_old_warnings, log_as, make_sinks
from swarm.trained.own_directories import record_own
from swarm.types import Correction, JsonDict, Role, short
from swarm.weights.store import WeightStore
from swarm.wire.held_manifest import Difference, differences, in_words, load_held, with_held
from swarm.wire.run_manifest import SignedManifest, write_toml

if TYPE_CHECKING:
    from swarm.peers.coordinator_client import GrpcCoordinatorClient
    from swarm.peers.discovery_dht import HivemindDirectory

logger = logging.getLogger(__name__)

LEAVE_TIMEOUT_S = 3.0
DRAIN_S = 2.0  # for groups that peers still read from a node that stops
# keys of a status that are of connections
OF_CONNECTIONS = ("peers", "readers", "standing", "following", "followers", "is_coordinator_reachable", "reach")


class Daemon(Service):
    """A running node: its agent, servers and loops, and the worker beside them.

    Example:
        async with Daemon(config) as daemon:
            await daemon.run()
    """

    def __init__(self, config: NodeConfig, on_event: Callable[[Event], None] | None = None) -> None:
        """Creates a node that is not started yet.

        Args:
            on_event: called with each event of the node, in its event loop.
        """
        super().__init__()
        self.config = config
        self._on_event = on_event
        self._own_entry = config.entry  # without what a manifest says
        self.clock = SystemClock()
        self.started_at_s = self.clock.now_s()
        self.agent: Agent
        self.directory: HivemindDirectory | None = None
        self._discovery: RelayedDirectory | None = None  # the same, and relays beside it
        self.coordinator: GrpcCoordinatorClient | None = None
        self.worker = WorkerProcess(self._emit)
        self.starts = "taking its directory"  # the part of the start that goes on; "" once the node serves
        self.is_finished = False  # every step is made
        self.has_version = False  # the learner has loaded its model
        self._last_connections: JsonDict = {}  # of the newest status: none is left by the time that a stop is noted
        self._refresh: ManifestRefresh | None = None  # of a node that joined by a link
        self.differences: list[Difference] | None = None  # from the run's manifest; None: none is held

    async def run(self) -> None:
        """Runs every loop until cancelled, or until every step is made (`learner.at_end`).

        Raises:
            ConfigError: the worker cannot work with this configuration. Any other error of a loop is raised, too.
        """
        log_as(self.config.dir)  # this task may be another one than that of the start
        rng = random.Random(secrets.token_bytes(32))  # strangers are tried in an order that they cannot foresee
        try:
            async with asyncio.TaskGroup() as tasks:
                agent = run_agent(self.agent, self.transport, self._discovery, self.coordinator, rng)
                running = [tasks.create_task(agent)]
                beside = {
                    "status": lambda: write_status(self.config.dir, self._status_to_write, self.telemetry, self.events),
                    "pause": lambda: follow_pause(self.agent),
                    "progress": lambda: log_progress(self.agent, self.peer_clocks, lambda: self.is_finished),
                    "credential": self._credential.keep,
                    "remember": lambda: remember_peers(self.agent),
                    "reach": self.reach.keep,
                }
                if self._refresh is not None:
                    beside["manifest"] = self._refresh.keep
                if self.telemetry.takes_alerts:
                    beside["alerts"] = AilmentAlerts(config=self.config, alert=self.telemetry.alert).keep
                for name, loop in beside.items():
                    running.append(tasks.create_task(supervise(name, loop, self.agent, rng)))
                try:
                    await self._run_worker()
                finally:  # also where a signal ends it: relays and streams still go on here
                    await asyncio.gather(self._withdraw(), self.agent.streams.drain(DRAIN_S))
                    await self.transport.stop_serving()
                for task in running:
                    task.cancel()
            await self.agent.journal.stop()
            await asyncio.to_thread(write_json, self.config.dir / STATUS, self.status() | self._last_connections)
        except asyncio.CancelledError:
            await self.agent.journal.stop()
            with contextlib.suppress(OSError):  # without it the node would look killed
                await asyncio.to_thread(
                    write_json, self.config.dir / STATUS, self.status() | self._last_connections | {"was_stopped": True}
                )
            raise
        except BaseExceptionGroup as group:
            # for readers of the directory
            self._emit(LoopFailed(loop=NODE, error=errors_in_words(group)))
            raise only_cause(group) from group

    # --- start -----------------------------------------------------------------------------------

    async def _start(self) -> None:
        config = self.config
        make_private(config.dir)
        self._exit.callback(os.close, lock_directory(config.dir))
        (config.dir / STATUS).unlink(missing_ok=True)  # of the process before: this one is starting
        await asyncio.to_thread(record_own, config.dir)
        await asyncio.to_thread(drop_old_warnings, config.dir)
        self._exit.callback((await asyncio.to_thread(WarningLog, config.dir)).close)
        log_as(config.dir)
        told = asyncio.create_task(self._log_start(), name="start")
        self._exit.callback(told.cancel)
        try:
            await self._start_parts()
        except Exception as error:
            await asyncio.to_thread(note_end, config.dir, error)
            raise
        finally:
            told.cancel()
        self.starts = ""

    async def _log_start(self) -> None:
        """Logs every PROGRESS_EVERY_S the part of the start that is waited for."""
        while True:
            await asyncio.sleep(PROGRESS_EVERY_S)
            after_s = round(self.clock.now_s() - self.started_at_s)
            logger.info("still starting", extra={"does": self.starts, "after_s": after_s})

    @property
    def does(self) -> str:
        """The work that goes on, for people: a part of the start, else the activity of the worker."""
        activity = None if self.starts else self.agent.local.activity
        return activity.words() if activity is not None else self.starts or "starting the worker"

    async def _start_parts(self) -> None:
        """Starts the parts that need a directory locked by this process."""
        config = self.config = await asyncio.to_thread(within_budget, self.config)
        held = await asyncio.to_thread(load_held, config.dir, config.run_id)
        config = self.config = with_held(config, held)
        self.starts = "trying the environments in a confined process"
        look = examine if config.is_alone else require_repeatable
        await look(config.environments, config.sandbox, narrow_tokenizer(config.model))
        identity = load_or_create_identity(config.dir / "identity.key")
        await self._start_telemetry(config.shown_name)
        if held is not None:
            self.starts = "asking the coordinator for the run's manifest"
            self._refresh = ManifestRefresh(config, identity, held, self.clock)
            config = self.config = with_held(config, await self._refresh.begin(), self._own_entry)
            self._compare(self._refresh.held)
        self.starts = "asking for the right to enter"
        self.entry = EntryRule(config.entry, config.run_id, self.clock, config.coordinator.fingerprint)
        self._credential = OwnCredential(config, identity.node_id, self.entry, self.clock)
        await self._credential.prepare()
        is_advertise_set = config.exchange.advertise.rpartition(":")[2] not in ("", "0")  # join sets port 0
        towards = config.coordinator.address.partition(",")[0].rpartition(":")[0]
        advertise = await asyncio.to_thread(advertised, config.exchange.advertise, config.exchange.listen, towards)
        exchange = config.exchange.model_copy(update={"advertise": advertise})
        self.config = config = config.model_copy(update={"exchange": exchange})
        logger.info("whose groups count in full", extra={"who": who_counts(config)})
        self.starts = "opening the store, the tokenizer and the sandbox"
        self.agent = await self._build_agent(identity)
        self.peer_clocks = PeerClocks(self.clock, self.agent.parties)
        await asyncio.to_thread(self.agent.address_book.restore, config.dir / KNOWN_PEERS, self.entry.readmits)
        await asyncio.to_thread(self.agent.reputation.restore, config.dir / REPUTATION)
        await look_for_pause(self.agent)
        await self.agent.restore()  # last: the groups that wait count as their producers do, which are known by now
        self.starts = "listening to peers"
        self.transport = RelayingTransport(
            identity,
            config.run_id,
            exchange,
            self.clock,
            hooks=PeerHooks(
                require_allowed=self.agent.reputation.require_allowed,
                require_entry=self.entry.require,
                standing=self.agent.standing,
                note_call=self.agent.peers.record_call,
                note_clock=self.peer_clocks.note,
                is_giver=self.agent.is_giver,
            ),
            credential=self._credential.shown,
            relay_limits=RelayLimits(
                reservations=exchange.relay_reservations, bytes_per_s=exchange.most_relayed_bytes_per_s
            ),
        )
        self.transport.stays_here = not self._is_confined
        self._exit.push_async_callback(self.transport.stop)
        self.agent.endpoints = await self.transport.serve(self.agent.streams)
        self.agent.relay_reservations = lambda: self.transport.relay.free_reservations
        rng = random.Random(secrets.token_bytes(32))
        self.reach = Reach(self.agent, self.transport, rng, is_advertise_set=is_advertise_set)
        self.starts = "measuring who can dial this node"
        await self.reach.measure()
        self.starts = "starting the directory of the swarm (DHT)"
        self.directory = self.transport.directory = await self._start_directory(identity)
        self.coordinator = self._connect_coordinator(identity)
        if self._refresh is not None:
            self._refresh.on_change = self._on_manifest
        endpoints, release = tuple(self.agent.endpoints), await asyncio.to_thread(release_words)
        self._emit(NodeStarted(node_id=identity.node_id, endpoints=endpoints, pid=os.getpid(), release=release))
        places = {"endpoints": self.agent.endpoints, "relay_port": self.transport.relay.port, "bootstrap": self.maddrs}
        logger.info("node started", extra={"node": short(identity.node_id), **places})

    async def _withdraw(self) -> None:
        """Announces to the directory that this node leaves."""
        self.agent.is_leaving = True
        if self._discovery is not None:
            with contextlib.suppress(Unavailable, TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await self._discovery.announce(own_advert(self.agent))

    @property
    def maddrs(self) -> list[str]:
        """Addresses of this node in the DHT, for `directory.bootstrap` of others."""
        return list(self.directory.visible_maddrs()) if self.directory is not None else []

    def _compare(self, signed: SignedManifest) -> None:
        """Stores the differences of the configuration from the run manifest, and logs new ones."""
        before, self.differences = self.differences, differences(self.config, signed.manifest)
        if self.differences and self.differences != before:
            logger.warning("configuration differs from the run manifest", extra={"how": in_words(self.differences)})

    def _on_manifest(self, signed: SignedManifest) -> None:
        """Applies the rule of entry and the coordinator's key of a newer manifest."""
        self._compare(signed)
        before, config = self.config.entry, with_held(self.config, signed, self._own_entry)
        self.config = config
        if config.entry != before:
            numbers = {"kind": config.entry.kind, "members": len(config.entry.members)}
            logger.info("the rule of entry changed", extra=numbers | {"denied": [*map(short, config.entry.denied)]})
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
        self.verifier = SandboxVerifier(config.environments, config.sandbox)
        self._exit.push_async_callback(self.verifier.close)
        self._is_confined = await require_confinement(config, self.verifier.limits_in_force)
        context = NodeContext(config=config, identity=identity, clock=self.clock, emit=self._emit)
        agent = Agent(
            context,
            store=store,
            tokenizer=tokenizer,
            verifier=self.verifier,
            accounts=self.verifier.accounts,
            shapes=self.verifier.shapes,
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
            is_outward=lambda: not self.transport.is_dialable,
        )
        self._discovery = RelayedDirectory(directory, self.transport, lambda: self.reach.helpers, identity, self.clock)
        self._exit.push_async_callback(self._discovery.stop)
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

            loop, local = asyncio.get_running_loop(), self.agent.local
            async with reporting(local, self.clock) as on_progress:
                worker = await asyncio.to_thread(
                    build_worker, self.config, self.agent.node_id, local, loop=loop, on_progress=on_progress
                )
                freeze_gc()
                try:
                    await run_worker(worker)
                finally:
                    await asyncio.to_thread(worker.close)
        else:
            freeze_gc()
            await self.worker.run(self.config, self.agent)
        self.is_finished = True
        self._emit(NodeFinished(step=self.agent.head.step))
        if self.config.learner.at_end == "serve":
            logger.info("every step is made; the node goes on serving", extra={"step": self.agent.head.step})
            await asyncio.Event().wait()
        logger.info("every step is made; the node ends", extra={"step": self.agent.head.step})

    # --- status and events ---------------------------------------------------------------------------

    def status(self) -> JsonDict:
        """The present figures for status.json."""
        return {
            **agent_figures(self.agent, self.config),
            "at_s": self.clock.now_s(),
            "started_at_s": self.started_at_s,
            "is_loading": self._is_loading,
            "is_finished": self.is_finished,
            "dht": self.maddrs,
            "reach": self.reach.status(),
            "relayed": self.transport.relay.status(),
            "scoring_s": self.verifier.own_s,
            "num_entry_refused": self.entry.num_refused,
            "differs_from_run": self.differences,
            "num_events_lost": self.events.num_lost,
            "clock": self.peer_clocks.finding(),
            "restarts": {
                "worker": self.worker.num_restarts,
                "p2pd": self.directory.num_restarts if self.directory is not None else 0,
                "sandbox": self.verifier.num_replaced,
            },
            **({"is_coordinator_reachable": self.coordinator.is_connected} if self.coordinator is not None else {}),
        }

    @property
    def _is_loading(self) -> bool:
        return Role.TRAINER in self.config.roles and not self.has_version and not self.agent.is_paused

    def _status_to_write(self) -> JsonDict:
        status = self.status()
        self._last_connections = {key: status[key] for key in OF_CONNECTIONS if key in status}
        return status

    def _emit(self, event: Event) -> None:
        if isinstance(event, VersionPublished) and not self.has_version:
            self.has_version = True
            took_s = round(self.clock.now_s() - self.started_at_s, 1)
            how = "resumed at its newest checkpoint" if event.step else "begun"
            logger.info("the model is loaded", extra={"training": how, "step": event.step, "after_s": took_s})
        self.events.write(event)
        self.telemetry.record(event)
        if self._on_event is not None:
            self._on_event(event)


def note_end(directory: Path, error: Exception) -> None:
    """Writes the error that ended a node into its events, for `swarm why` (blocking); a failed write is ignored."""
    line = str(error).partition("\n")[0]
    with contextlib.suppress(SwarmError, OSError):  # a disk that takes no line must not hide the error itself
        log = EventLog(directory / "events.jsonl")
        log.write(LoopFailed(loop=NODE, error=f"{type(error).__name__}: {line}"))
        log.close()


def write_config(config: NodeConfig | CoordinatorConfig, path: Path) -> None:
    """Writes a configuration as TOML, so that it can be read back equal."""
    write_toml(config.model_dump(mode="json"), path)


async def run_daemon(config: NodeConfig, make: Callable[[NodeConfig], Daemon] = Daemon) -> None:
    """Runs the node from `make` to its end, SIGTERM or Ctrl-C; a second Ctrl-C forces. Raises as `Daemon.run`."""

    async def run() -> None:
        async with make(config) as daemon:
            await daemon.run()

    with node_process(config):
        if await run_until_signal(run()):
            logger.info("node stopped")


@contextlib.contextmanager
def node_process(config: NodeConfig) -> Generator[None]:
    """Context of a node: this process and its children give way to others, and write files for this user alone.

    Afterwards environment and umask are restored; the niceness stays.
    """
    limits = thread_limits(config.num_threads)  # for the DHT's process, too
    before = {name: os.environ.get(name) for name in limits}
    defer_gc()
    os.environ.update(limits)
    stand_back(config.niceness)
    umask = os.umask(0o077)
    try:
        yield
    finally:
        freeze_gc()  # also where it failed to start
        os.umask(umask)
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _open_weights(config: NodeConfig) -> WeightStore | None:
    """The weight store of a node that publishes or follows; its worker opens the same directory."""
    follows = Role.TRAINER not in config.roles and Role.GENERATOR in config.roles
    if not config.weights.publish and not follows:
        return None
    return WeightStore(config.dir / "weights", config.weights.store_bytes)


def _usable_corrections(config: NodeConfig) -> frozenset[Correction]:
    """The corrections that the recipes accept: other groups are refused before they can reach the learner."""
    from swarm.objectives.methods import load_recipes

    return load_recipes(config.learner).usable


def _load_tokenizer(config: NodeConfig) -> Tokenizer:
    from swarm.model.tokenizer import load_tokenizer

    return load_tokenizer(config.model)


async def _leave(client: CoordinatorClient, agent: Agent) -> None:
    """Hands in the versions that the ledger lacks and ends the lease, within LEAVE_TIMEOUT_S; errors are ignored."""
    with contextlib.suppress(SwarmError, TimeoutError):
        async with asyncio.timeout(LEAVE_TIMEOUT_S):
            await hand_in_versions(agent, client)
            await client.leave()
