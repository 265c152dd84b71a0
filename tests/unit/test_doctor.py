"""`swarm doctor` tells whether what a node announces leads to it."""

import asyncio
import os
import re
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from waits import HANG_S

from coordinator.daemon import CoordinatorDaemon
from node import doctor
from node.credential import OwnCredential
from node.doctor import Finding, examine
from node.join import listen_towards
from swarm.clock import ManualClock, SystemClock
from swarm.config import (
    CoordinatorConfig,
    DirectoryConfig,
    EntryConfig,
    ModelConfig,
    NodeConfig,
    parse_config,
)
from swarm.peers.entry import EntryRule
from swarm.process import load_or_create_identity, lock_directory


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def findings(tmp_path: Path, text: str) -> dict[str, Finding]:
    path = tmp_path / "node.toml"
    path.write_text(f'dir = "{tmp_path / "node"}"\n{text}')
    return {finding.name: finding for finding in await examine(path)}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    async def sandbox(config: NodeConfig) -> Finding:
        return Finding(name="sandbox", is_ok=True, detail="not looked at here")

    monkeypatch.setattr(doctor, "_check_sandbox", sandbox)
    monkeypatch.setattr(doctor, "choice_here", lambda config, gpu: None)  # a process that imports torch
    monkeypatch.setattr(doctor, "DIAL_TIMEOUT_S", 0.5)


@pytest.fixture
async def forwarded() -> AsyncIterator[tuple[int, int]]:
    """A mapped port and the one that it leads to."""
    inside = free_port()

    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner, inner_writer = await asyncio.open_connection("127.0.0.1", inside)
        writer.write(await inner.read(100))
        inner_writer.close()
        writer.close()

    async with await asyncio.start_server(forward, "127.0.0.1", 0) as server:
        yield int(server.sockets[0].getsockname()[1]), inside


async def test_a_mapped_port_that_leads_here_is_found_to_do_so(tmp_path: Path, forwarded: tuple[int, int]) -> None:
    outside, inside = forwarded
    found = await findings(
        tmp_path,
        f'[exchange]\nlisten = "127.0.0.1:{inside}"\nadvertise = "127.0.0.1:{outside}"\n'
        f'[directory]\nlisten = "/ip4/127.0.0.1/tcp/{inside}"\nannounce = ["/ip4/127.0.0.1/tcp/{outside}"]\n',
    )
    assert found["exchange.advertise"].is_ok, found["exchange.advertise"]
    assert found["directory.announce"].is_ok, found["directory.announce"]


