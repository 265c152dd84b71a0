"""Scoring processes, as the node sees them: forked on demand, asked over a socket, killed if they misbehave.

Invariant: nothing of an answer is interpreted in the node's own process; a reply is bounded and parsed as JSON, and a
scoring process that misbehaves is killed, never waited for.
"""

import asyncio
import json
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, cast

from swarm.config import EnvironmentConfig, SandboxConfig
from swarm.environments.load import reads_files
from swarm.environments.sandbox.child import COMMAND_BYTES, FORK, KILL
from swarm.environments.sandbox.confinement_check import missing_limits
from swarm.errors import ConfigError, RolloutFailed
from swarm.interfaces import EnvironmentShape

logger = logging.getLogger(__name__)

NUM_SPARE: Final = 4  # of 2.5 MB each
PROCESS_CPU_S: Final = 20.0  # of one process before it is replaced, with all that answers left in it
MAX_REPLY_BYTES: Final = 16 * 2**20
START_HANG_S: Final = 600.0  # imports: 3 s beside four busy processes; no answer is involved
# The child sees nothing of our environment. One thread: a thread pool would count against its limits.
_CHILD_ENVIRONMENT: Final = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
_COMMAND: Final = (sys.executable, "-I", "-B", "-m", "swarm.environments.sandbox.child")


@dataclass(eq=False, kw_only=True, slots=True)
class ScoringProcess:
    """One confined process that scores answers, one request after the other."""

    pid: int
    limits: dict[str, bool]  # name -> True if the kernel enforces it
    cpu_s: float  # used, as of its last reply
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    taken_s: float = 0.0  # CPU seconds of its newest request, as the kernel counts them


@dataclass(eq=False, repr=False)
class ScoringProcesses:
    """Starts and ends the scoring processes of a node, all forks of one process that has imported everything.

    The forking process reads no answer. It is started when first needed, and again if it died.
    """

    _configs: tuple[EnvironmentConfig, ...]  # every environment that may be scored
    _limits: SandboxConfig
    answer_cpu_s: dict[str, float] = field(default_factory=dict[str, float], init=False)  # of each environment
    program_cpu_s: dict[str, float] = field(default_factory=dict[str, float], init=False)  # of an action's programs
    shapes: dict[str, EnvironmentShape] = field(default_factory=dict[str, EnvironmentShape], init=False)
    _parent: asyncio.subprocess.Process | None = field(default=None, init=False)
    _is_warm: bool = field(default=True, init=False)  # a first answer is scored before the first fork
    _control: socket.socket | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._turn = asyncio.Lock()  # commands and replies are not numbered
        self._is_warned = False
        self._num_parents = 0

    async def start(self) -> ScoringProcess:
        """Starts a process. Raises ConfigError if environments cannot be built, RolloutFailed if no process starts."""
        ours, theirs = socket.socketpair()
        try:
            # shielded: a command cut in two would end the processes of everybody
            pid = await asyncio.shield(self._fork(theirs))
            ours.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()  # the other side reads end of file and ends
            raise
        process = ScoringProcess(pid=pid, limits={}, cpu_s=0.0, reader=reader, writer=writer)
        try:
            async with asyncio.timeout(START_HANG_S):
                hello = await read_reply(reader)
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            await self.end(process)
            raise RolloutFailed(f"scoring process {pid} did not start: {_how(error)}") from None
        except BaseException:
            await self.end(process)
            raise
        process.limits = {str(name): value is True for name, value in hello["limits"].items()}
        process.cpu_s = float(hello["cpu_s"])
        if (missing := missing_limits(process.limits)) and not self._is_warned:
            self._is_warned = True
            logger.warning("scoring processes are not confined; swarm doctor says more", extra={"missing": missing})
        return process

    async def end(self, process: ScoringProcess) -> int:
        """Kills a process; returns the signal that had ended it before, 0 if there was none or it is unknown."""
        process.writer.close()
        return await asyncio.shield(self._kill(process.pid, self._num_parents))

    async def close(self) -> None:
        """Ends all processes, the forking one included; a later `start` starts it again."""
        async with self._turn:
            await self._stop()

    async def _fork(self, theirs: socket.socket) -> int:
        with theirs:
            async with self._turn:
                return int((await self._command(FORK, self._budget_s(), theirs))["pid"])

    async def _kill(self, pid: int, parent: int) -> int:
        async with self._turn:
            if self._control is None or parent != self._num_parents:
                return 0  # it ended with the process that forked it
            try:
                status = int((await self._command(KILL, pid))["status"])
            except RolloutFailed:
                return 0
        return 0 if status == signal.SIGKILL else status

    def _budget_s(self) -> int:
        return math.ceil(PROCESS_CPU_S + self._limits.timeout_s + 1)  # replaced before the kernel would kill it

    async def _command(self, letter: bytes, number: int, passed: socket.socket | None = None) -> dict[str, Any]:
        """Sends a command to the forking process, started if needed, and returns its reply. Raises as `start`."""
        try:
            control = await self._running()
            async with asyncio.timeout(START_HANG_S):
                descriptors = [] if passed is None else [passed.fileno()]
                message = letter + number.to_bytes(COMMAND_BYTES - 1)
                if socket.send_fds(control, [message], descriptors) != len(message):
                    raise EOFError
                return await _receive(control)
        except ConfigError:
            raise
        except (TimeoutError, OSError, EOFError, ValueError) as error:
            await self._stop()
            raise RolloutFailed(f"the process that forks scoring processes died: {_how(error)}") from None
        except BaseException:  # cancelled: the reply that is on its way would be taken for the next one's
            await self._stop()
            raise

    async def _running(self) -> socket.socket:
        if self._control is not None and self._parent is not None and self._parent.returncode is None:
            return self._control
        try:
            return await self._begin()
        except (TimeoutError, OSError, EOFError):
            if not self._is_warm:
                raise
            self._is_warm = False  # the first answer ended the process: let it end one that says so
            return await self._begin()

    async def _begin(self) -> socket.socket:
        await self._stop()
        control, theirs = socket.socketpair()
        control.setblocking(False)
        self._control = control
        self._num_parents += 1
        with theirs:
            self._parent = await asyncio.create_subprocess_exec(
                *_COMMAND,
                str(self._limits.memory_bytes),
                stdin=theirs.fileno(),
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.DEVNULL,
                env=_CHILD_ENVIRONMENT,
                cwd=None if any(reads_files(config) for config in self._configs) else "/",
                start_new_session=True,
            )
        configs = [config.model_dump(mode="json") for config in self._configs]
        request = {"environments": configs, "most_cpu_s": self._limits.timeout_s, "is_warm": self._is_warm}
        frame = json.dumps(request).encode()
        async with asyncio.timeout(START_HANG_S):
            await asyncio.get_running_loop().sock_sendall(control, len(frame).to_bytes(4) + frame)
            hello = await _receive(control)
        if hello.get("error") == "config":
            await self._stop()
            raise ConfigError(str(hello.get("detail")))
        self.answer_cpu_s = {str(name): float(value) for name, value in hello["answer_cpu_s"].items()}
        self.program_cpu_s = {str(name): float(value) for name, value in hello["program_cpu_s"].items()}
        for name, (verifier, max_turns) in hello["shapes"].items():
            self.shapes[str(name)] = EnvironmentShape(verifier=str(verifier), max_turns=int(max_turns))
        return control

    async def _stop(self) -> None:
        parent, self._parent = self._parent, None
        control, self._control = self._control, None
        if control is not None:
            control.close()
        if parent is None:
            return
        with suppress(ProcessLookupError, PermissionError):  # the second on macOS, where all of them have ended
            os.killpg(parent.pid, signal.SIGKILL)  # and all that it forked
        await asyncio.shield(parent.wait())


