"""A process that has imported what every node needs; those of a local swarm are forked from it (Linux).

Importing torch, transformers and hivemind takes a node four seconds of CPU, and eight nodes on two cores wait for one
another. Forked ones begin at once, and share the memory of what was imported before them.

Invariant: the process that is forked has one thread and does nothing but import; whatever was forked from it is a
session of its own, and is killed with its group when the simulation ends.
"""

import asyncio
import contextlib
import importlib
import json
import os
import runpy
import selectors
import signal
import sys
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path

from swarm.errors import Unavailable
from swarm.process import begin_start, settle
from swarm.types import JsonDict

OF_AGENTS = ("coordinator.daemon", "node.daemon", "swarm.exchange.coordinator_client", "swarm.exchange.dht", "hivemind")
OF_WORKERS = (
    "node.engines",
    "swarm.rollout.produce",
    "swarm.tasks.build",
    "swarm.learn.learner",
    "transformers.models.llama.modeling_llama",
)
_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd")  # an import may have spoken to one, and what is forked cannot any more
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


class Nursery:
    """The side that asks: `fork` starts `python -m <arguments>` without the imports."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._asked: deque[asyncio.Future[Forked]] = deque()
        self._running: dict[int, Forked] = {}

    async def fork(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> Forked:
        """Starts a process that writes to the end of a file.

        Raises:
            Unavailable: the nursery has ended.
        """
        assert self._process.stdin is not None
        if self._process.returncode is not None:
            raise Unavailable(f"the process that starts the others ended with exit code {self._process.returncode}")
        future: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._asked.append(future)
        self._process.stdin.write(_line({"arguments": [*arguments], "environment": {**environment}, "log": str(log)}))
        return await future

    async def listen(self) -> None:
        """Takes note of who was forked and who has ended, until the nursery ends."""
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            said: JsonDict = json.loads(line)
            if "forked" in said:
                forked, future = Forked(said["forked"]), self._asked.popleft()
                self._running[forked.pid] = forked
                if not future.cancelled():  # else it ends with the nursery
                    future.set_result(forked)
            else:
                self._running.pop(said["ended"]).end(said["code"])
        code = await self._process.wait()
        for forked in self._running.values():
            forked.end(LOST)
        for future in self._asked:
            if not future.cancelled():
                future.set_exception(Unavailable(f"the process that starts the others ended with exit code {code}"))


@contextlib.asynccontextmanager
async def nursery(modules: Sequence[str], log: Path) -> AsyncGenerator[Nursery | None]:
    """A nursery that imports `modules`; None where it is not safe to fork what has imported them.

    Args:
        modules: what is imported before the first fork; one that is not installed is left out.
        log: where everything goes that the imports print.
    """
    if not _is_safe():
        yield None
        return
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "swarm.simulate.nursery", *modules),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=sink,
            env=environment(),
            start_new_session=True,
        )
    asked = Nursery(process)
    listener = asyncio.create_task(asked.listen())
    try:
        yield asked
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await listener


def _is_safe() -> bool:
    return sys.platform == "linux" and not any(Path(driver).exists() for driver in _GPU_DRIVERS)


def environment() -> dict[str, str]:
    """What the processes of a local swarm find in their environment: many share few cores."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}


# --- the process itself ------------------------------------------------------------------------------


def main() -> None:
    """Imports, then forks whenever its standard input asks for it. What is forked goes on from here."""
    begin_start()
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what an import prints is no answer
    for name in sys.argv[1:]:
        with contextlib.suppress(ModuleNotFoundError):  # who needs it will say so
            importlib.import_module(name)
    settle()
    arguments = _Forks(sys.stdin.fileno(), answers).serve()
    if arguments is not None:
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


class _Forks:
    """What the process does: forks on request, and tells who has ended."""

    def __init__(self, questions: int, answers: int) -> None:
        self._questions, self._answers = questions, answers
        self._woken, self._wake = os.pipe()  # written by every signal
        os.set_blocking(self._wake, False)
        self._children: set[int] = set()
        self._is_ending = False
        num_threads = len(list(Path("/proc/self/task").iterdir()))
        self._must_execute = num_threads > 1  # a fork has only one
        if self._must_execute:
            print("an import started a thread: processes begin anew, and take seconds longer", file=sys.stderr)

    def serve(self) -> list[str] | None:
        """Returns None at SIGTERM or the end of the questions, and in each fork what that one is to run."""
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, self._end)
        unread = b""
        with selectors.DefaultSelector() as selector:
            for descriptor in (self._questions, self._woken):
                selector.register(descriptor, selectors.EVENT_READ)
            while not self._is_ending:
                ready = {key.fd for key, _ in selector.select()}
                if self._woken in ready:
                    os.read(self._woken, 4096)
                    self._tell_ended()
                if self._questions in ready:
                    read = os.read(self._questions, 65536)
                    self._is_ending = self._is_ending or not read
                    *lines, unread = (unread + read).split(b"\n")
                    for line in lines:
                        asked: JsonDict = json.loads(line)
                        if self._fork(asked):
                            return asked["arguments"]
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        self._tell_ended(wait=True)
        return None

    def _end(self, *_: object) -> None:
        self._is_ending = True

    def _tell_ended(self, wait: bool = False) -> None:
        for pid in sorted(self._children):
            done, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
            if done:
                self._children.discard(pid)
                self._tell({"ended": pid, "code": os.waitstatus_to_exitcode(status)})

    def _tell(self, answer: JsonDict) -> None:
        with contextlib.suppress(BrokenPipeError):  # who asked is gone; the questions end as well
            os.write(self._answers, _line(answer))

    def _fork(self, asked: JsonDict) -> bool:
        """True in the fork, which is by then what a process is that was started from a shell."""
        pid = os.fork()
        if pid:
            self._children.add(pid)
            self._tell({"forked": pid})
            return False
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in (self._woken, self._wake, self._answers):
            os.close(descriptor)
        null = os.open(os.devnull, os.O_RDONLY)
        log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(log)
        if self._must_execute:
            os.execve(sys.executable, [sys.executable, "-m", *asked["arguments"]], asked["environment"])
        os.environ.clear()
        os.environ.update(asked["environment"])
        return True


def _line(data: JsonDict) -> bytes:
    return json.dumps(data).encode() + b"\n"


if __name__ == "__main__":
    main()
