"""Fork server of a local swarm, client side: nodes are forked from one process that has imported torch (Linux).

Eight tiny nodes on two cores make their first step after 12 to 16 s instead of 31 to 36, in 1.9 GiB instead of 3.9.
multiprocessing's forkserver preloads modules too, but a fork of it has no session, log and environment of its own,
outlives a killed server, and is no awaitable process with `python -m` as its program: what most of these lines do.

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
LOST = -signal.SIGKILL  # exit code of a process that nobody was left to wait for


class Forked:
    """A process that was forked, with what `asyncio.subprocess.Process` offers of it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = asyncio.Event()

    async def wait(self) -> int:
        """Waits for its end; its exit code, or minus the signal that ended it."""
        await self._ended.wait()
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """SIGTERM to this process alone. Raises ProcessLookupError where it has ended."""
        os.kill(self.pid, signal.SIGTERM)

    def end(self, code: int) -> None:
        """Records its exit code, as the fork server reported it."""
        self.returncode = code
        self._ended.set()


class ForkServer:
    """Client of the server process: `fork` starts `python -m <arguments>` without the imports."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log
        self._requests: deque[asyncio.Future[Forked]] = deque()
        self._running: dict[int, Forked] = {}

    async def fork(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
        """Starts a process that writes to the end of a file.

        Raises:
            Unavailable: the fork server has ended, does not answer, or could not fork.
        """
        assert self._process.stdin is not None
        self.check()
        future: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._requests.append(future)
        request = {"arguments": [*arguments], "environment": {**environment}, "log": str(log)}
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        pid = self._process.pid  # alone: what was forked before works on
        if not await comes(future, partial(cpu_s, pid, is_whole_tree=False), SILENCE_S, math.inf):
            raise Unavailable(f"the fork server used no CPU for {SILENCE_S:.0f} s and forked nothing; see {self._log}")
        return future.result()

    def check(self) -> None:
        """Raises Unavailable when it has ended: what was forked from it has ended with it."""
        if self._process.returncode is not None:
            raise Unavailable(self._end())

    def _end(self) -> str:
        code = self._process.returncode
        return f"the fork server, and every node with it, ended with exit code {code}; see {self._log}"

    async def listen(self) -> None:
        """Reads which process was forked and which has ended, until the server ends."""
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
    """A fork server that has imported `modules`; None where forking after imports is unsafe: each process begins anew.

    Args:
        modules: imported before the first fork; a module that fails to import is left to the forks that need it.
        log: gets everything that the imports print.
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
    """Environment of the processes of a local swarm: one thread each, since many share few cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
