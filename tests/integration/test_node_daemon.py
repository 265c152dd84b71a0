"""A node daemon inside the test: what its status and metrics say while a coordinator comes and goes."""

import asyncio
from pathlib import Path

import pytest
from waits import until

from coordinator.daemon import CoordinatorDaemon
from node.daemon import Daemon
from node.status import problems
from swarm.clock import SystemClock
from swarm.config import (
    CoordinatorConfig,
    CoordinatorLink,
    DirectoryConfig,
    EnvironmentConfig,
    EvaluationConfig,
    ExchangeConfig,
    ModelConfig,
    NodeConfig,
)
from swarm.identity import Identity
from swarm.peers.discovery_dht import HivemindDirectory


def node_config(directory: Path) -> NodeConfig:
    return NodeConfig(
        dir=directory,
        run_id="test",
        worker="inline",
        environments=(EnvironmentConfig(name="reverse", kind="char", dataset="reverse"),),
        model=ModelConfig(source="tiny", dtype="float32"),
        exchange=ExchangeConfig(listen="0.0.0.0:0"),
        directory=DirectoryConfig(kind="none"),
        evaluation=EvaluationConfig(num_problems=2),
    )


async def test_a_node_says_whether_its_coordinator_answers_and_where_others_dial_it(tmp_path: Path) -> None:
    config = node_config(tmp_path / "node")
    run = CoordinatorConfig(
        dir=tmp_path / "run", run_id="test", directory=DirectoryConfig(kind="none"), node=config, listen="0.0.0.0:0"
    )
    async with CoordinatorDaemon(run) as coordinator:
        address = f"127.0.0.1:{coordinator.info['listen'].rpartition(':')[2]}"
        assert "0.0.0.0" not in coordinator.link
        link = CoordinatorLink(address=address, fingerprint=coordinator.info["fingerprint"], heartbeat_s=0.1)
        async with Daemon(config.model_copy(update={"coordinator": link})) as daemon:
            running = asyncio.create_task(daemon.run())

            def reachable() -> float | None:
                return daemon.telemetry.registry.get_sample_value("swarm_node_coordinator_reachable")

            try:
                assert "0.0.0.0" not in daemon.agent.endpoints[0] and not daemon.agent.endpoints[0].endswith(":0")
                await until(lambda: running.done() or reachable() == 1)
                assert not running.done(), running
                await until(lambda: len(coordinator.core.live_members()) == 1)
                status = daemon.status()
                assert status["restarts"] == {"worker": 0, "p2pd": 0, "sandbox": 0}
                assert problems(status, status["at_s"], max_idle_s=60.0) == []
                (problem,) = problems({**status, "num_events_lost": 3}, status["at_s"], max_idle_s=60.0)
                assert "3 events" in problem
                await coordinator.__aexit__()
                await until(lambda: reachable() == 0)
                assert not daemon.status()["num_failures"] and not running.done()
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)


async def test_a_running_node_says_now_and_then_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("node.daemon_loops.PROGRESS_EVERY_S", 0.3)
    caplog.set_level("INFO")

    def told() -> list[dict[str, object]]:
        return [vars(record) for record in caplog.records if record.message == "progress"]

    async with Daemon(node_config(tmp_path / "node")) as daemon:
        running = asyncio.create_task(daemon.run())
        try:
            await until(lambda: running.done() or any(fields["step"] for fields in told()))
            assert not running.done(), running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    newest = told()[-1]
    assert {"reward", "local", "external", "age", "tokens_per_s", "peers"} <= newest.keys()
    assert newest["local"] and any(fields["tokens_per_s"] for fields in told())


async def test_a_node_that_cannot_start_leaves_its_directory_free(tmp_path: Path) -> None:
    config = node_config(tmp_path / "node")
    wrong = config.model_copy(update={"learner": config.learner.model_copy(update={"recipe": "best_ever"})})
    with pytest.raises(Exception, match="best_ever"):
        await Daemon(wrong).__aenter__()
    (config.dir / "status.json").write_text("{}")
    async with Daemon(config) as daemon:
        assert daemon.agent.endpoints
        assert not (config.dir / "status.json").exists(), "what the process before said is not what this one does"


@pytest.mark.parametrize(
    "name",
    ["credential.OwnCredential.keep", "daemon.remember_peers", "daemon.write_status", "daemon.log_progress"],
)
async def test_a_fault_of_a_side_loop_ends_no_node(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is logged, counted and tried again, as that of any other loop."""
    calls: list[str] = []

    async def fails(*_: object) -> None:
        calls.append(name)
        raise RuntimeError("a fault that nobody thought of")

    monkeypatch.setattr(f"node.{name}", fails)
    async with Daemon(node_config(tmp_path / "node")) as daemon:
        running = asyncio.create_task(daemon.run())
        try:
            await until(lambda: running.done() or len(calls) > 1)
            assert not running.done(), running
            assert daemon.agent.num_failures >= 1
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


async def test_a_node_that_leaves_takes_its_address_out_of_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this all others would dial it until its advert ends, 90 s later."""
    monkeypatch.setattr(Daemon, "_run_worker", lambda _: asyncio.Event().wait())  # its model takes long to load
    config = node_config(tmp_path / "node").model_copy(update={"directory": DirectoryConfig()})
    async with Daemon(config) as daemon:
        reader = await HivemindDirectory.start(
            Identity.create(), "test", DirectoryConfig(bootstrap=tuple(daemon.maddrs)), SystemClock(), None
        )
        running = asyncio.create_task(daemon.run())

        async def endpoints() -> list[tuple[str, ...]]:
            return [advert.endpoints for advert in await reader.lookup()]

        try:

            async def is_announced() -> bool:
                return bool(await endpoints())

            await until(is_announced)
            assert await endpoints() == [tuple(daemon.agent.endpoints)] != [()]
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            assert await endpoints() == [()]
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await reader.stop()
