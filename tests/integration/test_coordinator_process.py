"""The coordinator as nodes, browsers and joiners meet it: real gRPC over TLS, real HTTP, real SQLite."""

import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from coordinator.daemon import CoordinatorDaemon
from node.join import join_swarm
from swarm.clock import ManualClock
from swarm.config import (
    CoordinatorConfig,
    CoordinatorLink,
    DirectoryConfig,
    EnvironmentConfig,
    FollowConfig,
    LearnerConfig,
    ModelConfig,
    NodeConfig,
    load_config,
)
from swarm.errors import ConfigError, Unauthenticated, Unavailable
from swarm.identity import Identity
from swarm.peers.coordinator_client import GrpcCoordinatorClient
from swarm.peers.entry import EntryRule
from swarm.peers.parties import Parties
from swarm.telemetry.page_server import MAX_REQUEST_BYTES
from swarm.testing.builders import make_report
from swarm.types import EdgeReport, NodeReport, PolicyVersion, Role
from swarm.version_history import MAX_RECORDED
from swarm.wire.join_link import JoinLink, fetch_manifest, node_config_from_manifest
from swarm.wire.session import open_channel
from swarm.wire.v1 import coordinator_service_pb2 as pb
from swarm.wire.v1.coordinator_service_pb2_grpc import CoordinatorServiceStub

SCRIPT = "<script>alert(1)</script>"


def config_in(directory: Path, **changes: object) -> CoordinatorConfig:
    node = NodeConfig(
        environments=(EnvironmentConfig(name="echo", kind="char", dataset="reverse"),), model=ModelConfig(source="tiny")
    )
    values = {"dir": directory, "run_id": "test", "directory": DirectoryConfig(kind="none"), "node": node, **changes}
    return CoordinatorConfig.model_validate(values)


def report_of(identity: Identity, name: str = "ada", step: int = 3, edges: tuple[EdgeReport, ...] = ()) -> NodeReport:
    return make_report(
        identity.node_id,
        name=name,
        roles=(Role.TRAINER, Role.GENERATOR),
        head=PolicyVersion(policy_id=identity.node_id, step=step, digest=b"\x01" * 32),
        tokens_per_s=12.5,
        num_local=4,
        num_external=2,
        num_refused=1,
        edges=edges,
        evaluations={"echo/all": 0.75},
    )


def version(identity: Identity, step: int, byte: int) -> PolicyVersion:
    return PolicyVersion(policy_id=identity.node_id, step=step, digest=bytes([byte]) * 32)


def client_of(daemon: CoordinatorDaemon, identity: Identity, run_id: str = "test") -> GrpcCoordinatorClient:
    link = CoordinatorLink(address=daemon.info["listen"], fingerprint=daemon.info["fingerprint"])
    return GrpcCoordinatorClient(link, identity, run_id, timeout_s=4.0)


async def get(address: str, request: bytes) -> bytes:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        await writer.drain()
        return await reader.read()
    finally:
        writer.close()
        await writer.wait_closed()


