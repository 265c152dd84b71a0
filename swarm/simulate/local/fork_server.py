"""Fork server of a local swarm, client side: nodes are forked from one process that has imported torch (Linux).

Eight tiny nodes on two cores make their first step after 12 to 16 s instead of 31 to 36, in 1.9 GiB instead of 3.9.
multiprocessing's forkserver preloads modules too, but a fork of it shares session, log and environment, outlives a
killed server, and is no awaitable process that runs `python -m`. Most lines here supply these features.

Invariant: every fork dies with the fork server, and the server with its parent. The server process is
`swarm.simulate.local.fork_child`.
"""

import asyncio
import contextlib
import json
import math
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from pathlib import Path

from swarm.errors import Unavailable
from swarm.process import can_fork_after_imports, comes, cpu_s
from swarm.types import JsonDict

# Not hivemind: its locks between processes are made as it is imported, and forks would share them.
OF_AGENTS = (
    "torch",
    "coordinator.daemon",
    "node.daemon",
    "swarm.peers.coordinator_client",
    "swarm.peers.discovery_dht",
)
OF_WORKERS = (
    "node.build",
    "swarm.generation.produce",
    "swarm.environments.load",
    "swarm.learn.learner",
    "transformers.models.llama.modeling_llama",
)
SILENCE_S = 120.0  # without CPU used by the imports
END_S = 5.0
LOST = -signal.SIGKILL  # exit code of a process whose end the server did not report


class Forked:
    """A forked process, with the part of `asyncio.subprocess.Process` that a local swarm uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        """Waits for the end of the process; returns its exit code, or minus the number of the signal that ended it."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Sends SIGTERM to this process alone. Raises ProcessLookupError if there is no such process."""
        os.kill(self.pid, signal.SIGTERM)

    def end(self, code: int) -> None:
        """Records the exit code that the fork server reported."""
        self.returncode = code
        self._ended.set()


class ForkServer:
    """Client of the server process: `fork` starts `python -m <arguments>` without the time of the imports."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log
        self._requests: deque[asyncio.Future[Forked]] = deque()
        self._running: dict[int, Forked] = {}

    async def fork(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
        """Starts a process; its output is appended to `log`.

        Raises:
            Unavailable: the fork server has ended, does not answer, or could not fork.
        """
        assert self._process.stdin is not None
        self.check()
        future: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._requests.append(future)
        request = {"arguments": [*arguments], "environment": {**environment}, "log": str(log)}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        pid = self._process.pid  # not its tree: earlier forks use CPU, too
        if not await comes(future, partial(cpu_s, pid, is_whole_tree=False), SILENCE_S, math.inf):
            raise Unavailable(f"the fork server used no CPU for {SILENCE_S:.0f} s and forked nothing; see {self._log}")
        return future.result()

    def check(self) -> None:
        """Raises Unavailable if the fork server has ended; its forks have then ended as well."""
        if self._process.returncode is not None:
            raise Unavailable(self._end())

    def _end(self) -> str:
        code = self._process.returncode
        return f"the fork server, and every node with it, ended with exit code {code}; see {self._log}"

    async def listen(self) -> None:
        """Handles the server's replies until the server ends; then kills what remains and fails open requests."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            reply: JsonDict = json.loads(line)
            if "ended" in reply:
                self._running.pop(reply["ended"]).end(reply["code"])
                continue
            future = self._requests.popleft()
            if "failed" in reply:
                _fail(future, reply["failed"])
                continue
            forked = self._running[reply["forked"]] = Forked(reply["forked"])
            if not future.cancelled():  # else it ends with the server
                future.set_result(forked)
        await self._process.wait()
        for forked in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(forked.pid, signal.SIGKILL)  # its children, which no kernel ends with the server
            forked.end(LOST)
        for future in self._requests:
            _fail(future, self._end())


def _fail(future: "asyncio.Future[Forked]", why: str) -> None:
    if not future.cancelled():
        future.set_exception(Unavailable(why))


@contextlib.asynccontextmanager
async def fork_server(modules: Sequence[str], log: Path) -> AsyncGenerator[ForkServer | None]:
    """A fork server that imports `modules`; None if forking after imports is unsafe, so that processes start normally.

    Args:
        modules: imported before the first fork; an import that fails is left to the forks that need it.
        log: file that gets everything that the imports print.
    """
    if not can_fork_after_imports():
        yield None
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "swarm.simulate.local.fork_child", *modules),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=sink,
            env=environment(),
            start_new_session=True,
        )
    server = ForkServer(process, log)
    listener = asyncio.create_task(server.listen())
    try:
        yield server
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        if not (await asyncio.wait([listener], timeout=END_S))[0]:
            process.kill()
        await listener


def environment() -> dict[str, str]:
    """Environment of the processes of a local swarm: one thread for each, since many share few cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
