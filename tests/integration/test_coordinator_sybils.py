"""Free keys at a real coordinator: they change no advice, and keep nobody out of its tables.

Attackers connect from addresses of 127/8, each a subnet of its own.
"""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from coordinator.daemon import CoordinatorDaemon
from coordinator.head_watches import HeadWatches
from coordinator.ledger import Ledger
from coordinator.membership import Membership
from swarm.config import (
    CoordinatorConfig,
    CoordinatorLink,
    DirectoryConfig,
    EntryConfig,
    EnvironmentConfig,
    ModelConfig,
    NodeConfig,
)
from swarm.identity import Identity
from swarm.peers.coordinator_client import GrpcCoordinatorClient
from swarm.testing.builders import make_report
from swarm.types import EdgeReport, NodeReport, PolicyVersion
from tests.attacks.call_flood import forwarding
from tests.attacks.connection_flood import loopback_addresses

RUN = "sybils"
MEMBERS = [Identity.from_seed(bytes([number]) * 32) for number in range(1, 4)]
SMALL = 8  # places in a table


def config_in(directory: Path) -> CoordinatorConfig:
    entry = EntryConfig(kind="open", members=tuple(member.node_id for member in MEMBERS))
    node = NodeConfig(
        environments=(EnvironmentConfig(name="echo", kind="char", dataset="reverse"),),
        model=ModelConfig(source="tiny"),
        entry=entry,
    )
    return CoordinatorConfig(dir=directory, run_id=RUN, directory=DirectoryConfig(kind="none"), node=node)


def version(identity: Identity, step: int = 0) -> PolicyVersion:
    return PolicyVersion(policy_id=identity.node_id, step=step, digest=bytes(32))


def report_of(identity: Identity, edges: tuple[EdgeReport, ...] = ()) -> NodeReport:
    return make_report(identity.node_id, edges=edges)


def edge(source: Identity, ess: float) -> EdgeReport:
    """Late data, of use as `ess` says."""
    return EdgeReport(
        source=source.node_id, num_groups=8, age_mean_steps=2.0, ess_share=ess, mismatch_kl=0.01, reward_mean=0.5
    )


class Callers:
    """Clients of one coordinator, each at its own connection."""

    def __init__(self, daemon: CoordinatorDaemon, stack: AsyncExitStack) -> None:
        self._daemon, self._stack = daemon, stack

    def client(self, identity: Identity, listen: str = "") -> GrpcCoordinatorClient:
        info = self._daemon.info
        link = CoordinatorLink(address=listen or info["listen"], fingerprint=info["fingerprint"])
        client = GrpcCoordinatorClient(link, identity, RUN, timeout_s=20.0)
        self._stack.push_async_callback(client.close)
        return client

    async def sybils(self, count: int, num_subnets: int = 1) -> list[tuple[Identity, GrpcCoordinatorClient]]:
        """Fresh keys, from so many subnets in turn."""
        listens = [
            await self._stack.enter_async_context(forwarding(source, self._daemon.info["listen"]))
            for source in loopback_addresses(num_subnets)
        ]
        keys = [Identity.create() for _ in range(count)]
        return [(key, self.client(key, listens[number % num_subnets])) for number, key in enumerate(keys)]


@asynccontextmanager
async def coordinator(directory: Path) -> AsyncGenerator[tuple[CoordinatorDaemon, Callers]]:
    async with CoordinatorDaemon(config_in(directory)) as daemon, AsyncExitStack() as stack:
        yield daemon, Callers(daemon, stack)


async def test_sybils_that_call_everything_late_and_useless_change_no_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coordinator.core.DECIDE_EVERY_S", 0.0)
    async with coordinator(tmp_path) as (_, callers):
        honest = [(member, callers.client(member)) for member in MEMBERS]
        for number, (member, client) in enumerate(honest):
            await client.heartbeat(report_of(member, (edge(MEMBERS[number - 1], 0.9),)))
        lies = tuple(edge(member, 0.0) for member in MEMBERS)
        for key, client in await callers.sybils(12):
            await client.heartbeat(report_of(key, lies))
        member, client = honest[0]
        advice = await client.heartbeat(report_of(member, (edge(MEMBERS[-1], 0.9),)))
        assert advice.state == "ok" and advice.max_age_steps is None and not advice.source_weights


async def test_lineages_of_sybils_leave_room_for_a_newcomers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.core.Ledger", lambda: Ledger(max_lineages=SMALL))
    async with coordinator(tmp_path) as (daemon, callers):
        for key, client in await callers.sybils(SMALL):
            await client.record_versions([version(key)])
        assert len(daemon.core.ledger.lineages) == SMALL
        await callers.client(MEMBERS[0]).record_versions([version(MEMBERS[0])])
        assert daemon.core.ledger.head(MEMBERS[0].node_id) is not None


async def test_leases_of_sybils_leave_room_for_a_newcomers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.core.Membership", lambda lease_s: Membership(lease_s, max_members=SMALL))
    async with coordinator(tmp_path) as (daemon, callers):
        for key, client in await callers.sybils(SMALL, num_subnets=2):
            await client.heartbeat(report_of(key))
        assert len(daemon.core.live_members()) == SMALL
        await callers.client(MEMBERS[0]).heartbeat(report_of(MEMBERS[0]))


async def test_watches_of_sybils_leave_room_for_a_newcomers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coordinator.core.HeadWatches", lambda: HeadWatches(total=SMALL))
    async with coordinator(tmp_path) as (daemon, callers):
        owner = callers.client(MEMBERS[0])
        await owner.record_versions([version(MEMBERS[0])])
        hostile = [client.watch_versions(MEMBERS[0].node_id) for _, client in await callers.sybils(SMALL, 2)]
        for heads in hostile:
            await anext(heads)
        assert daemon.core.watches.num_open == SMALL
        coming = callers.client(MEMBERS[1]).watch_versions(MEMBERS[0].node_id)
        assert await anext(coming) == version(MEMBERS[0])
        for heads in (*hostile, coming):
            await heads.aclose()  # type: ignore[attr-defined]
