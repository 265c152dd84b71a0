"""Watching versions over real gRPC: beside heartbeats, through restarts, against slow and greedy readers."""

import asyncio
import hashlib
import logging
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from waits import PROMPT_S, until

from coordinator.core import CoordinatorCore
from coordinator.daemon import CoordinatorDaemon
from coordinator.head_watches import WATCHES_PER_NODE
from coordinator.service import CoordinatorServicer
from swarm.clock import SystemClock
from swarm.config import CoordinatorConfig, CoordinatorLink, DirectoryConfig, ModelConfig, NodeConfig
from swarm.errors import Unavailable
from swarm.identity import Identity
from swarm.peers.coordinator_client import FIRST_BACKOFF_S, GrpcCoordinatorClient
from swarm.testing.builders import make_report
from swarm.types import NodeReport, PolicyVersion
from swarm.wire.server import Sessions, SessionServer, start_server
from swarm.wire.session import CERTIFICATE_NAME, AuthenticatedChannel, fetch_certificate
from swarm.wire.v1 import coordinator_service_pb2 as pb
from swarm.wire.v1 import policy_pb2
from swarm.wire.v1.coordinator_service_pb2_grpc import (
    CoordinatorServiceServicer,
    CoordinatorServiceStub,
    add_CoordinatorServiceServicer_to_server,
)

RUN = "test"


def config_in(directory: Path, **changes: object) -> CoordinatorConfig:
    node = NodeConfig(model=ModelConfig(source="tiny"))
    values = {"dir": directory, "run_id": RUN, "directory": DirectoryConfig(kind="none"), "node": node, **changes}
    return CoordinatorConfig.model_validate(values)


def v(identity: Identity, step: int, byte: int = 1) -> PolicyVersion:
    return PolicyVersion(policy_id=identity.node_id, step=step, digest=bytes([byte]) * 32)


def report_of(identity: Identity) -> NodeReport:
    return make_report(identity.node_id)


def client_at(listen: str, fingerprint: str, identity: Identity) -> GrpcCoordinatorClient:
    return GrpcCoordinatorClient(CoordinatorLink(address=listen, fingerprint=fingerprint), identity, RUN, timeout_s=4.0)


def client_of(daemon: CoordinatorDaemon, identity: Identity) -> GrpcCoordinatorClient:
    return client_at(daemon.info["listen"], daemon.info["fingerprint"], identity)


async def watch_until(client: GrpcCoordinatorClient, policy_id: str, last: PolicyVersion) -> list[PolicyVersion]:
    """Every head that comes up to `last`, over as many watches as it takes."""
    seen: list[PolicyVersion] = []
    while True:
        try:
            async with aclosing(client.watch_versions(policy_id)) as heads:  # type: ignore[type-var]
                async for head in heads:
                    seen.append(head)
                    if head == last:
                        return seen
        except Unavailable:
            continue  # the client itself waits out its pause


async def test_watch_gives_the_head_and_each_new_one_while_calls_go_on_beside_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ada, bob = Identity.create(), Identity.create()
    async with CoordinatorDaemon(config_in(tmp_path)) as daemon:
        owner, watcher = client_of(daemon, ada), client_of(daemon, bob)
        await owner.record_versions([v(ada, 0)])
        heads = watcher.watch_versions(ada.node_id)
        assert await anext(heads) == v(ada, 0)
        coming = asyncio.ensure_future(anext(heads))
        for _ in range(3):
            await watcher.heartbeat(report_of(bob))  # an open watch holds no call back
        assert not coming.done() and watcher.is_connected
        await owner.record_versions([v(ada, 1)])
        assert await coming == v(ada, 1)
        for _ in range(2):
            await owner.record_versions([v(ada, 1, 9)])  # a fork: refused
        (warned,) = [each for each in caplog.records if "does another process run with this node's key" in each.message]
        assert warned.levelno == logging.WARNING and "delete identity.key in the copy" in vars(warned)["fix"]
        await owner.record_versions([v(ada, 0)])  # a rewind
        await owner.record_versions([v(ada, 1, 2)])
        assert await anext(heads) == v(ada, 1, 2)
        await heads.aclose()  # type: ignore[attr-defined]
        await until(lambda: daemon.core.watches.num_open == 0, most_s=PROMPT_S)
        await asyncio.gather(owner.close(), watcher.close())


