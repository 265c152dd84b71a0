"""A process that has imported what every node needs; those of a local swarm are forked from it (Linux).

Importing torch and transformers takes a node most of its start, and eight nodes on two cores wait for one another.
Forked ones begin at once, and share the memory of what was imported before them.

Invariant: whatever was forked has ended when the nursery has, and that one ends with whoever asked for it. This is the
side that asks; the process itself is `swarm.simulate.local.fork_child`.
"""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path

from swarm.errors import Unavailable
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
START_S = 120.0  # the imports, on a busy machine
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
        """What it ended with, as the nursery tells."""
        self.returncode = code
        self._ended.set()


class ForkServer:
    """The side that asks: `fork` starts `python -m <arguments>` without the imports."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self._process = process
        self._log = log
        self._asked: deque[asyncio.Future[Forked]] = deque()
        self._running: dict[int, Forked] = {}

    async def fork(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
        """Starts a process that writes to the end of a file.

        Raises:
            Unavailable: the nursery has ended, does not answer, or could not fork.
        """
        assert self._process.stdin is not None
        self.check()
        future: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        asked = {"arguments": [*arguments], "environment": {**environment}, "log": str(log)}
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        try:
            return await asyncio.wait_for(future, START_S)
        except TimeoutError:
            raise Unavailable(f"no process was forked within {START_S:.0f} s; see {self._log}") from None

    def check(self) -> None:
        """Raises Unavailable when it has ended: what was forked from it has ended with it."""
        if self._process.returncode is not None:
            raise Unavailable(self._end())

    def _end(self) -> str:
        code = self._process.returncode
        return f"the process that others are forked from ended with exit code {code}; see {self._log}"

    async def listen(self) -> None:
        """Takes note of who was forked and who has ended, until the nursery ends."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            said: JsonDict = json.loads(line)
            if "ended" in said:
                self._running.pop(said["ended"]).end(said["code"])
                continue
            future = self._asked.popleft()
            if "failed" in said:
                _fail(future, said["failed"])
                continue
            forked = self._running[said["forked"]] = Forked(said["forked"])
            if not future.cancelled():  # else it ends with the nursery
                future.set_result(forked)
        await self._process.wait()
        for forked in self._running.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(forked.pid, signal.SIGKILL)  # its children, which no kernel ends with the nursery
            forked.end(LOST)
        for future in self._asked:
            _fail(future, self._end())


def _fail(future: "asyncio.Future[Forked]", why: str) -> None:
    if not future.cancelled():
        future.set_exception(Unavailable(why))


@contextlib.asynccontextmanager
async def fork_server(modules: Sequence[str], log: Path) -> AsyncGenerator[ForkServer | None]:
    """A nursery that imports `modules`; None elsewhere than on Linux, where forking what has imported much is not safe.

    Args:
        modules: what is imported before the first fork; one that fails to be is left to those who need it.
        log: where everything goes that the imports print.
    """
    if sys.platform != "linux":
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
    asked = ForkServer(process, log)
    listener = asyncio.create_task(asked.listen())
    try:
        yield asked
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        if not (await asyncio.wait([listener], timeout=END_S))[0]:
            process.kill()
        await listener


def environment() -> dict[str, str]:
    """What the processes of a local swarm find in their environment: many share few cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
