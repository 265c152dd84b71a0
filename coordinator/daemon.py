"""Coordinator process: ledger, membership and advice over gRPC, a page over HTTP, a peer of the DHT.

Order: identity, store, core, gRPC, DHT, HTTP; stopped in reverse. Invariant: a restart keeps the state and the
identity, and writes `<dir>/coordinator.json` only once the coordinator answers.
"""

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from coordinator.core import CoordinatorCore
from coordinator.dashboard import Dashboard
from coordinator.manifest_signing import sign_next
from coordinator.service import CONCURRENT_CALLS, REQUEST_BYTES, STREAMS_PER_CONNECTION, CoordinatorServicer
from coordinator.sqlite_store import SqliteCoordinatorStore
from coordinator.turns import CallerTurns
from swarm.addresses import advertised, is_loopback, is_private_host, is_wildcard
from swarm.clock import SystemClock
from swarm.config import CoordinatorConfig, NodeConfig
from swarm.environments.load import build_environment
from swarm.errors import ConfigError, SwarmError
from swarm.identity import Identity
from swarm.objectives.methods import built_in_name, list_recipes, recipes_of
from swarm.peers.entry import EntryRule
from swarm.peers.parties import Parties
from swarm.process import (
    Service,
    load_or_create_identity,
    lock_directory,
    make_private,
    run_until_signal,
    write_json,
)
from swarm.relay.relay_servicer import RelayServicer
from swarm.relay.reservation_table import RelayLimits
from swarm.telemetry import Telemetry
from swarm.types import JsonDict, short
from swarm.wire.join_link import JoinLink
from swarm.wire.run_manifest import kept_back, manifest_of
from swarm.wire.server import ServerLimits, Sessions, SessionServer, start_server

if TYPE_CHECKING:
    from swarm.peers.discovery_dht import HivemindDirectory

logger = logging.getLogger(__name__)

INFO = "coordinator.json"  # in the directory of a coordinator that serves

TIDY_EVERY_S = 10.0
STOP_GRACE_S = 2.0