async def test_broken_calls_leave_a_watch_alone_and_a_broken_watch_the_calls(tmp_path: Path) -> None:
    ada, bob = Identity.create(), Identity.create()
    async with CoordinatorDaemon(config_in(tmp_path)) as daemon:
        owner, watcher = client_of(daemon, ada), client_of(daemon, bob)
        await owner.record_versions([v(ada, 0)])
        heads = watcher.watch_versions(ada.node_id)
        await anext(heads)
        await watcher.heartbeat(report_of(bob))
        assert watcher._channel is not None
        await watcher._channel.close()  # what a broken connection of calls looks like
        with pytest.raises(Unavailable):
            await watcher.heartbeat(report_of(bob))
        await owner.record_versions([v(ada, 1)])
        assert await anext(heads) == v(ada, 1)
        await watcher.heartbeat(report_of(bob))
        (watched,) = watcher._watched
        coming = asyncio.ensure_future(anext(heads))
        await asyncio.sleep(0)
        await watched.close()
        with pytest.raises(Unavailable):
            await coming
        assert watcher.is_connected and not watcher._watched
        await watcher.heartbeat(report_of(bob))
        await asyncio.gather(owner.close(), watcher.close())


async def test_watch_ends_when_the_coordinator_stops_and_begins_again_with_what_it_had_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.daemon.STOP_GRACE_S", 1e6)  # an open watch does not use it up
    ada, bob = Identity.create(), Identity.create()
    async with CoordinatorDaemon(config_in(tmp_path)) as daemon:
        owner, watcher = client_of(daemon, ada), client_of(daemon, bob)
        await owner.record_versions([v(ada, 0)])
        await owner.record_versions([v(ada, 1)])
        watching = asyncio.ensure_future(watch_until(watcher, ada.node_id, v(ada, 2)))
        await until(lambda: daemon.core.watches.num_open == 1)
    async with CoordinatorDaemon(config_in(tmp_path, listen=daemon.info["listen"])) as again:
        await until(lambda: again.core.watches.num_open == 1)
        for _ in range(20):
            try:
                await owner.record_versions([v(ada, 2)])
                break
            except Unavailable:
                await asyncio.sleep(0.1)
        seen = await watching
        assert seen == [v(ada, 1), v(ada, 1), v(ada, 2)]
        await asyncio.gather(owner.close(), watcher.close())


async def test_watches_of_one_node_are_bounded_and_heartbeats_go_on(tmp_path: Path) -> None:
    greedy, honest = Identity.create(), Identity.create()
    async with CoordinatorDaemon(config_in(tmp_path)) as daemon:
        first, second = client_of(daemon, greedy), client_of(daemon, honest)
        lineages = [f"{number:064x}" for number in range(WATCHES_PER_NODE)]
        open_ones = [asyncio.ensure_future(anext(first.watch_versions(lineage))) for lineage in lineages]
        await until(lambda: daemon.core.watches.num_open == WATCHES_PER_NODE)
        with pytest.raises(Unavailable, match="watches of this node"):
            await anext(first.watch_versions("f" * 64))
        await first.heartbeat(report_of(greedy))
        waiting = asyncio.ensure_future(anext(second.watch_versions("f" * 64)))
        await until(lambda: daemon.core.watches.num_open == WATCHES_PER_NODE + 1)
        await asyncio.gather(first.close(), second.close())
        results = await asyncio.gather(*open_ones, waiting, return_exceptions=True)
        assert {type(result) for result in results} == {Unavailable}
        await until(lambda: daemon.core.watches.num_open == 0, most_s=PROMPT_S)


async def test_closed_client_does_not_watch_and_a_dead_coordinator_is_unavailable(tmp_path: Path) -> None:
    identity = Identity.create()
    client = client_at("127.0.0.1:9", "a" * 64, identity)
    with pytest.raises(Unavailable):
        await anext(client.watch_versions("b" * 64))
    await client.close()
    with pytest.raises(Unavailable, match="closed"):
        await anext(client.watch_versions("b" * 64))


async def test_a_failed_watch_makes_the_next_one_wait_and_one_that_was_ended_does_not(tmp_path: Path) -> None:
    ada = Identity.create()
    async with CoordinatorDaemon(config_in(tmp_path)) as daemon:
        client = client_of(daemon, ada)
        await client.record_versions([v(ada, 0)])
        for _ in range(3):
            async with aclosing(client.watch_versions(ada.node_id)) as heads:  # type: ignore[type-var]
                await anext(heads)
        assert client._watch_retry._backoff._next_s == FIRST_BACKOFF_S
        daemon.core.watches.end()
        for failures in (1, 2, 3):
            with pytest.raises(Unavailable, match="stops"):
                await anext(client.watch_versions(ada.node_id))
            assert client._watch_retry._backoff._next_s == FIRST_BACKOFF_S * 2**failures
        await client.close()


