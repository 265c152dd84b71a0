"""Floods of calls at the coordinator over real connections: an honest node's heartbeat waits for few others.

Each attacker subnet is one address of 127/8, from which a forwarder connects; the honest node is at 127.0.0.1.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.daemon import CoordinatorDaemon
from coordinator.service import STREAMS_PER_CONNECTION
from swarm.config import CoordinatorConfig, DirectoryConfig, EntryConfig, EnvironmentConfig, ModelConfig, NodeConfig
from swarm.errors import SwarmError
from swarm.identity import Identity
from swarm.testing.builders import make_report
from swarm.types import EdgeReport, NodeReport
from swarm.wire import server as wire_server
from swarm.wire.connection_limits import ConnectionLimiter
from swarm.wire.reports import report_to_heartbeat
from swarm.wire.request_deadline import RequestDeadline
from swarm.wire.session import AuthenticatedChannel, open_channel
from swarm.wire.v1.coordinator_service_pb2_grpc import CoordinatorServiceStub
from tests.attacks.call_flood import RawConnection, forwarding
from tests.attacks.connection_flood import loopback_addresses

NUM_SUBNETS = 4
KEYS_PER_SUBNET = 3
CALLS_AT_ONCE = 16  # of one key
NODE = NodeConfig(
    environments=(EnvironmentConfig(name="echo", kind="char", dataset="reverse"),), model=ModelConfig(source="tiny")
)


def heaviest_report(identity: Identity) -> NodeReport:
    """64 sources that nobody ever heard of."""
    edges = tuple(
        EdgeReport(
            source=f"{identity.node_id[:60]}{number:04x}",
            num_groups=5,
            age_mean_steps=1.0,
            ess_share=0.5,
            mismatch_kl=0.01,
            reward_mean=0.5,
        )
        for number in range(64)
    )
    return make_report(identity.node_id, name="eve", edges=edges)


async def flood(channel: AuthenticatedChannel, identity: Identity) -> None:
    """One call after the other until cancelled, whatever the answer."""
    stub: Any = CoordinatorServiceStub(channel.channel)
    request = report_to_heartbeat(heaviest_report(identity))
    while True:
        with suppress(grpc.RpcError, SwarmError):
            await stub.Heartbeat(request, metadata=await channel.metadata(5.0), timeout=10.0)
        await asyncio.sleep(0.001)


@asynccontextmanager
async def attacking(
    daemon: CoordinatorDaemon, num_subnets: int = NUM_SUBNETS, num_keys: int = KEYS_PER_SUBNET
) -> AsyncGenerator[None]:
    """Free keys of some subnets call as fast as they are answered, each many calls at once."""
    async with AsyncExitStack() as stack:
        floods: list[asyncio.Task[None]] = []
        for source in loopback_addresses(num_subnets):
            endpoint = await stack.enter_async_context(forwarding(source, daemon.info["listen"]))
            for _ in range(num_keys):
                key = Identity.create()
                channel = await open_channel(endpoint, daemon.info["fingerprint"], key, "test", 10.0)
                stack.push_async_callback(channel.close)
                floods += [asyncio.ensure_future(flood(channel, key)) for _ in range(CALLS_AT_ONCE)]
        try:
            yield
        finally:
            for task in floods:
                task.cancel()
            await asyncio.gather(*floods, return_exceptions=True)


async def beat(channel: AuthenticatedChannel, identity: Identity) -> None:
    stub: Any = CoordinatorServiceStub(channel.channel)
    request = report_to_heartbeat(heaviest_report(identity))
    await stub.Heartbeat(request, metadata=await channel.metadata(5.0), timeout=20.0)


async def beat_or_not(channel: AuthenticatedChannel, identity: Identity) -> bool:
    """True if the server took a heartbeat; False where it takes no call of anybody."""
    try:
        await beat(channel, identity)
    except grpc.aio.AioRpcError as error:
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        return False
    return True


def config_at(path: Path, *members: Identity) -> CoordinatorConfig:
    """A private run, or one that lists members."""
    listed = EntryConfig(established="members", members=tuple(member.node_id for member in members))
    node = NODE.model_copy(update={"entry": listed}) if members else NODE
    values = {"dir": path, "run_id": "test", "directory": DirectoryConfig(kind="none"), "node": node}
    return CoordinatorConfig.model_validate(values)


async def test_an_honest_heartbeat_waits_for_few_others_under_a_flood_of_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.service.CALLS_PER_S", 1000.0)  # so few keys stand for many
    monkeypatch.setattr("coordinator.service.HEARTBEATS_BURST", 100_000.0)
    monkeypatch.setattr("coordinator.service.CALLS_BURST", 100_000.0)
    monkeypatch.setattr("coordinator.service.SUBNET_CALLS_BURST", 100_000.0)
    async with CoordinatorDaemon(config_at(tmp_path)) as daemon, attacking(daemon):
        honest = Identity.create()
        channel = await open_channel(daemon.info["listen"], daemon.info["fingerprint"], honest, "test", 10.0)
        while daemon.core.num_heartbeats < 200:  # noqa: ASYNC110 - the flood raises it
            await asyncio.sleep(0.01)
        waited_for: list[int] = []
        for _ in range(9):
            before = daemon.core.num_heartbeats
            await beat(channel, honest)
            waited_for.append(daemon.core.num_heartbeats - before)
        await channel.close()
    # One that runs, one of each subnet, and some that came while the request was on its way.
    assert sorted(waited_for)[4] <= 3 * NUM_SUBNETS, waited_for


async def test_a_listed_node_waits_for_few_strangers_however_many_subnets_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.service.HEARTBEATS_BURST", 100_000.0)  # so one key stands for many
    honest = Identity.create()
    async with CoordinatorDaemon(config_at(tmp_path, honest)) as daemon, attacking(daemon, 24, 1):
        channel = await open_channel(daemon.info["listen"], daemon.info["fingerprint"], honest, "test", 10.0)
        while daemon.core.num_heartbeats < 200:  # noqa: ASYNC110 - the flood raises it
            await asyncio.sleep(0.01)
        waited_for: list[int] = []
        for _ in range(9):
            before = daemon.core.num_heartbeats
            await beat(channel, honest)
            waited_for.append(daemon.core.num_heartbeats - before - 1)
        await channel.close()
    # Those that were answered while the report and its answer were on their way, through the loop of the attackers too.
    assert sorted(waited_for)[4] <= 8, waited_for


async def test_connections_without_a_key_do_not_fill_the_calls_that_the_server_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_held = 64 * STREAMS_PER_CONNECTION
    waiting = RequestDeadline(timeout_s=60.0)  # so that the calls stay for as long as this test looks
    monkeypatch.setattr(wire_server, "RequestDeadline", lambda _: waiting)
    monkeypatch.setattr("coordinator.service.HEARTBEATS_BURST", 1000.0)
    monkeypatch.setattr(ConnectionLimiter, "look", lambda self: 0)  # nor is an attacker cut meanwhile
    honest = Identity.create()
    async with CoordinatorDaemon(config_at(tmp_path)) as daemon, AsyncExitStack() as stack:
        channel = await open_channel(daemon.info["listen"], daemon.info["fingerprint"], honest, "test", 10.0)
        stack.push_async_callback(channel.close)
        await beat(channel, honest)
        for source in loopback_addresses(256):  # as many as it takes: gRPC also counts what it just refused
            if len(waiting._waiting) >= num_held:
                break
            connection = await RawConnection.open(daemon.info["listen"], source)
            await stack.enter_async_context(connection)
            await connection.begin_calls("/swarm.wire.v1.CoordinatorService/Heartbeat")
            await beat_or_not(channel, honest)  # behind those calls
        assert len(waiting._waiting) >= num_held
        assert all([await beat_or_not(channel, honest) for _ in range(5)])
