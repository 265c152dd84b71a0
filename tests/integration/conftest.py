"""Real node and coordinator processes for tests: started from a configuration file, stopped however the test ends."""

import asyncio
import inspect
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from node.daemon import write_config
from swarm.config import CoordinatorConfig, NodeConfig
from swarm.simulate.local.fork_server import OF_AGENTS, OF_WORKERS, ForkServer, fork_server
from swarm.simulate.local.processes import Process
from swarm.simulate.presets import SimulationOptions, node_configs
from swarm.types import JsonDict

sys.path.append(str(Path(__file__).parent))  # for what several tests share

from grpc_ends import everything_closed
from waits import until, written


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def forks(tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[ForkServer | None]:
    """The process that those of all tests are forked from: the imports of a node alone take as long as most tests.

    It lives in the event loop of the session, and so does each test that uses it.
    """
    async with fork_server(OF_AGENTS + OF_WORKERS, tmp_path_factory.mktemp("forks") / "imports.txt") as server:
        yield server


@pytest.fixture
def shared_forks(forks: ForkServer | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`run_swarm` forks from the server of the session instead of one of its own."""

    @asynccontextmanager
    async def shared(modules: Sequence[str], log: Path) -> AsyncGenerator[ForkServer | None]:
        yield forks

    monkeypatch.setattr("swarm.simulate.local.run.fork_server", shared)


@pytest_asyncio.fixture
async def closed_at_end() -> AsyncGenerator[None]:
    """Nothing that the test opens with gRPC outlives its event loop."""
    async with everything_closed():
        yield


@pytest.fixture(autouse=True)
def nothing_stays_open(request: pytest.FixtureRequest) -> None:
    """For every test with an event loop of its own, however it ends."""
    marker = request.node.get_closest_marker("asyncio")
    if inspect.iscoroutinefunction(request.function) and not (marker is not None and marker.kwargs):
        request.getfixturevalue("closed_at_end")


class Swarm:
    """Processes of one test, by name, with their directories below one."""

    def __init__(self, directory: Path, forks: ForkServer | None) -> None:
        self.directory = directory
        self.processes: dict[str, Process] = {}
        self._forks = forks

    def process(self, name: str, directory: Path) -> Process:
        """A process to start; it ends with the test."""
        process = self.processes[name] = Process(name, directory, self._forks)
        return process

    def configs(self, count: int, **changes: Any) -> list[NodeConfig]:
        """Nodes of the tiny preset that run until stopped; `changes` are options of the simulation."""
        options = SimulationOptions(preset="tiny", nodes=count, rounds=changes.pop("rounds", 100_000), **changes)
        quick = [
            config.evaluation.model_copy(update={"num_problems": 2, "every_steps": 0})
            for config in node_configs(options, self.directory)
        ]
        return [
            config.model_copy(update={"evaluation": evaluation})
            for config, evaluation in zip(node_configs(options, self.directory), quick, strict=True)
        ]

    async def coordinator(self, node: NodeConfig) -> JsonDict:
        """Starts the coordinator of a run; a later `start()` of its process comes back on the same ports."""
        directory = self.directory / "coordinator"
        config = CoordinatorConfig(dir=directory, run_id=node.run_id, lease_s=10.0, node=node)
        info = await self.start_coordinator(config)
        pinned = config.model_copy(update={"listen": info["listen"], "http_listen": info["http_listen"]})
        write_config(pinned, directory / "coordinator.toml")
        return info

    async def start_coordinator(self, config: CoordinatorConfig) -> JsonDict:
        """Starts a coordinator in its directory, on free ports."""
        process = self.process("coordinator", config.dir)
        config.dir.mkdir(parents=True, exist_ok=True)
        path = config.dir / "coordinator.toml"
        write_config(config.model_copy(update={"listen": "127.0.0.1:0", "http_listen": "127.0.0.1:0"}), path)
        await process.start(["coordinator.cli", "start", "--config", str(path)])
        return await written(config.dir / "coordinator.json", process)

    async def node(self, config: NodeConfig, bootstrap: tuple[str, ...] = (), info: JsonDict | None = None) -> Process:
        """Starts a node and waits for its first status."""
        known = tuple(info["bootstrap_peers"]) if info else bootstrap
        changes: JsonDict = {"directory": config.directory.model_copy(update={"bootstrap": known})}
        if info:
            link = {"address": info["listen"], "fingerprint": info["fingerprint"]}
            changes["coordinator"] = config.coordinator.model_copy(update=link)
        process = self.process(config.name, config.dir)
        config.dir.mkdir(parents=True, exist_ok=True)
        write_config(config.model_copy(update=changes), config.dir / "node.toml")
        await process.start(["node.cli", "start", "--config", str(config.dir / "node.toml")])
        await written(config.dir / "status.json", process)
        return process

    async def link(self) -> str:
        """Of a run with one node that trains and generates."""
        (config,) = self.configs(1)
        info = await self.coordinator(config)
        await self.node(config, info=info)
        return info["link"]

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Waits for something that the running processes bring about; fails when one of them dies."""
        await until(condition, what, processes=self.processes.values())

    async def stop(self) -> None:
        """Ends every process and whatever it started."""
        await asyncio.gather(*(process.stop() for process in self.processes.values()))


@pytest_asyncio.fixture(loop_scope="session")
async def swarm(tmp_path: Path, forks: ForkServer | None) -> AsyncIterator[Swarm]:
    """Processes below the test's directory."""
    running = Swarm(tmp_path, forks)
    yield running
    await running.stop()


Command = Callable[..., Awaitable[tuple[int, str, str]]]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Runs `python -m <arguments>` somewhere else than in the checkout; gives exit code, stdout and stderr."""

    async def run(*arguments: object) -> tuple[int, str, str]:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            *map(str, arguments),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=tmp_path,
        )
        try:
            out, err = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode is not None
        return process.returncode, out.decode(), err.decode()

    return run
