"""`swarm doctor`: checks of this machine for faults that would keep a node from working, each with its fix.

Invariant: changes nothing (a port is opened for the moment of one check), and every check is bounded in time.
"""

import asyncio
import importlib.metadata
import importlib.util
import platform
import secrets
import shutil
import socket
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from node.device_checks import (
    Finding,
    check_compute_dtype,
    check_engine,
    check_gpu,
    check_memory,
    choice_here,
    look_for_gpu,
)
from node.status import read_status
from swarm.addresses import endpoint_of
from swarm.clock import CLOCK_SKEW_S, SystemClock
from swarm.config import NODE_FILE, NodeConfig, load_config
from swarm.environments.determinism import FIX, LOCAL_KINDS, differences
from swarm.environments.sandbox.confinement_check import refusal
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.environments.soundness import narrow_tokenizer
from swarm.errors import ConfigError, Unavailable
from swarm.identity import Identity
from swarm.process import is_running
from swarm.system_fallbacks import needed_fallbacks
from swarm.trained.own_directories import code_of, code_of_engine, require_trusted
from swarm.types import Role

MIN_FREE_DISK_BYTES = 2 * 2**30
CLOCK_YEARS = (2025, 2100)
DIAL_TIMEOUT_S = 3.0


async def examine(config_path: Path | None, is_trusted: bool = False) -> list[Finding]:
    """Findings of every check. Raises ConfigError if the configuration itself cannot be read.

    Args:
        config_path: node.toml; None for the defaults.
        is_trusted: True: code that the file names is loaded, whoever made its directory.
    """
    config = load_config(NodeConfig, config_path)
    folder = (config_path or config.dir / NODE_FILE).parent
    code, programs = code_of(config.environments), code_of_engine(config)
    untried = await asyncio.to_thread(_untrusted, "environments", folder, code, is_trusted)
    engine_untried = await asyncio.to_thread(_untrusted, "engine", folder, programs, is_trusted)
    if untried:
        config = config.model_copy(update={"environments": ()})
    gpu = None if config.device == "cpu" else await asyncio.to_thread(look_for_gpu, config.device)
    choice = await asyncio.to_thread(choice_here, config, gpu)
    return [
        _check_python(),
        *_check_system(),
        *_check_packages(config),
        _check_disk(config),
        check_gpu(config, gpu),
        *check_compute_dtype(config, gpu, choice),
        *await asyncio.to_thread(check_memory, config, gpu, choice),  # converts SmolLM2 at its first use
        *(engine_untried or await asyncio.to_thread(check_engine, config, gpu)),
        *_check_ports(config),
        await _check_clock(config),
        await _check_sandbox(config),
        *(untried or await _check_environments(config)),
        *[await _check_reachable("coordinator.address", address) for address in config.coordinator.addresses],
        *[await _check_reachable("directory.bootstrap", endpoint_of(maddr)) for maddr in config.directory.bootstrap],
        *await _check_announced(config),
        *_check_effect(config),
    ]


def _untrusted(name: str, folder: Path, code: Mapping[str, str], is_trusted: bool) -> list[Finding]:
    """The finding that a part is not tried, as the folder names code that is not to be run."""
    try:
        require_trusted(folder, code, is_trusted)
    except ConfigError as error:
        return [Finding(name, False, str(error), "swarm doctor --trust", is_fatal=False)]
    return []


def _check_python() -> Finding:
    is_ok = (3, 11) <= sys.version_info[:2] <= (3, 13)
    fix = "use Python 3.11, 3.12 or 3.13 (hivemind needs pydantic.v1)"
    return Finding("python", is_ok, sys.version.split()[0], fix, is_fatal=not is_ok)


def _check_system() -> list[Finding]:
    """Calls that this system lacks, with their replacements; gaps of confinement are a matter of `_check_sandbox`."""
    missing = [
        Finding(each.name, True, f"not on this system, and not needed; {each.instead}") for each in needed_fallbacks()
    ]
    return missing or [Finding("system", True, f"{platform.system()} {platform.release()} has every call")]


def _check_packages(config: NodeConfig) -> list[Finding]:
    needed = {"torch": "learn", "transformers": "learn"}
    if config.directory.kind == "dht":
        needed["hivemind"] = "dht"
    findings: list[Finding] = []
    for package, extra in needed.items():
        is_ok = importlib.util.find_spec(package) is not None
        detail = importlib.metadata.version(package) if is_ok else "not installed"
        fix = f"pip install 'swarm-trainer[{extra}]'"
        findings.append(Finding(package, is_ok, detail, fix, is_fatal=not is_ok))
    return findings


