"""Fork server of a local swarm, the server process: `python -m swarm.simulate.local.fork_child MODULE ...`.

A line of JSON on standard input starts a process; standard output has a line of JSON for each process that was started
or has ended.

Invariant: the process that forks has one thread and has done nothing but import; a fork has its own session, signals
and files before the client gets its process id.
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
    """Imports modules, then forks for each line of standard input; a fork runs as `python -m <arguments>`."""
    defer_gc()
    replies = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what an import prints is no reply
    for name in sys.argv[1:]:
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()  # the fork that needs it fails with the same error
    freeze_gc()
    arguments = _Server(sys.stdin.fileno(), replies).serve()
    if arguments is not None:
        sys.argv = arguments
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


class _Server:
    """Forks on request and reports each fork that has ended."""

    def __init__(self, requests: int, replies: int) -> None:
        self._requests, self._replies = requests, replies
        self._woken, self._wake = os.pipe()  # written by every signal
        os.set_blocking(self._wake, False)
        self._children: set[int] = set()
        self._is_ending = False
        self._obstacle = _obstacle()
        if self._obstacle:
            print(self._obstacle, file=sys.stderr)

    def serve(self) -> list[str] | None:
        """Forks until SIGTERM or end of input, then kills the forks; returns None, and in a fork its arguments."""
        own_pid = os.getpid()
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, self._end)
        try:
            return self._handle_requests()
        finally:
            if os.getpid() == own_pid:
                for pid in self._children:
                    with contextlib.suppress(ProcessLookupError):  # somebody killed it before it had a session
                        os.killpg(pid, signal.SIGKILL)
                self._report_ended(wait=True)

    def _handle_requests(self) -> list[str] | None:
        unread = b""
        with selectors.DefaultSelector() as selector:
            for descriptor in (self._requests, self._woken):
                selector.register(descriptor, selectors.EVENT_READ)
            while not self._is_ending:
                ready = {key.fd for key, _ in selector.select()}
                if self._woken in ready:
                    os.read(self._woken, 4096)
                    self._report_ended()
                if self._requests in ready:
                    read = os.read(self._requests, 65536)
                    self._is_ending = self._is_ending or not read
                    *lines, unread = (unread + read).split(b"\n")
                    for line in lines:
                        request: JsonDict = json.loads(line)
                        if self._fork(request):
                            return request["arguments"]
        return None

    def _end(self, *_: object) -> None:
        self._is_ending = True

    def _report_ended(self, wait: bool = False) -> None:
        for pid in sorted(self._children):
            done, status = os.waitpid(pid, 0 if wait else os.WNOHANG)
            if done:
                self._children.discard(pid)
                self._reply({"ended": pid, "code": os.waitstatus_to_exitcode(status)})

    def _reply(self, reply: JsonDict) -> None:
        with contextlib.suppress(BrokenPipeError):  # the client is gone; the requests end as well
            os.write(self._replies, json.dumps(reply).encode() + b"\n")

    def _fork(self, request: JsonDict) -> bool:
        """Returns True in the fork; in the server, waits until the fork is detached, reports it and returns False."""
        own_pid = os.getpid()
        is_open, is_ready = os.pipe()
        signals = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
        except OSError as error:
            self._reply({"failed": f"a process could not be forked: {error}"})
            pid = -1
        if pid == 0:
            os.close(is_open)
            self._detach(own_pid)
            signal.pthread_sigmask(signal.SIG_SETMASK, signals)
            os.close(is_ready)
            self._begin(request)
            return True
        os.close(is_ready)
        if pid > 0:
            os.read(is_open, 1)  # until the fork has closed its end
            self._children.add(pid)
            self._reply({"forked": pid})
        os.close(is_open)
        signal.pthread_sigmask(signal.SIG_SETMASK, signals)
        return False

    def _detach(self, parent: int) -> None:
        """Gives a fork its own session without the server's signal handlers and pipes; the fork dies with `parent`."""
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in (self._woken, self._wake, self._replies):
            os.close(descriptor)
        die_with(parent)

    def _begin(self, request: JsonDict) -> None:
        """Sets output and environment of a fork; if forking was unsafe, replaces the fork by a new process."""
        null = os.open(os.devnull, os.O_RDONLY)
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for source, target in ((null, 0), (log, 1), (log, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(log)
        if self._obstacle:
            os.execve(sys.executable, [sys.executable, "-m", *request["arguments"]], request["environment"])
        os.environ.clear()
        os.environ.update(request["environment"])


def _obstacle() -> str:
    """Reason why this process cannot be forked after its imports; "" if there is none."""
    if len(list(Path("/proc/self/task").iterdir())) > 1:
        return STARTED_A_THREAD
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the listing itself
            if str(descriptor.readlink()).startswith(_GPUS):
                return OPENED_A_GPU
    return ""


if __name__ == "__main__":
    main()
