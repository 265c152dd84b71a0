"""A node whose clock is wrong learns it from those that it dials, over real sockets, and its owner is told."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from waits import until

from coordinator.daemon import CoordinatorDaemon
from node.daemon import Daemon, write_config
from node.doctor import examine
from node.status import read_status, status_rows
from swarm.clock import SystemClock
from swarm.config import (
    CoordinatorConfig,
    CoordinatorLink,
    DirectoryConfig,
    EnvironmentConfig,
    ExchangeConfig,
    ModelConfig,
    NodeConfig,
)
from swarm.errors import Unavailable
from swarm.exchange.grpc_transport import GrpcTransport, PeerHooks
from swarm.identity import Identity
from swarm.interfaces import PeerAddress
from swarm.peers.parties import Parties
from swarm.peers.peer_clocks import PeerClocks
from swarm.testing.builders import HoldsNothing

OFF_S = 250.0


class SkewedClock(SystemClock):
    """That of a machine whose clock is wrong."""

    def __init__(self, skew_s: float) -> None:
        self._skew_s = skew_s

    def now_s(self) -> float:
        return super().now_s() + self._skew_s


class Peer(HoldsNothing):
    """A server that tells its own clock at Hello."""

    def __init__(self, skew_s: float) -> None:
        self.identity = Identity.create()
        config = ExchangeConfig(listen="127.0.0.1:0")
        self.transport = GrpcTransport(self.identity, "demo", config, SkewedClock(skew_s))


async def finding_of(own_skew_s: float, peer_skews_s: list[float]) -> str:
    """The finding on its clock of a node that dialled peers with these clocks."""
    clock = SkewedClock(own_skew_s)
    clocks = PeerClocks(clock, Parties())
    hooks = PeerHooks(note_clock=clocks.note)
    own = GrpcTransport(Identity.create(), "demo", ExchangeConfig(listen="127.0.0.1:0"), clock, hooks=hooks)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(own.stop)
        for skew_s in peer_skews_s:
            peer = Peer(skew_s)
            (endpoint,) = await peer.transport.serve(peer)
            stack.push_async_callback(peer.transport.stop)
            await own.connect(PeerAddress(node_id=peer.identity.node_id, endpoint=endpoint), timeout_s=10.0)
        return clocks.finding()


async def test_a_node_whose_clock_is_wrong_is_told_and_two_liars_of_five_hide_nothing() -> None:
    assert "250 s ahead" in await finding_of(OFF_S, [0.0, 0.0, 0.0, OFF_S, OFF_S])


async def test_two_liars_of_five_scare_nobody() -> None:
    assert await finding_of(0.0, [0.0, 0.0, 0.0, 9000.0, 9000.0]) == ""


async def test_log_status_and_doctor_name_offset_bound_and_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("node.daemon_loops.PROGRESS_EVERY_S", 0.1)
    monkeypatch.setattr(Daemon, "_run_worker", lambda _: asyncio.Event().wait())  # its model takes long to load
    caplog.set_level("INFO")
    config = NodeConfig(
        dir=tmp_path / "node",
        run_id="test",
        worker="inline",
        environments=(EnvironmentConfig(name="reverse", kind="char", dataset="reverse"),),
        model=ModelConfig(source="tiny", dtype="float32"),
        exchange=ExchangeConfig(listen="127.0.0.1:0"),
        directory=DirectoryConfig(kind="none"),
    )
    run = CoordinatorConfig(dir=tmp_path / "run", run_id="test", directory=DirectoryConfig(kind="none"), node=config)
    async with CoordinatorDaemon(run) as coordinator:
        fingerprint = coordinator.info["fingerprint"]
        link = CoordinatorLink(address=coordinator.info["listen"], fingerprint=fingerprint, heartbeat_s=0.1)
        config = config.model_copy(update={"coordinator": link})
        daemon = Daemon(config)
        daemon.clock = SkewedClock(OFF_S)
        async with daemon:
            running = asyncio.create_task(daemon.run())
            try:
                await until(lambda: len(coordinator.core.live_members()) == 1)
                since_s, num_logged = daemon.clock.now_s(), len(caplog.records)
                await until(lambda: any(record.message == "progress" for record in caplog.records[num_logged:]))
                await until(lambda: status_at_s(config) > since_s)
                rows = dict(status_rows(read_status(config.dir)))
                write_config(config, tmp_path / "node.toml")
                (found,) = [finding for finding in await examine(tmp_path / "node.toml") if finding.name == "clock"]
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
    logged = [record.message for record in caplog.records if "this node's clock" in record.message]
    assert logged and "clock" in rows and not found.is_ok
    for text in (logged[-1], rows["clock"], found.detail):
        assert "250 s ahead" in text and "1 of the 1" in text and "120 s" in text and "NTP" in text


def status_at_s(config: NodeConfig) -> float:
    """When the status was written, by the node's clock; 0 before the first."""
    try:
        return float(read_status(config.dir)["at_s"])
    except Unavailable:
        return 0.0