class SpareProcesses:
    """Pre-forked scoring processes, at most NUM_SPARE, none before the first `take`; ends processes in the background.

    Example:
        process = spares.take() or await processes.start()
        ...
        spares.end(process)  # returns at once
    """

    def __init__(self, processes: ScoringProcesses) -> None:
        self._processes = processes
        self._waiting: list[ScoringProcess] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._is_filling = False
        self.num_started = 0

    def take(self) -> ScoringProcess | None:
        """A spare process, or None; either way the spares are refilled in the background."""
        taken = None
        while self._waiting and taken is None:
            process = self._waiting.pop()
            if process.reader.at_eof():  # killed by somebody else
                self.end(process)
            else:
                taken = process
        if not self._is_filling:
            self._is_filling = True
            self._begin(self._fill())
        return taken

    def end(self, process: ScoringProcess) -> None:
        """Ends a process in the background."""
        process.writer.close()  # at once: `close` may cancel the task before it begins
        self._begin(self._processes.end(process))

    async def close(self) -> None:
        """Ends the spare processes, and cancels the work in the background."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for process in self._waiting:
            process.writer.close()
        self._waiting.clear()

    async def _fill(self) -> None:
        try:
            while len(self._waiting) < NUM_SPARE:
                self._waiting.append(await self._processes.start())
                self.num_started += 1
        except (RolloutFailed, ConfigError):
            logger.debug("no spare scoring process could be started", exc_info=True)  # a `start` that needs one raises
        finally:
            self._is_filling = False

    def _begin(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _how(error: Exception) -> str:
    return f"silent for {START_HANG_S:.0f} s" if isinstance(error, TimeoutError) else type(error).__name__


async def read_reply(reader: asyncio.StreamReader) -> dict[str, Any]:
    """Reads a possibly hostile reply. Raises EOFError, OSError, ValueError, and RecursionError for deep nesting."""
    size = int.from_bytes(await reader.readexactly(4))
    if size > MAX_REPLY_BYTES:
        raise ValueError(f"reply of {size} bytes exceeds {MAX_REPLY_BYTES}")
    return _parse(await reader.readexactly(size))


async def _receive(control: socket.socket) -> dict[str, Any]:
    size = int.from_bytes(await _receive_exactly(control, 4))
    return _parse(await _receive_exactly(control, size))


async def _receive_exactly(control: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = await asyncio.get_running_loop().sock_recv(control, size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _parse(data: bytes) -> dict[str, Any]:
    reply = json.loads(data)
    if not isinstance(reply, dict):
        raise ValueError("reply is not an object")
    return cast("dict[str, Any]", reply)
