"""Worker process of a node: started beside the agent, and started again with a pause when it dies.

Invariant: it does not outlive the agent's loop; a configuration that it cannot work with is an error, and no restart.
"""

import asyncio
import logging
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from node.worker import EXIT_CONFIG
from swarm.config import NodeConfig
from swarm.errors import ConfigError
from swarm.events import Event, WorkerDied
from swarm.exchange.agent import Agent
from swarm.exchange.local_rpc import LocalServer, fresh_socket
from swarm.flow import Backoff
from swarm.process import thread_limits
from swarm.wire.run_manifest import write_toml

logger = logging.getLogger(__name__)

_DRAIN_TIMEOUT_S: Final = 20.0  # then its step is cut off, and made again later: who stops a node waits 45 s
_LOOK_FOR_ROOM_EVERY_S: Final = 1.0


class WorkerProcess:
    """Runs `node.worker` on the agent's local socket until every step is made.

    Example:
        await WorkerProcess(emit).run(config, agent)
    """

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self.num_restarts = 0

    async def run(self, config: NodeConfig, agent: Agent) -> None:
        """Serves the agent to its worker; one that dies is started again and resumes from its checkpoint.

        Raises:
            ConfigError: the worker cannot work with this configuration.
        """
        socket = fresh_socket(config.dir.resolve())
        server = LocalServer(agent.local, socket)
        await server.start()
        resolved = config.dir.resolve() / "worker.toml"
        await _write_when_there_is_room(config, resolved)
        arguments = ["-m", "node.worker", "--config", str(resolved), "--socket", str(socket)]
        arguments += ["--parent", str(os.getpid())]
        environment = {**os.environ, **thread_limits(config.num_threads)}
        try:
            backoff = Backoff(random.Random(agent.node_id), first_s=1.0, longest_s=60.0)
            while (code := await _run_once(arguments, environment)) != 0:
                logger.error("worker died; starting it again", extra={"exit_code": code})
                self._emit(WorkerDied(exit_code=code))
                agent.num_failures += 1
                self.num_restarts += 1
                await backoff.wait()
        finally:
            await server.stop()


async def _run_once(arguments: list[str], environment: dict[str, str]) -> int | None:
    """The exit code of one worker. Raises ConfigError where it says that its configuration is wrong."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, env=environment, stdout=asyncio.subprocess.PIPE
    )
    try:
        reason, _ = await process.communicate()  # its log goes to stderr, a ConfigError to stdout
        code = process.returncode
    finally:
        if process.returncode is None:
            await _stop(process)
    if code == EXIT_CONFIG:
        lines = reason.decode(errors="replace").strip().splitlines()  # every rank prints it
        raise ConfigError("\n".join(dict.fromkeys(lines)))
    return code


async def _write_when_there_is_room(config: NodeConfig, path: Path) -> None:
    is_logged = False
    while True:
        try:
            return await asyncio.to_thread(write_toml, config.model_dump(mode="json"), path)
        except OSError as error:
            if not is_logged:
                extra = {"file": str(path), "error": str(error)}
                logger.error("the worker starts once there is room on the disk for its configuration", extra=extra)
            is_logged = True
        await asyncio.sleep(_LOOK_FOR_ROOM_EVERY_S)


async def _stop(process: asyncio.subprocess.Process) -> None:
    process.terminate()
    try:
        async with asyncio.timeout(_DRAIN_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
