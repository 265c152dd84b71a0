"""The process that local swarms are forked from: `python -m swarm.simulate.local.fork_child MODULE ...`.

Standard input has a line of JSON for each process to start, standard output one for each that was started or has ended.

Invariant: what is forked has one thread and has done nothing but import; a fork has a session, signals and files of its
own before anybody learns of it.
"""

import contextlib
import importlib
import json
import os
import runpy
import selectors
import signal
import sys
import traceback
from pathlib import Path

from swarm.process import defer_gc, die_with, freeze_gc
from swarm.types import JsonDict

STARTED_A_THREAD = "an import started a thread, so processes begin anew, which takes seconds longer"
OPENED_A_GPU = "an import opened a GPU, so processes begin anew, which takes seconds longer"
_GPUS = ("/dev/nv", "/dev/kfd", "/dev/dri", "/dev/dxg")


def main() -> None:
    """Imports, then forks whenever its standard input asks for it. What is forked goes on from here."""
    defer_gc()
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what an import prints is no answer
    for name in sys.argv[1:]:
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()  # who needs it will say so
    freeze_gc()
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
        self._obstacle = _obstacle()
        if self._obstacle:
            print(self._obstacle, file=sys.stderr)

    def serve(self) -> list[str] | None:
        """Returns None at SIGTERM or the end of the questions, and in each fork what that one is to run."""
        own_pid = os.getpid()
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, self._end)
        try:
            return self._answer()
        finally:
            if os.getpid() == own_pid:
                for pid in self._children:
                    with contextlib.suppress(ProcessLookupError):  # somebody killed it before it had a session
                        os.killpg(pid, signal.SIGKILL)
                self._tell_ended(wait=True)

    def _answer(self) -> list[str] | None:
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
            os.write(self._answers, json.dumps(answer).encode() + b"\n")

    def _fork(self, asked: JsonDict) -> bool:
        """True in the fork; nobody learns of it before signals and files are its own."""
        own_pid = os.getpid()
        is_open, is_ready = os.pipe()
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
        except OSError as error:
            self._tell({"failed": f"a process could not be forked: {error}"})
            pid = -1
        if pid == 0:
            os.close(is_open)
            self._detach(own_pid)
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
            os.close(is_ready)
            self._begin(asked)
            return True
        os.close(is_ready)
        if pid > 0:
            os.read(is_open, 1)  # until the fork has closed its end
            self._children.add(pid)
            self._tell({"forked": pid})
        os.close(is_open)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        return False

    def _detach(self, parent: int) -> None:
        """Gives a fork a session of its own, none of the signal handlers and pipes, and an end with its parent."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in (self._woken, self._wake, self._answers):
            os.close(descriptor)
        die_with(parent)

    def _begin(self, asked: JsonDict) -> None:
        """Gives a fork its output and its environment; where it cannot go on as it is, it begins anew."""
        null = os.open(os.devnull, os.O_RDONLY)
        log = os.open(asked["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(log)
        if self._obstacle:
            os.execve(sys.executable, [sys.executable, "-m", *asked["arguments"]], asked["environment"])
        os.environ.clear()
        os.environ.update(asked["environment"])


def _obstacle() -> str:
    """Why what this process has imported cannot be forked; empty where it can."""
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        return STARTED_A_THREAD
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing itself
            if str(descriptor.readlink()).startswith(_GPUS):
                return OPENED_A_GPU
    return ""


if __name__ == "__main__":
    main()