class CoordinatorDaemon(Service):
    """One running coordinator.

    Example:
        async with CoordinatorDaemon(config) as daemon:
            print(daemon.link)
            await daemon.run()
    """

    def __init__(self, config: CoordinatorConfig) -> None:
        super().__init__()
        self.config = config
        self.clock = SystemClock()
        self.link = ""
        self.info: JsonDict = {}
        self._directory: HivemindDirectory | None = None
        self._bootstrap: Callable[[], tuple[str, ...]] = tuple  # asked at every call: a rebuilt peer moves

    async def run(self) -> None:
        """Maintains state, manifest and directory until cancelled; logs errors and goes on."""
        while True:
            await asyncio.sleep(TIDY_EVERY_S)
            try:
                await self.core.tidy()
            except SwarmError as error:
                logger.warning("state not tidied", extra={"error": str(error)})
            try:
                if self.config.manifest_days:  # a newer one when half its time is over
                    self._servicer.manifest = await asyncio.to_thread(self._sign)
            except SwarmError as error:
                logger.warning("manifest not signed anew", extra={"error": str(error)})
            try:
                if self._directory is not None:
                    await self._directory.maintain()
            except SwarmError as error:
                logger.warning("directory not maintained", extra={"error": str(error)})

    async def _start(self) -> None:
        config = self.config
        make_private(config.dir)
        self._exit.callback(os.close, lock_directory(config.dir))
        before = _take_info(config.dir)
        key = config.dir / "identity.key"
        identity = load_or_create_identity(key)
        everyone = config.node.model_copy(
            update={
                "generator": config.node.generator.model_copy(update={"env_weights": {}}),
                "directory": config.directory,
            }
        )
        await asyncio.to_thread(_require_recipe, config.node)
        await asyncio.to_thread(_require_environments, config.node)
        if lost := kept_back(config.node):
            fix = "leave them out here, and set them in a node's own node.toml, or with --set at swarm join"
            logger.warning("no node takes these keys from a manifest", extra={"keys": lost, "fix": fix})
        digest = await asyncio.to_thread(_tokenizer_digest, config)
        manifest = manifest_of(everyone, config.run_id, digest, key.stat().st_mtime)
        self._sign = lambda: sign_next(config, identity, manifest, self.clock.now_s())
        signed = await asyncio.to_thread(self._sign)
        store = await SqliteCoordinatorStore.open(config.dir / "coordinator.sqlite")
        self._exit.push_async_callback(store.close)
        self.entry = EntryRule(config.node.entry, config.run_id, self.clock, coordinator=identity.node_id)
        dialled = await asyncio.to_thread(advertised, config.advertise, config.listen)  # its port may be known later
        parties = Parties(None if _is_private(config, dialled) else self.entry)
        if not parties.is_private and config.node.entry.kind == "open" and not config.node.entry.members:
            logger.warning(
                "nobody's groups count in full: a public run that lists no members takes groups of others for an "
                "eighth of each step",
                extra={"fix": "list node.entry.members, invite nodes, or set node.entry.established"},
            )
        max_age_steps = config.node.replay.max_age_steps
        self.core = CoordinatorCore(self.clock, store, config.lease_s, max_age_steps, parties=parties)
        await self.core.restore()
        limits = ServerLimits(
            request_bytes=REQUEST_BYTES,
            concurrent_calls=CONCURRENT_CALLS,
            streams_per_connection=STREAMS_PER_CONNECTION,
        )
        turns = CallerTurns(parties)
        for member in self.core.membership.all():
            if not parties.is_private and parties.is_established(member.node_id):
                turns.know(member.subnet)
        require_entry = self.entry.require
        sessions = Sessions(
            identity, config.run_id, self.clock, limits, require_entry=require_entry, turn_of=turns.of_peer
        )
        servicer = self._servicer = CoordinatorServicer(
            self.core, sessions, signed, lambda: self._bootstrap(), turns=turns
        )
        self._exit.push_async_callback(servicer.finish)
        relay = RelayServicer(
            sessions,
            self.clock,
            RelayLimits(reservations=config.relay_reservations, bytes_per_s=config.relay_bytes_per_s),
            standing=lambda node_id: int(not parties.is_private and parties.is_established(node_id)),
            directory=lambda: self._directory,
        )
        register = [servicer.register, relay.register]
        server, port = await _listen_again(config.listen, before.get("listen"), sessions, register)
        self._exit.push_async_callback(server.stop, STOP_GRACE_S)
        self._exit.push_async_callback(relay.close_port)
        await relay.open_port(config.listen, config.relay_port)
        self._exit.callback(self.core.watches.end)  # before the server stops: it would wait for them
        listen = f"{config.listen.rpartition(':')[0]}:{port}"
        await self._start_directory(identity)
        address = config.advertise or f"{dialled.rpartition(':')[0]}:{port}"
        self.link = str(JoinLink(addresses=(address,), run_id=config.run_id, fingerprint=identity.node_id))
        if is_wildcard(config.listen) and is_loopback(address.rpartition(":")[0]):
            no_route = "it has no route to elsewhere by which its address were known"
            logger.warning(
                "the link leads to this machine alone",
                extra={
                    "why": "advertise is a loopback address" if config.advertise else no_route,
                    "fix": 'set advertise = "HOST:PORT" to what others dial',
                },
            )
        telemetry, environments = Telemetry("coordinator"), config.node.environments
        dashboard = Dashboard(self.core, config.run_id, lambda: self.link, telemetry, environments, relay.status)
        http = await dashboard.start(config.http_listen)
        self._exit.push_async_callback(dashboard.stop)
        self.info = {
            "run_id": config.run_id,
            "pid": os.getpid(),
            "link": self.link,
            "listen": listen,
            "http_listen": http,
            "fingerprint": identity.node_id,
            "bootstrap_peers": list(self._bootstrap()),
        }
        await asyncio.to_thread(write_json, config.dir / INFO, self.info)
        places = {"listen": listen, "relay_port": relay.port, "http": http}
        logger.info("coordinator started", extra={"node": short(identity.node_id), **places})

    async def _start_directory(self, identity: Identity) -> None:
        if self.config.directory.kind == "none":
            return
        from swarm.peers.discovery_dht import HivemindDirectory

        directory = await HivemindDirectory.start(
            identity, self.config.run_id, self.config.directory, self.clock, self.config.dir / "peers.json", self.entry
        )
        self._exit.push_async_callback(directory.stop)
        self._directory = directory
        self._bootstrap = directory.visible_maddrs