async def page(daemon: CoordinatorDaemon, path: str) -> str:
    answer = await get(daemon.info["http_listen"], f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n"), answer[:100]
    return answer.partition(b"\r\n\r\n")[2].decode()


async def test_a_node_is_live_from_its_heartbeat_until_it_leaves(tmp_path: Path) -> None:
    identity = Identity.create()
    async with CoordinatorDaemon(config_in(tmp_path)) as daemon:
        client = client_of(daemon, identity)
        advice = await client.heartbeat(report_of(identity))
        assert advice.state == "ok" and advice.max_age_steps is None and advice.lease_s == 30.0
        assert [member.report for member in daemon.core.live_members()] == [report_of(identity)]
        await client.leave()
        assert daemon.core.live_members() == []
        await client.close()
        with pytest.raises(Unavailable, match="closed"):
            await client.heartbeat(report_of(identity))


async def test_a_fork_is_refused_a_rewind_is_not_and_all_of_it_survives_a_restart(tmp_path: Path) -> None:
    identity = Identity.create()
    async with CoordinatorDaemon(config_in(tmp_path)) as daemon:
        client = client_of(daemon, identity)
        await client.heartbeat(report_of(identity))
        for step in range(4):
            await client.record_versions([version(identity, step, 1)])
        await client.record_versions([version(identity, 3, 9)])
        assert daemon.core.num_refused_versions == 1
        await client.record_versions([version(identity, 1, 1)])
        await client.close()
        link = daemon.link
    async with CoordinatorDaemon(config_in(tmp_path, listen=daemon.info["listen"])) as again:
        assert again.link == link
        client = client_of(again, identity)
        await client.record_versions([version(identity, 2, 2)])
        assert again.core.num_refused_versions == 0
        assert again.core.ledger.lineages[identity.node_id].versions.after(-1, 10) == [
            version(identity, 0, 1),
            version(identity, 1, 1),
            version(identity, 2, 2),
        ]
        assert [member.report.name for member in again.core.live_members()] == ["ada"]
        await client.close()


async def test_two_coordinators_never_share_a_directory(tmp_path: Path) -> None:
    async with CoordinatorDaemon(config_in(tmp_path)) as first:
        with pytest.raises(ConfigError, match="runs there already"):
            await CoordinatorDaemon(config_in(tmp_path)).__aenter__()
        assert json.loads((tmp_path / "coordinator.json").read_text())["listen"] == first.info["listen"]


async def test_a_version_of_another_lineage_is_refused(tmp_path: Path) -> None:
    async with CoordinatorDaemon(config_in(tmp_path)) as daemon:
        client = client_of(daemon, Identity.create())
        await client.record_versions([version(Identity.create(), 0, 1)])
        assert daemon.core.num_refused_versions == 1 and daemon.core.ledger.lineages == {}
        await client.close()


async def test_a_call_without_a_session_is_refused(tmp_path: Path) -> None:
    async with CoordinatorDaemon(config_in(tmp_path)) as daemon:
        channel = await open_channel(daemon.info["listen"], daemon.info["fingerprint"], Identity.create(), "test", 4.0)
        stub: Any = CoordinatorServiceStub(channel.channel)
        with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
            await stub.Leave(pb.LeaveRequest())
        await stub.Leave(pb.LeaveRequest(), metadata=await channel.metadata(4.0))
        await channel.close()


async def test_advice_reaches_the_node(tmp_path: Path) -> None:
    identity, source = Identity.create(), "b" * 64
    bad = EdgeReport(source=source, num_groups=8, age_mean_steps=3.0, ess_share=0.1, mismatch_kl=0.05, reward_mean=0.5)
    async with CoordinatorDaemon(config_in(tmp_path)) as daemon:
        client = client_of(daemon, identity)
        advice = await client.heartbeat(report_of(identity, edges=(bad,)))
        assert (advice.state, advice.max_age_steps, advice.source_weights) == ("tightened", 2, {source: 0.2})
        await client.close()


async def test_a_report_with_more_edges_than_travel_is_still_a_heartbeat(tmp_path: Path) -> None:
    identity = Identity.create()
    edges = tuple(
        EdgeReport(
            source=f"{n:064x}", num_groups=1, age_mean_steps=0.0, ess_share=1.0, mismatch_kl=0.0, reward_mean=0.0
        )
        for n in range(200)
    )
    async with CoordinatorDaemon(config_in(tmp_path)) as daemon:
        client = client_of(daemon, identity)
        await client.heartbeat(report_of(identity, edges=edges))
        assert len(daemon.core.live_members()[0].report.edges) == 64
        await client.close()


async def test_a_client_of_another_run_is_refused(tmp_path: Path) -> None:
    identity = Identity.create()
    async with CoordinatorDaemon(config_in(tmp_path)) as daemon:
        client = client_of(daemon, identity, run_id="other")
        with pytest.raises(Unauthenticated):
            await client.heartbeat(report_of(identity))
        await client.close()


async def test_a_client_over_its_rate_is_told_so_and_others_are_not_hurt(tmp_path: Path) -> None:
    noisy, calm = Identity.create(), Identity.create()
    async with CoordinatorDaemon(config_in(tmp_path)) as daemon:
        daemon.core.clock = ManualClock(daemon.clock.now_s())  # stands still: a burst on any machine
        first, second = client_of(daemon, noisy), client_of(daemon, calm)
        await second.heartbeat(report_of(calm))
        with pytest.raises(Unavailable, match="calls a second"):
            for _ in range(2000):
                await first.record_versions([version(calm, 0, 1)])
        await second.heartbeat(report_of(calm))
        await first.close()
        await second.close()


async def test_the_link_leads_to_a_manifest_that_makes_a_node_configuration(tmp_path: Path) -> None:
    async with CoordinatorDaemon(config_in(tmp_path / "c")) as daemon:
        link = JoinLink.parse(daemon.link)
        dead = JoinLink(addresses=("127.0.0.1:9", *link.addresses), run_id=link.run_id, fingerprint=link.fingerprint)
        fetched = await fetch_manifest(dead, Identity.create(), timeout_s=4.0)
    data = node_config_from_manifest(fetched.manifest, link, fetched.bootstrap_peers, tmp_path / "n")
    node = NodeConfig.model_validate(data)
    assert node.run_id == "test" and [env.name for env in node.environments] == ["echo"]
    assert node.coordinator.fingerprint == daemon.info["fingerprint"] and node.dir == tmp_path / "n"


async def test_a_wrong_fingerprint_is_refused(tmp_path: Path) -> None:
    async with CoordinatorDaemon(config_in(tmp_path)) as daemon:
        link = JoinLink.parse(daemon.link)
        wrong = JoinLink(addresses=link.addresses, run_id=link.run_id, fingerprint="0" * 64)
        with pytest.raises(Unauthenticated):
            await fetch_manifest(wrong, Identity.create(), timeout_s=4.0)


async def test_a_coordinator_refuses_to_start_a_run_that_names_local_code(tmp_path: Path) -> None:
    node = NodeConfig(environments=(EnvironmentConfig(name="mine", kind="function", dataset="os:getcwd"),))
    with pytest.raises(ConfigError, match="unknown_environment"):
        async with CoordinatorDaemon(config_in(tmp_path, node=node)):
            pass
    assert not (tmp_path / "coordinator.json").exists()


@pytest.mark.parametrize(
    ("learner", "key"),
    [
        ({"recipe": "best_ever"}, r"learner\.recipe: .*best_ever"),
        ({"recipe": "grpo", "recipe_params": {"weight.hihg": 0.3}}, r"learner\.recipe_params\.weight\.hihg"),
        ({"recipe": "ngrpo"}, r"learner\.recipe ngrpo needs .*replay\.keep_zero_variance"),
    ],
)
async def test_a_recipe_that_nobody_has_stops_the_coordinator_and_whoever_joins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, learner: dict[str, object], key: str
) -> None:
    good = config_in(tmp_path / "run")
    node = good.node.model_copy(update={"learner": LearnerConfig.model_validate(learner)})
    config = good.model_copy(update={"node": node})
    with pytest.raises(ConfigError, match=f"node.{key}"):
        await CoordinatorDaemon(config).__aenter__()
    monkeypatch.setattr("coordinator.daemon._require_recipe", lambda node: None)  # one with other recipes than ours
    async with CoordinatorDaemon(config) as daemon:
        with pytest.raises(ConfigError, match=f"manifest: {key}"):
            await join_swarm(daemon.link, tmp_path / "node", [], start=False, say=lambda text: None)
        assert not (tmp_path / "node").exists(), "who could not join leaves nothing behind"
        (tmp_path / "node").mkdir()
        with pytest.raises(ConfigError, match=f"manifest: {key}"):
            await join_swarm(daemon.link, tmp_path / "node", [], start=False, say=lambda text: None)
        assert (tmp_path / "node" / "identity.key").exists(), "what was there stays"