# --- hostile ends ------------------------------------------------------------------------------


async def server_of(servicer: Any, sessions: Sessions) -> tuple[SessionServer, str]:
    def add(server: grpc.aio.Server) -> None:
        add_CoordinatorServiceServicer_to_server(servicer, server)

    server, port = await start_server("127.0.0.1:0", sessions, [add])
    return server, f"127.0.0.1:{port}"


async def test_slow_reader_is_cut_and_costs_one_version_meanwhile() -> None:
    ada, clock = Identity.create(), SystemClock()
    core, sessions = CoordinatorCore(clock), Sessions(Identity.create(), RUN, clock)
    servicer = CoordinatorServicer(core, sessions, cast(Any, None), tuple, stall_timeout_s=0.5)
    server, listen = await server_of(servicer, sessions)
    der = await fetch_certificate(listen)
    narrow = [
        ("grpc.ssl_target_name_override", CERTIFICATE_NAME),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", 1024),
    ]
    credentials = grpc.ssl_channel_credentials(ssl.DER_cert_to_PEM_cert(der).encode())
    channel = AuthenticatedChannel(
        grpc.aio.secure_channel(listen, credentials, options=narrow),
        sessions.identity.node_id,
        hashlib.sha256(der).digest(),
        Identity.create(),
        RUN,
        clock,
    )
    stub: Any = CoordinatorServiceStub(channel.channel)
    metadata = await channel.metadata(4.0)
    call = stub.WatchVersions(pb.WatchVersionsRequest(policy_id=ada.node_id), metadata=metadata)  # and never read
    await until(lambda: core.watches.num_open == 1)
    step, began_s = 0, time.monotonic()
    while core.watches.num_open:
        assert time.monotonic() - began_s < PROMPT_S, "not after 0.5 s"
        await core.record_versions(ada.node_id, [v(ada, step)])
        step += 1
        await asyncio.sleep(0 if step < 3000 else 0.01)
    assert core.ledger.head(ada.node_id) == v(ada, step - 1)
    call.cancel()
    await channel.close()
    await server.stop(0)


class Lying(CoordinatorServiceServicer):
    """Streams what the test says."""

    def __init__(self, version: policy_pb2.PolicyVersion) -> None:
        self.version = version

    async def WatchVersions(self, request: Any, context: Any) -> AsyncIterator[Any]:
        while True:
            yield pb.WatchVersionsResponse(version=self.version)


@pytest.mark.parametrize(
    "version",
    [
        policy_pb2.PolicyVersion(),
        policy_pb2.PolicyVersion(policy_id="b" * 64, step=2**60, digest=bytes(32)),
        policy_pb2.PolicyVersion(policy_id="b" * 64, step=1, digest=bytes(31)),
        policy_pb2.PolicyVersion(policy_id="c" * 64, step=1, digest=bytes(32)),
        policy_pb2.PolicyVersion(policy_id="b" * 64, step=1),
    ],
    ids=["empty", "step", "digest", "another lineage", "no digest"],
)
async def test_lying_coordinator_ends_the_watch(version: policy_pb2.PolicyVersion) -> None:
    sessions = Sessions(Identity.create(), RUN, SystemClock())
    server, listen = await server_of(Lying(version), sessions)
    client = client_at(listen, sessions.identity.node_id, Identity.create())
    with pytest.raises(Unavailable, match="out of bounds or of another lineage"):
        await anext(client.watch_versions("b" * 64))
    await client.close()
    await server.stop(0)


@pytest.mark.parametrize("policy_id", ["", "x" * 129])
async def test_request_without_a_lineage_is_refused_and_nobody_watches_without_a_session(policy_id: str) -> None:
    core, sessions = CoordinatorCore(SystemClock()), Sessions(Identity.create(), RUN, SystemClock())
    server, listen = await server_of(CoordinatorServicer(core, sessions, cast(Any, None), tuple), sessions)
    client = client_at(listen, sessions.identity.node_id, Identity.create())
    with pytest.raises(Unavailable, match="policy id of"):
        await anext(client.watch_versions(policy_id))
    pem = ssl.DER_cert_to_PEM_cert(await fetch_certificate(listen))
    options = [("grpc.ssl_target_name_override", CERTIFICATE_NAME)]
    async with grpc.aio.secure_channel(listen, grpc.ssl_channel_credentials(pem.encode()), options=options) as channel:
        stub: Any = CoordinatorServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await stub.WatchVersions(pb.WatchVersionsRequest(policy_id="b" * 64)).read()
    assert core.watches.num_open == 0
    await client.close()
    await server.stop(0)