def _check_disk(config: NodeConfig) -> Finding:
    folder = next(path for path in (config.dir.absolute(), *config.dir.absolute().parents) if path.exists())
    free, store = shutil.disk_usage(folder).free, config.exchange.store_bytes
    detail = f"{free / 2**30:.1f} GiB free at {folder}, the store may use {store / 2**30:.1f}"
    fix = "free some space, or lower exchange.store_bytes"
    return Finding("disk", free >= max(MIN_FREE_DISK_BYTES, store), detail, fix)


def _check_effect(config: NodeConfig) -> list[Finding]:
    """Checks that a trainer evaluates now and then, to see the effect of other nodes' groups on held-out accuracy."""
    if Role.TRAINER not in config.roles or not config.replay.external_groups or not config.guard.enabled:
        return []
    every = config.evaluation.every_steps
    detail = f"evaluated every {every} steps" if every else "not measured between the first step and the last"
    fix = "set evaluation.every_steps, such as 50: where accuracy falls, groups of other nodes are set aside"
    return [Finding("held-out effect", every > 0, detail, fix)]


def _check_ports(config: NodeConfig) -> list[Finding]:
    """Findings on the addresses that the node is to listen on."""
    listened = [("exchange.listen", config.exchange.listen)]
    if config.directory.kind == "dht":
        listened.append(("directory.listen", endpoint_of(config.directory.listen)))
    if config.telemetry.metrics_listen:
        listened.append(("telemetry.metrics_listen", config.telemetry.metrics_listen))
    if is_running(config.dir):
        return [Finding(key, True, f"{listen}: a node runs in {config.dir}") for key, listen in listened]
    return [_check_port(key, listen) for key, listen in listened]


def _check_port(key: str, listen: str) -> Finding:
    host, _, port = listen.rpartition(":")
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host.strip("[]"), int(port)))
    except (OSError, ValueError) as error:
        return Finding(key, False, f"{listen}: {error}", f"choose a free host:port for {key}", is_fatal=True)
    return Finding(key, True, f"{listen} can be bound")


async def _check_clock(config: NodeConfig) -> Finding:
    other_s, reason = None, "no coordinator is configured"
    if config.coordinator.addresses:
        try:
            other_s, reason = await _coordinator_time_s(config), "the coordinator tells no time"
        except Unavailable as error:
            reason = f"coordinator.address: {error}"
    now_s = SystemClock().now_s()
    now = datetime.fromtimestamp(now_s, UTC)
    is_ok = CLOCK_YEARS[0] <= now.year < CLOCK_YEARS[1]
    detail = f"not compared: {reason}"
    if other_s:
        ahead_s = now_s - other_s
        is_ok = abs(ahead_s) <= CLOCK_SKEW_S
        detail = "as the coordinator's" if is_ok else f"{ahead_s:+.0f} s from the coordinator's"
    found = _found_by_running_node(config)
    detail = f"{now.isoformat(timespec='seconds')}, {detail}{'; ' if found else ''}{found}"
    fix = f"set the clock (run NTP): adverts and groups carry times, and peers refuse skew over {CLOCK_SKEW_S:.0f} s"
    return Finding("clock", is_ok and not found, detail, fix, is_fatal=not is_ok)


def _found_by_running_node(config: NodeConfig) -> str:
    """The clock problem that the node running in this directory found by its peers' clocks; "" if there is none."""
    if not is_running(config.dir):
        return ""
    try:
        return str(read_status(config.dir).get("clock", ""))
    except (ConfigError, Unavailable):
        return ""


async def _coordinator_time_s(config: NodeConfig) -> float | None:
    """The coordinator's wall clock; None if its release does not send it.

    Raises:
        Unavailable: the coordinator does not answer.
    """
    # gRPC is imported where a call is made, so that the commands start without it
    from node.credential import read_credential
    from swarm.wire.held_manifest import load_held, with_held
    from swarm.wire.session import open_channel

    config = with_held(config, load_held(config.dir, config.run_id))
    address, fingerprint = config.coordinator.addresses[0], config.coordinator.fingerprint
    key = config.dir / "identity.key"  # of the node: a run that does not admit everybody does not admit a new key
    identity = Identity.load(key) if key.exists() else Identity.create()
    shown = read_credential(config, identity.node_id).to_bytes()
    noted: list[float] = []
    channel = await open_channel(
        address,
        fingerprint,
        identity,
        config.run_id,
        DIAL_TIMEOUT_S,
        credential=lambda: shown,
        note_clock=lambda _, now_s, at_s: noted.append(now_s),
    )
    await channel.close()
    return noted[-1] or None