async def test_joining_on_the_coordinators_machine_writes_a_configuration_that_starts(tmp_path: Path) -> None:
    said: list[str] = []
    async with CoordinatorDaemon(config_in(tmp_path / "run")) as daemon:
        await join_swarm(daemon.link, tmp_path / "node", ["name=ada"], start=False, say=said.append)
    config = load_config(NodeConfig, tmp_path / "node" / "node.toml")
    assert config.coordinator.fingerprint == daemon.info["fingerprint"] and config.exchange.listen == "127.0.0.1:0"
    assert any("on this machine" in text for text in said)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["exchange.reach=dialable", "exchange.advertise=example.org:7700"], "they dial example.org:7700"),
        (["exchange.reach=outward"], "through relays"),
    ],
)
async def test_who_says_how_it_is_reached_does_not_read_that_it_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sets: list[str], words: str
) -> None:
    said: list[str] = []
    monkeypatch.setattr("node.join.own_address", lambda _: "192.168.1.5")
    async with CoordinatorDaemon(config_in(tmp_path / "run")) as daemon:
        await join_swarm(daemon.link, tmp_path / "node", sets, start=False, say=said.append)
    assert f"others reach this node as set: {words}" in said and not any("is tried" in text for text in said)


async def test_what_is_set_while_joining_is_validated_and_written(tmp_path: Path) -> None:
    path = tmp_path / "node" / "node.toml"
    async with CoordinatorDaemon(config_in(tmp_path / "run")) as daemon:
        for wrong in ("learner.nope=3", "learner.recipe=best_ever"):
            with pytest.raises(ConfigError, match=wrong.partition("=")[0]):
                await join_swarm(daemon.link, path.parent, [wrong], start=False, say=lambda text: None)
            assert not path.exists()
        asked = ["learner.learning_rate=7e-5", "exchange.listen=127.0.0.1:7700"]
        await join_swarm(daemon.link, path.parent, asked, start=False, say=lambda text: None)
    config = load_config(NodeConfig, path)
    assert config.learner.learning_rate == 7e-5 and config.exchange.listen == "127.0.0.1:7700"