def _is_private(config: CoordinatorConfig, address: str) -> bool:
    """True if every node that reaches this coordinator counts as established.

    This holds if the configuration says so (`entry.established`), or for a private run at a private address.

    Args:
        config: configuration of the coordinator.
        address: host:port that nodes dial.
    """
    if config.node.entry.established == "everybody":
        return True
    node = config.node.model_copy(update={"directory": config.directory})
    return node.is_private and is_private_host(address.rpartition(":")[0])


async def run_coordinator(config: CoordinatorConfig) -> None:
    """Runs a coordinator until SIGTERM or Ctrl-C (a second Ctrl-C forces the end); logs its join link.

    Raises:
        ConfigError: the coordinator cannot start with this configuration.
        StorageFull: its state or its manifest cannot be written.
    """

    async def run() -> None:
        async with CoordinatorDaemon(config) as daemon:
            logger.info("others join with: swarm join '%s'", daemon.link)
            logger.info("status page: http://%s/", daemon.info["http_listen"])
            await daemon.run()

    os.umask(0o077)  # whatever this process writes is for this user
    if await run_until_signal(run()):
        logger.info("coordinator stopped")


def read_info(directory: Path) -> JsonDict:
    """Reads `coordinator.json` of the coordinator in a directory. Raises ConfigError if the file does not exist."""
    path = directory / INFO
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no coordinator runs in {directory}: swarm-coordinator start DIR, or --config FILE "
            f"with dir = {str(directory)!r}"
        ) from None


def _take_info(directory: Path) -> JsonDict:
    """Moves `coordinator.json` of the last run aside and returns its contents; {} if there are none."""
    with contextlib.suppress(FileNotFoundError):
        (directory / INFO).replace(directory / "coordinator.last.json")
    try:
        return dict(json.loads((directory / "coordinator.last.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


async def _listen_again(
    listen: str, before: object, sessions: Sessions, register: Sequence[Callable[[grpc.aio.Server], None]]
) -> tuple[SessionServer, int]:
    """Starts the server; returns it and its port. Raises ConfigError.

    Port 0 means the port of the last run, if it is free, because nodes and links still point there.
    """
    host, _, port = listen.rpartition(":")
    if port == "0" and isinstance(before, str) and before.rpartition(":")[0] == host and before != listen:
        with contextlib.suppress(ConfigError):
            return await start_server(before, sessions, register)
    return await start_server(listen, sessions, register)


def _require_recipe(node: NodeConfig) -> None:
    """Checks the recipes of a run, so that a mistake is found here and not at every joining node.

    Raises:
        ConfigError: names the unknown recipe, its unknown constant, or an input that the run does not supply.
    """
    for key in ("recipe", "recipe_without_logprobs", "recipe_text_only"):
        name: str = getattr(node.learner, key)
        if built_in_name(name) is None and (name or key == "recipe"):
            known = ", ".join(list_recipes())
            raise ConfigError(f"node.learner.{key}: no built-in recipe is called {name!a}; known: {known}")
    try:
        recipes_of(node)
    except ImportError as error:  # parts are made of torch, which a coordinator does not need
        logger.info("only the name of the recipe was checked", extra={"reason": str(error)})
    except ConfigError as error:
        raise ConfigError(f"node.{error}") from None


def _require_environments(node: NodeConfig) -> None:
    """Builds every environment of a run, except those that need a file or a package that only nodes may have.

    Raises:
        ConfigError: names an environment that cannot be built.
    """
    needs = {"jsonl", "function", "plugin"}
    if importlib.util.find_spec("reasoning_gym") is None:
        needs.add("reasoning_gym")
    for env in node.environments:
        if not needs & {env.kind, env.inner.kind if env.inner else ""}:
            build_environment(env)


def _tokenizer_digest(config: CoordinatorConfig) -> str:
    """Tokenizer digest of the run's model, hexadecimal; empty if this machine does not have the model."""
    from swarm.model.tokenizer import load_tokenizer

    try:
        return load_tokenizer(config.node.model).digest.hex()
    except (ConfigError, ImportError) as error:
        logger.info("manifest without tokenizer digest", extra={"reason": str(error)})
        return ""
