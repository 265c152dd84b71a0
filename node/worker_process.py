"""Worker process of a node: started beside the agent, and started again with a pause when it dies.

Invariant: the worker does not outlive the agent's loop; an unusable configuration, or the same exception twice without
a step between, is an error and causes no restart.
"""

import asyncio
import logging
import os
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from node.worker import EXIT_CONFIG, EXIT_FAILED
from swarm.activity import Activity
from swarm.config import NodeConfig
from swarm.errors import ConfigError
from swarm.events import Event, WorkerDied
from swarm.exchange.agent import Agent
from swarm.exchange.local_rpc import LocalServer, fresh_socket
from swarm.flow import Backoff
from swarm.process import comes, cpu_s, thread_limits, work_of
from swarm.wire.run_manifest import write_toml

logger = logging.getLogger(__name__)

MOST_ALIKE: Final = 2  # ends with the same exception and without a step between; outside of a step
MOST_IN_STEP: Final = 16
_LOOK_FOR_ROOM_EVERY_S: Final = 1.0
_LOOK_AT_START_EVERY_S: Final = 1.0


class WorkerProcess:
    """Runs `node.worker` on the agent's local socket until every step is made.

    Example:
        await WorkerProcess(emit).run(config, agent)
    """

    def __init__(self, emit: Callable[[Event], None]) -> None:
        self._emit = emit
        self.num_restarts = 0

    async def run(self, config: NodeConfig, agent: Agent) -> None:
        """Serves the agent to its worker until every step is made; a worker that dies is started again after a pause.

        Raises:
            ConfigError: the worker cannot work with this configuration, or ended twice with the same exception.
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
            newest, num_alike = ("", 0.0), 0
            while (end := await _run_once(arguments, environment, agent))[0] != 0:
                code, error = end
                death = error, agent.last_step_at_s
                num_alike = num_alike + 1 if error and death == newest else 1
                newest = death
                # Within a step its groups are tried alone first, since one of them may be the cause.
                if num_alike >= (MOST_IN_STEP if agent.journal.is_under_way else MOST_ALIKE):
                    raise ConfigError(
                        f"the worker ended {num_alike} times with the same error and without a step between, so that "
                        f"another start would not help: {error}; its traceback is in the node's log"
                    )
                logger.error("worker died; starting it again", extra={"exit_code": code})
                self._emit(WorkerDied(exit_code=code))
                agent.num_failures += 1
                self.num_restarts += 1
                await backoff.wait()
        finally:
            await server.stop()


async def _run_once(arguments: list[str], environment: dict[str, str], agent: Agent) -> tuple[int | None, str]:
    """Runs one worker; returns its exit code and the exception that ended it, "" for another end or a passing one.

    Raises:
        ConfigError: the worker reports a wrong configuration.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, env=environment, stdout=asyncio.subprocess.PIPE
    )
    starting = asyncio.create_task(_follow_start(process.pid, agent))
    try:
        reason, _ = await process.communicate()  # its log goes to stderr, a ConfigError to stdout
        code = process.returncode
    finally:
        starting.cancel()
        if process.returncode is None:
            await _stop(process)
    lines = dict.fromkeys(reason.decode(errors="replace").strip().splitlines())  # every rank prints its own
    if code == EXIT_CONFIG:
        raise ConfigError("\n".join(lines))
    return code, "\n".join(sorted(lines)) if code == EXIT_FAILED else ""


async def _follow_start(pid: int, agent: Agent) -> None:
    """Stores the CPU time of a worker's imports as its sign of life, until the worker sends its own."""
    noted = agent.local.activity = None
    while agent.local.activity is noted:
        used_s = int(await asyncio.to_thread(cpu_s, pid))
        if agent.local.activity is noted and (noted is None or used_s > noted.done):
            noted = agent.local.activity = Activity(what="starting", done=used_s, at_s=agent.clock.now_s())
        await asyncio.sleep(_LOOK_AT_START_EVERY_S)


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
    """Ends a worker, which has time to finish a step and to write a checkpoint; kills it once it shows no more work."""
    process.terminate()
    if not await comes(process.wait(), partial(work_of, process.pid)):
        process.kill()
        await process.wait()