async def test_a_directory_that_joined_something_else_is_not_used_for_what_is_asked_now(tmp_path: Path) -> None:
    async def join(link: str, *overrides: str, roles: tuple[Role, ...] = ()) -> None:
        await join_swarm(link, tmp_path / "node", list(overrides), start=False, say=said.append, roles=roles)

    said: list[str] = []
    async with CoordinatorDaemon(config_in(tmp_path / "run")) as daemon:
        await join(daemon.link)
    written = (tmp_path / "node" / "node.toml").read_text()
    other_run, other_key = daemon.link.replace("/test#", "/other#"), daemon.link.rpartition("#")[0] + "#" + "ab" * 32
    for link, found, asked in (
        (other_run, "'test'", "'other'"),
        (other_key, daemon.info["fingerprint"], "ab" * 32),
    ):
        with pytest.raises(ConfigError, match=rf"{found}.*{asked}.*--dir"):
            await join(link)
    with pytest.raises(ConfigError, match=r"roles.*'trainer, generator'.*'generator'"):
        await join(daemon.link, roles=(Role.GENERATOR,))
    with pytest.raises(ConfigError, match="not written"):
        await join(daemon.link, "learner.learning_rate=7e-5")
    await join(daemon.link)
    assert "exists" in said[-1] and (tmp_path / "node" / "node.toml").read_text() == written


async def test_a_link_to_another_run_and_a_link_where_nobody_is_say_what_to_look_at(tmp_path: Path) -> None:
    async with CoordinatorDaemon(config_in(tmp_path / "run")) as daemon:
        wrong = daemon.link.replace("/test#", "/other#")
        with pytest.raises(ConfigError, match=r"the link names 'other', the manifest 'test'") as caught:
            await join_swarm(wrong, tmp_path / "node", [], start=False, say=lambda text: None)
        assert "not that of who answered" not in str(caught.value)
    with pytest.raises(Unavailable, match="is the coordinator running") as gone:
        await join_swarm(daemon.link, tmp_path / "node", [], start=False, say=lambda text: None)
    assert str(gone.value).count(daemon.info["listen"]) == 1