async def test_an_announced_address_where_nobody_or_somebody_else_answers_is_a_finding(tmp_path: Path) -> None:
    async def other_service(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.org\r\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(other_service, "127.0.0.1", 0) as server:
        other = server.sockets[0].getsockname()[1]
        found = await findings(
            tmp_path,
            f'[exchange]\nlisten = "127.0.0.1:{free_port()}"\nadvertise = "127.0.0.1:{other}"\n'
            f'[directory]\nlisten = "/ip4/127.0.0.1/tcp/{free_port()}"\n'
            f'announce = ["/ip4/127.0.0.1/tcp/{free_port()}"]\n',
        )
    assert "something else" in found["exchange.advertise"].detail
    assert not found["directory.announce"].is_ok and "forward" in found["directory.announce"].fix
    assert not found["directory.announce"].is_fatal  # a router may only be tried from outside


async def test_a_port_that_changes_cannot_be_mapped(tmp_path: Path) -> None:
    found = await findings(tmp_path, '[exchange]\nlisten = "127.0.0.1:0"\nadvertise = "127.0.0.1:7700"\n')
    assert not found["exchange.advertise"].is_ok and "exchange.listen" in found["exchange.advertise"].fix


async def test_a_node_that_runs_is_dialled_and_its_port_is_not_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    held = lock_directory(tmp_path / "node")
    async with await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        text = f'[exchange]\nlisten = "127.0.0.1:{port}"\nadvertise = "127.0.0.1:{port}"\n'
        found = await findings(tmp_path, text)
    os.close(held)
    assert found["exchange.listen"].is_ok and found["exchange.advertise"].is_ok


async def test_every_port_that_the_node_listens_on_is_tried_and_named(tmp_path: Path) -> None:
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [int(one.getsockname()[1]) for one in taken]
    text = (
        f'[exchange]\nlisten = "127.0.0.1:{ports[0]}"\n[directory]\nlisten = "/ip4/127.0.0.1/tcp/{ports[1]}"\n'
        f'[telemetry]\nmetrics_listen = "127.0.0.1:{ports[2]}"\n'
    )
    keys = ("exchange.listen", "directory.listen", "telemetry.metrics_listen")
    found = await findings(tmp_path, text)
    for key in keys:
        assert not found[key].is_ok and found[key].is_fatal and key in found[key].fix, key
    for one in taken:
        one.close()
    found = await findings(tmp_path, text)
    assert all(found[key].is_ok for key in keys)


@pytest.fixture
async def coordinator(tmp_path: Path) -> AsyncIterator[CoordinatorDaemon]:
    node = NodeConfig(model=ModelConfig(source="tiny"))
    run = CoordinatorConfig(
        dir=tmp_path / "run", run_id="demo", directory=DirectoryConfig(kind="none"), node=node, lease_s=30.0
    )
    async with CoordinatorDaemon(run) as daemon:
        yield daemon


async def test_the_clock_is_compared_with_the_coordinators(
    tmp_path: Path, coordinator: CoordinatorDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = coordinator.info
    text = (
        f'run_id = "demo"\n[coordinator]\naddress = "{info["listen"]}"\nfingerprint = "{info["fingerprint"]}"\n'
        '[directory]\nkind = "none"\n'
    )
    clock = (await findings(tmp_path, text))["clock"]
    assert clock.is_ok and "not compared" not in clock.detail
    for skew_s in (-200.0, 200.0):
        monkeypatch.setattr(doctor, "SystemClock", lambda skew_s=skew_s: ManualClock(time.time() + skew_s))
        clock = (await findings(tmp_path, text))["clock"]
        assert not clock.is_ok and clock.is_fatal, clock
        assert re.search(r"[+-](19\d|20\d) s from the coordinator's", clock.detail), clock


async def test_a_clock_that_cannot_be_compared_is_said_to_be_that(tmp_path: Path) -> None:
    clock = (await findings(tmp_path, ""))["clock"]
    assert clock.is_ok and "not compared: no coordinator is configured" in clock.detail
    text = f'[coordinator]\naddress = "127.0.0.1:{free_port()}"\nfingerprint = "{"ab" * 32}"\n'
    clock = (await findings(tmp_path, text))["clock"]
    assert clock.is_ok and "not compared" in clock.detail


@pytest.mark.parametrize(
    ("own", "listen", "advertise", "directory"),
    [
        ("10.1.2.3", "0.0.0.0:0", "10.1.2.3:0", "/ip4/0.0.0.0/tcp/0"),
        ("[2001:db8::1]", "[::]:0", "[2001:db8::1]:0", "/ip6/::/tcp/0"),
    ],
)
def test_a_node_that_joins_over_a_network_can_be_dialled_there(
    own: str, listen: str, advertise: str, directory: str
) -> None:
    data: dict[str, Any] = {"exchange": {"max_group_bytes": 4096}, "directory": {"kind": "dht"}}
    assert own in listen_towards(data, own)
    config = parse_config(NodeConfig, data, "test")
    assert (config.exchange.listen, config.exchange.advertise) == (listen, advertise)
    assert config.directory.listen == directory and config.exchange.max_group_bytes == 4096


def test_a_node_that_joins_on_the_coordinators_machine_stays_on_it() -> None:
    data: dict[str, Any] = {"exchange": {}, "directory": {}}
    assert "on this machine" in listen_towards(data, "127.0.0.1")
    assert data == {"exchange": {}, "directory": {}}


async def test_a_node_of_a_run_that_asks_for_work_shows_the_proof_in_its_directory(tmp_path: Path) -> None:
    entry = EntryConfig(kind="work", work_bits=3)
    node = NodeConfig(dir=tmp_path / "node", run_id="demo", model=ModelConfig(source="tiny"), entry=entry)
    run = CoordinatorConfig(dir=tmp_path / "run", run_id="demo", directory=DirectoryConfig(kind="none"), node=node)
    node_id = load_or_create_identity(node.dir / "identity.key").node_id
    async with CoordinatorDaemon(run) as daemon:
        info = daemon.info
        text = (
            f'run_id = "demo"\n[coordinator]\naddress = "{info["listen"]}"\nfingerprint = "{info["fingerprint"]}"\n'
            '[directory]\nkind = "none"\n[entry]\nkind = "work"\nwork_bits = 3\n'
        )
        assert "asks for a proof of work" in (await findings(tmp_path, text))["clock"].detail
        rule = EntryRule(entry, "demo", SystemClock(), info["fingerprint"])
        await OwnCredential(node, node_id, rule, SystemClock()).prepare()
        assert "as the coordinator's" in (await findings(tmp_path, text))["clock"].detail


async def test_others_go_on_while_a_model_is_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()

    def convert(config: NodeConfig, gpu: object, choice: object) -> list[Finding]:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0.0), loop).result(HANG_S)
        return []

    monkeypatch.setattr(doctor, "check_memory", convert)
    await findings(tmp_path, "")
