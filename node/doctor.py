"""`swarm doctor`: what on this machine would keep a node from working, each finding with its fix.

Invariant: changes nothing (a port is opened for the moment of one check), and every check is bounded in time.
"""

import asyncio
import importlib.metadata
import importlib.util
import secrets
import shutil
import socket
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from swarm.addresses import endpoint_of
from swarm.clock import SystemClock
from swarm.config import NodeConfig, load_config
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.errors import ConfigError, Unavailable
from swarm.exchange.staleness import CLOCK_SKEW_S
from swarm.identity import Identity
from swarm.process import is_running
from swarm.types import JsonDict

MIN_FREE_DISK_BYTES = 2 * 2**30
CLOCK_YEARS = (2025, 2100)
DIAL_TIMEOUT_S = 3.0
MODEL_BYTES = {"smollm2": 6 * 2**30, "tiny": 600 * 2**20}  # peak memory of a training node, measured


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check and its outcome."""

    name: str
    is_ok: bool
    detail: str
    fix: str = ""
    is_fatal: bool = False

    def as_dict(self) -> JsonDict:
        """For --json."""
        return asdict(self)


async def examine(config_path: Path | None) -> list[Finding]:
    """Runs every check. Raises ConfigError when the configuration itself cannot be read."""
    config = load_config(NodeConfig, config_path)
    return [
        _python(),
        *_packages(config),
        _disk(config),
        _memory(config),
        *_ports(config),
        await _clock(config),
        await _sandbox(config),
        *[
            await _reachable("coordinator.address", address)
            for address in config.coordinator.address.split(",")
            if address
        ],
        *[await _reachable("directory.bootstrap", endpoint_of(maddr)) for maddr in config.directory.bootstrap],
        *await _announced(config),
    ]


def _python() -> Finding:
    is_ok = (3, 11) <= sys.version_info[:2] <= (3, 13)
    return Finding(
        name="python",
        is_ok=is_ok,
        detail=sys.version.split()[0],
        fix="use Python 3.11, 3.12 or 3.13 (hivemind needs pydantic.v1)",
        is_fatal=not is_ok,
    )


def _packages(config: NodeConfig) -> list[Finding]:
    needed = {"torch": "learn", "transformers": "learn"}
    if config.directory.kind == "dht":
        needed["hivemind"] = "dht"
    found: list[Finding] = []
    for package, extra in needed.items():
        is_ok = importlib.util.find_spec(package) is not None
        detail = importlib.metadata.version(package) if is_ok else "not installed"
        found.append(
            Finding(
                name=package,
                is_ok=is_ok,
                detail=detail,
                fix=f"pip install 'swarm-trainer[{extra}]'",
                is_fatal=not is_ok,
            )
        )
    return found


def _disk(config: NodeConfig) -> Finding:
    place = next(path for path in (config.dir.absolute(), *config.dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    needed = max(MIN_FREE_DISK_BYTES, config.exchange.store_bytes)
    return Finding(
        name="disk",
        is_ok=free >= needed,
        detail=f"{free / 2**30:.1f} GiB free at {place}, the store may use {config.exchange.store_bytes / 2**30:.1f}",
        fix="free some space, or lower exchange.store_bytes",
    )


def _memory(config: NodeConfig) -> Finding:
    available = psutil.virtual_memory().available
    needed = MODEL_BYTES.get(config.model.source)
    detail = f"{available / 2**30:.1f} GiB available"
    if needed is None:
        return Finding(name="memory", is_ok=True, detail=f"{detail}; the need of {config.model.source} is not known")
    return Finding(
        name="memory",
        is_ok=available >= needed,
        detail=f"{detail}, {config.model.source} needs about {needed / 2**30:.1f}",
        fix="close other programs, set model.lora_rank, or take a smaller model",
    )


def _ports(config: NodeConfig) -> list[Finding]:
    """Whether the node can listen wherever its configuration says."""
    listened = [("exchange.listen", config.exchange.listen)]
    if config.directory.kind == "dht":
        listened.append(("directory.listen", endpoint_of(config.directory.listen)))
    if config.telemetry.metrics_listen:
        listened.append(("telemetry.metrics_listen", config.telemetry.metrics_listen))
    if is_running(config.dir):
        return [Finding(name=k, is_ok=True, detail=f"{listen}: a node runs in {config.dir}") for k, listen in listened]
    return [_port(key, listen) for key, listen in listened]


def _port(key: str, listen: str) -> Finding:
    host, _, port = listen.rpartition(":")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), int(port)))
    except (OSError, ValueError) as error:
        return Finding(
            name=key, is_ok=False, detail=f"{listen}: {error}", fix=f"choose a free host:port for {key}", is_fatal=True
        )
    return Finding(name=key, is_ok=True, detail=f"{listen} can be bound")


async def _clock(config: NodeConfig) -> Finding:
    seen_s, reason = None, "no coordinator is configured"
    if config.coordinator.address:
        try:
            seen_s, reason = await _last_seen_s(config), "no node is there to compare with"
        except Unavailable as error:
            reason = f"coordinator.address: {error}"
    now_s = SystemClock().now_s()
    now = datetime.fromtimestamp(now_s, UTC)
    is_ok = CLOCK_YEARS[0] <= now.year < CLOCK_YEARS[1]
    detail = f"not compared: {reason}"
    if seen_s is not None:
        ahead_s = now_s - seen_s
        is_ok = abs(ahead_s) <= CLOCK_SKEW_S
        detail = "as the coordinator's" if is_ok else f"{ahead_s:+.0f} s from the coordinator's"
    return Finding(
        name="clock",
        is_ok=is_ok,
        detail=f"{now.isoformat(timespec='seconds')}, {detail}",
        fix=f"set the clock (run NTP): adverts and groups carry times, and peers refuse skew over {CLOCK_SKEW_S:.0f} s",
        is_fatal=True,
    )


async def _last_seen_s(config: NodeConfig) -> float | None:
    """When the coordinator last heard of a node that is there, by its own clock: less than a lease ago.

    Raises:
        Unavailable: the coordinator does not answer.
    """
    # gRPC is imported where a call is made, so that the commands start without it
    from swarm.wire.grpc_errors import calling
    from swarm.wire.session import open_channel
    from swarm.wire.v1 import coordinator_service_pb2 as pb
    from swarm.wire.v1 import coordinator_service_pb2_grpc as pb_grpc

    address, fingerprint = config.coordinator.address.split(",")[0].strip(), config.coordinator.fingerprint
    channel = await open_channel(address, fingerprint, Identity.create(), config.run_id, DIAL_TIMEOUT_S)
    try:
        stub: Any = pb_grpc.CoordinatorServiceStub(channel.channel)
        metadata = await channel.metadata(DIAL_TIMEOUT_S)
        with calling("members"):
            answer = await stub.ListMembers(pb.ListMembersRequest(), timeout=DIAL_TIMEOUT_S, metadata=metadata)
    finally:
        await channel.close()
    return max((member.last_seen_s for member in answer.members if member.is_live), default=None)


async def _sandbox(config: NodeConfig) -> Finding:
    verifier = SandboxVerifier(config.environments, config.sandbox)
    try:
        limits = await verifier.limits_in_force()
    finally:
        await verifier.close()
    missing = sorted(name for name, holds in limits.items() if not holds)
    return Finding(
        name="sandbox",
        is_ok=not missing,
        detail=f"in force: {', '.join(sorted(n for n, h in limits.items() if h))}"
        + (f"; not: {', '.join(missing)}" if missing else ""),
        fix="no_network: allow unprivileged user namespaces; file_reads: a kernel from 5.13 on with landlock among its "
        "lsm=; else run the node as a user or in a container that holds nothing to read",
    )


async def _reachable(key: str, address: str) -> Finding:
    host, _, port = address.rpartition(":")
    try:
        if not port.isdigit():
            raise ConfigError(f"{address!r} is not host:port")
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()
    except (OSError, TimeoutError, ConfigError) as error:
        return Finding(
            name=key,
            is_ok=False,
            detail=f"{address}: {error or 'no answer'}",
            fix="check address, firewall and that it runs",
        )
    return Finding(name=key, is_ok=True, detail=f"{address} answers")


async def _announced(config: NodeConfig) -> list[Finding]:
    """Whether what others are told to dial leads to this machine."""
    told: list[tuple[str, str, str]] = []  # key, where we listen, what others dial
    if config.exchange.advertise:
        told.append(("exchange.advertise", config.exchange.listen, config.exchange.advertise))
    if config.directory.kind == "dht":
        listen = endpoint_of(config.directory.listen)
        told += [("directory.announce", listen, endpoint_of(maddr)) for maddr in config.directory.announce]
    if is_running(config.dir):
        return [await _reachable(key, address) for key, _, address in told]
    return [await _leads_here(key, listen, address) for key, listen, address in told]


async def _leads_here(key: str, listen: str, address: str) -> Finding:
    """Listens for a moment where the node will, dials what others will, and compares what arrives."""
    port = listen.rpartition(":")[2]
    if address.endswith(":0"):
        return Finding(name=key, is_ok=True, detail=f"{address}: the port is known once the node listens")
    if port == "0":
        return Finding(
            name=key,
            is_ok=False,
            detail=f"others dial {address}, but the node listens on another port after each start",
            fix=f"set a fixed port in {key.split('.')[0]}.listen and forward to that one",
        )
    word = secrets.token_bytes(16)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(word)
        writer.close()

    heard, problem = b"", f"nothing answers within {DIAL_TIMEOUT_S:.0f} s"
    try:
        async with await asyncio.start_server(answer, listen.rpartition(":")[0].strip("[]") or None, int(port)):
            heard = await _hear(address, len(word))
    except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
        problem = str(error) or problem
    if heard == word:
        return Finding(name=key, is_ok=True, detail=f"{address} leads to this machine")
    return Finding(
        name=key,
        is_ok=False,
        detail=f"{address}: {'something else answers there' if heard else problem}",
        fix=f"forward that port (TCP) to port {port} of this machine; some routers can only be tried from outside",
    )


async def _hear(address: str, size: int) -> bytes:
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(DIAL_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        try:
            return await reader.readexactly(size)
        finally:
            writer.close()