async def test_a_node_can_join_to_generate_only(tmp_path: Path) -> None:
    async with CoordinatorDaemon(config_in(tmp_path / "run")) as daemon:
        roles = (Role.GENERATOR,)
        await join_swarm(daemon.link, tmp_path / "node", [], start=False, say=lambda text: None, roles=roles)
    config = load_config(NodeConfig, tmp_path / "node" / "node.toml")
    assert config.roles == roles and config.follow.policy == "" and not config.weights.publish


async def test_who_joins_follows_the_trainer_that_the_coordinators_operator_named(tmp_path: Path) -> None:
    trainer, good = Identity.create().node_id, config_in(tmp_path / "run")
    named = good.node.model_copy(update={"follow": FollowConfig(policy=trainer)})
    async with CoordinatorDaemon(good.model_copy(update={"node": named})) as daemon:
        roles = (Role.GENERATOR,)
        await join_swarm(daemon.link, tmp_path / "node", [], start=False, say=lambda text: None, roles=roles)
    assert load_config(NodeConfig, tmp_path / "node" / "node.toml").follow.policy == trainer


async def test_pages_answer_and_escape_what_a_node_calls_itself(tmp_path: Path) -> None:
    identity = Identity.create()
    edge = EdgeReport(
        source="c" * 64, num_groups=5, age_mean_steps=1.5, ess_share=0.9, mismatch_kl=0.01, reward_mean=0.5
    )
    async with CoordinatorDaemon(config_in(tmp_path)) as daemon:
        client = client_of(daemon, identity)
        await client.heartbeat(report_of(identity, name=SCRIPT, edges=(edge,)))
        await client.record_versions([version(identity, 3, 1)])
        html = await page(daemon, "/")
        assert SCRIPT not in html and "&lt;script&gt;" in html and daemon.link in html.replace("&#39;", "'")
        status = json.loads(await page(daemon, "/status.json"))
        assert status["members"][0]["name"] == SCRIPT and status["members"][0]["is_live"]
        assert status["learners"][0]["age_mean_steps"] == 1.5
        assert status["lineages"][0]["step"] == 3 and status["lineages"][0]["digest"] == "01" * 32
        assert (await page(daemon, "/healthz")).strip() == "ok"
        assert "coordinator" in await page(daemon, "/metrics")
        await client.close()


async def test_a_backlog_of_versions_takes_few_calls_and_each_version_counts_against_the_rate(tmp_path: Path) -> None:
    identity = Identity.create()
    versions = [version(identity, step, 1) for step in range(4 * MAX_RECORDED)]
    async with CoordinatorDaemon(config_in(tmp_path)) as daemon:
        client = client_of(daemon, identity)
        with pytest.raises(Unavailable, match=f"{MAX_RECORDED + 1} versions"):
            await client.record_versions(versions[: MAX_RECORDED + 1])
        assert daemon.core.ledger.head(identity.node_id) is None
        await client.record_versions(versions[:MAX_RECORDED])
        with pytest.raises(Unavailable, match="slow down"):
            for number in range(1, 4):
                await client.record_versions(versions[number * MAX_RECORDED :][:MAX_RECORDED])
        head = daemon.core.ledger.head(identity.node_id)
        assert head is not None and head.step % MAX_RECORDED == MAX_RECORDED - 1, "all of a call or none"
        await client.close()