async def _check_sandbox(config: NodeConfig) -> Finding:
    verifier = SandboxVerifier(config.environments, config.sandbox)
    try:
        limits = await verifier.limits_in_force()
    finally:
        await verifier.close()
    missing = sorted(name for name, holds in limits.items() if not holds)
    refused = refusal(config, limits)
    detail = f"in force: {', '.join(sorted(limits.keys() - missing))}"
    detail += f"; not: {', '.join(missing)}" if missing else ""
    detail += f"; the node does not start: {refused}" if refused else ""
    fix = (
        "other_files_hidden: allow unprivileged user namespaces; file_reads: a kernel from 5.13 on with landlock "
        "among its lsm=; network, processes: Linux on x86-64 or arm64 with seccomp; else run the node as a user or in "
        "a container that holds nothing to read"
    )
    return Finding("sandbox", not missing, detail, fix, is_fatal=bool(refused))


async def _check_environments(config: NodeConfig) -> list[Finding]:
    """Finding on each environment's exchange, and on differences that keep other nodes from replaying episodes."""
    own = {each.name for each in config.environments if each.exchange == "own"}
    try:
        found = await differences(config.environments, config.sandbox, narrow_tokenizer(config.model))
    except ConfigError as error:
        fix = 'docs/environments.md, "Writing one", says what an environment may do'
        return [Finding("environments", False, str(error), fix, is_fatal=True)]
    found = {name: what for name, what in found.items() if name not in own}
    details = [f"{each.name} {each.exchange}" for each in config.environments]
    details += [f"{name}: {what}" for name, what in found.items()]
    if not found and any((each.inner or each).kind in LOCAL_KINDS for each in config.environments):
        details.append("episodes of local code are the same in another process")
    return [Finding("environments", not found, "; ".join(details), FIX, is_fatal=not config.is_alone)]


async def _check_reachable(key: str, address: str) -> Finding:
    host, _, port = address.rpartition(":")
    try:
        if not port.isdigit():
            raise ConfigError(f"{address!r} is not host:port")
        async with asyncio.timeout(DIAL_TIMEOUT_S):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        writer.close()
    except (OSError, TimeoutError, ConfigError) as error:
        return Finding(key, False, f"{address}: {error or 'no answer'}", "check address, firewall and that it runs")
    return Finding(key, True, f"{address} answers")


async def _check_announced(config: NodeConfig) -> list[Finding]:
    """Findings on the advertised addresses, which have to lead to this machine."""
    addresses: list[tuple[str, str, str]] = []  # key, where we listen, what others dial
    if config.exchange.advertise:
        addresses.append(("exchange.advertise", config.exchange.listen, config.exchange.advertise))
    if config.directory.kind == "dht":
        listen = endpoint_of(config.directory.listen)
        addresses += [("directory.announce", listen, endpoint_of(maddr)) for maddr in config.directory.announce]
    if is_running(config.dir):
        return [await _check_reachable(key, address) for key, _, address in addresses]
    return [await _check_leads_here(key, listen, address) for key, listen, address in addresses]


async def _check_leads_here(key: str, listen: str, address: str) -> Finding:
    """Listens for a moment on the node's port, dials the advertised address, and compares the bytes that arrive."""
    port = listen.rpartition(":")[2]
    if address.endswith(":0"):
        return Finding(key, True, f"{address}: the port is known once the node listens")
    if port == "0":
        detail = f"others dial {address}, but the node listens on another port after each start"
        return Finding(key, False, detail, f"set a fixed port in {key.split('.')[0]}.listen and forward to that one")
    token = secrets.token_bytes(16)

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(token)
        writer.close()

    received, problem = b"", f"nothing answers within {DIAL_TIMEOUT_S:.0f} s"
    try:
        async with await asyncio.start_server(answer, listen.rpartition(":")[0].strip("[]") or None, int(port)):
            received = await _receive(address, len(token))
    except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError) as error:
        problem = str(error) or problem
    if received == token:
        return Finding(key, True, f"{address} leads to this machine")
    fix = f"forward that port (TCP) to port {port} of this machine; some routers can only be tried from outside"
    return Finding(key, False, f"{address}: {'something else answers there' if received else problem}", fix)


async def _receive(address: str, size: int) -> bytes:
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(DIAL_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        try:
            return await reader.readexactly(size)
        finally:
            writer.close()