async def test_http_requests_are_bounded_and_read_only(tmp_path: Path) -> None:
    async with CoordinatorDaemon(config_in(tmp_path)) as daemon:
        address = daemon.info["http_listen"]
        assert (await get(address, b"POST / HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 405 ")
        assert (await get(address, b"GET /../etc/passwd HTTP/1.1\r\n\r\n")).startswith(b"HTTP/1.1 404 ")
        with contextlib.suppress(ConnectionError):  # cut with some of it unread
            assert await get(address, b"GET /" + b"a" * (2 * MAX_REQUEST_BYTES)) == b""
        assert (await page(daemon, "/healthz")).strip() == "ok"


async def test_after_kill_9_the_ledger_holds_what_was_acknowledged_and_the_client_reconnects(tmp_path: Path) -> None:
    identity = Identity.create()
    process = await start_process(tmp_path, "127.0.0.1:0")
    info = json.loads((tmp_path / "coordinator.json").read_text())
    link = CoordinatorLink(address=info["listen"], fingerprint=info["fingerprint"])
    client = GrpcCoordinatorClient(link, identity, "test", timeout_s=5.0)
    await client.heartbeat(report_of(identity))
    for step in range(5):
        await client.record_versions([version(identity, step, 1)])
    process.send_signal(signal.SIGKILL)
    await process.wait()
    with pytest.raises(Unavailable):
        await client.record_versions([version(identity, 5, 1)])
    process = await start_process(tmp_path, info["listen"])
    assert json.loads((tmp_path / "coordinator.json").read_text())["link"] == info["link"]
    while True:
        try:
            await client.record_versions([version(identity, 5, 1)])
            break
        except Unavailable:
            await asyncio.sleep(0.05)  # the client itself waits out its backoff
    status = json.loads((await get(http_of(tmp_path), b"GET /status.json HTTP/1.1\r\n\r\n")).partition(b"\r\n\r\n")[2])
    assert status["lineages"][0]["step"] == 5 and status["num_versions"] == 6
    assert status["lineages"][0]["branch"] == 0 and status["members"][0]["is_live"]
    await client.close()
    process.terminate()
    assert await process.wait() == 0


def http_of(directory: Path) -> str:
    return json.loads((directory / "coordinator.json").read_text())["http_listen"]


async def start_process(directory: Path, listen: str) -> asyncio.subprocess.Process:
    """A coordinator in a process of its own, ready to answer."""
    overrides = [f"dir={directory}", "run_id=test", f"listen={listen}", "directory.kind=none", "node.model.source=tiny"]
    path = directory / "coordinator.toml"
    path.write_text("")
    arguments = [part for override in overrides for part in ("--set", override)]
    (directory / "coordinator.json").unlink(missing_ok=True)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "coordinator.cli", "start", "--config", str(path), *arguments
    )
    while not (directory / "coordinator.json").exists():
        assert process.returncode is None, "the coordinator ended"
        await asyncio.sleep(0.05)
    return process


@pytest.mark.parametrize(
    ("own", "announce", "is_private"),
    [("192.168.1.5", (), True), ("8.8.8.8", (), False), ("192.168.1.5", ("/dns4/example.org/tcp/7701",), False)],
)
async def test_a_coordinator_that_listens_everywhere_is_as_private_as_the_address_in_its_link(
    tmp_path: Path, own: str, announce: tuple[str, ...], is_private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its nodes judge by that address too: advice from everybody, and groups of everybody in full, belong together."""
    monkeypatch.setattr("swarm.addresses.own_address", lambda: own)
    directory = DirectoryConfig(kind="none", announce=announce)
    judged: list[Parties] = []

    def kept(entry: EntryRule | None) -> Parties:
        judged.append(Parties(entry))
        return judged[-1]

    monkeypatch.setattr("coordinator.daemon.Parties", kept)
    config = config_in(tmp_path, listen="0.0.0.0:0").model_copy(update={"directory": directory})
    async with CoordinatorDaemon(config) as daemon:
        address = JoinLink.parse(daemon.link).addresses[0]
        assert address == f"{own}:{daemon.info['listen'].rpartition(':')[2]}" and not address.endswith(":0")
    link = CoordinatorLink(address=address, fingerprint=daemon.info["fingerprint"])
    node = NodeConfig(coordinator=link, directory=DirectoryConfig(bootstrap=announce))
    assert node.is_private is is_private
    assert judged[0].is_private is is_private
