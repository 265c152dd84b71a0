"""The processes that carry out programs: `python -P -s -B -m swarm.environments.sandbox.program_host MEMORY_BYTES`.

A fresh interpreter that holds nothing of an environment. For each scoring process it forks a keeper; the keeper forks a
supervisor for each program, and the supervisor forks the program's process before it reads the request.

Invariant: the process of a program has its own source and inputs, and nothing else of any task: no test, no expected
output, no other answer, and no descriptor but its pipes. What it writes is bytes for the scoring process, and how it
ends can only take a reward away.
"""

import atexit
import datetime
import gc
import importlib
import itertools
import json
import math
import os
import random
import resource
import select
import signal
import socket
import sys
import time
import types
import typing
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Never

from swarm.environments.sandbox.confine import (
    forbid_system_calls,
    hide_files,
    leave_readable,
    limit_memory,
    limit_process,
    limit_scoring,
)
from swarm.environments.sandbox.confinement_check import file_outside, refusals
from swarm.environments.sandbox.plain_values import decode, encode, read_frame, write_frame

MAX_OUTPUT_BYTES: Final = 2**20  # that a program prints, or of a value that a function returns
HANG_S: Final = 5.0  # without CPU time: a busy machine gives some within it
# Wall-clock seconds for a CPU second, beyond HANG_S: a program that sleeps again and again delays its judge.
SLOWEST_PACE: Final = 100.0
START_S: Final = 946_684_800.0  # of the clock that programs see, 1 January 2000
TICK_S: Final = 0.001  # by which each reading advances that clock
NICE: Final = 5  # programs take what learner and generator leave
_TURN_S: Final = 0.02  # between two checks of the CPU time of a program
_CALLS, _VALUES = 3, 4  # descriptors of a program whose functions are called
_MAX_DESCRIPTORS: Final = 64
_MODULES: Final = (
    "abc array ast base64 binascii bisect calendar cmath codecs collections.abc contextlib copy csv dataclasses "
    "decimal difflib enum fractions functools graphlib hashlib heapq html inspect io itertools json keyword "
    "locale math numbers operator pprint queue random re reprlib secrets shlex statistics string struct textwrap "
    "threading time tokenize traceback typing unicodedata unittest urllib.parse uuid weakref zlib encodings.ascii "
    "encodings.cp1252 encodings.idna encodings.latin_1 encodings.utf_16 encodings.utf_32 encodings.utf_8"
)
"""Modules that programs can import, with those that these import: a program opens no file."""


def main() -> None:
    """Confines this process, then forks a keeper for each socket that it receives, until end of file."""
    limit_process(int(sys.argv[1]))
    control = socket.socket(fileno=os.dup(0))
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    for name in _MODULES.split():
        importlib.import_module(name)
    own_bytes = _address_space()
    outside = file_outside([])
    hide_files([])
    os.nice(NICE)
    gc.collect()
    gc.freeze()
    write_frame(control.fileno(), json.dumps(_tried(outside)).encode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for keepers
    while True:
        message, descriptors, *_ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        if os.fork() == 0:
            control.close()
            _keep(descriptors[0], own_bytes)
        os.close(descriptors[0])


def _address_space() -> int:
    """Bytes of this process's address space, to which the memory limit of a program is added."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()


def _tried(outside: str) -> dict[str, bool]:
    """Name of each limit -> True if a test process, confined like a program, was refused what the limit forbids."""
    reader, writer = os.pipe()
    parent, pid = os.getpid(), os.fork()
    if pid == 0:
        with suppress(BaseException):
            _confine(parent, 1.0, 2**30)
            write_frame(writer, json.dumps(refusals(outside)).encode())
        os._exit(0)
    os.close(writer)
    found = read_frame(reader)
    os.close(reader)
    os.waitpid(pid, 0)
    return json.loads(found) if found else {}


def _keep(scorer: int, own_bytes: int) -> Never:
    """Forks a supervisor for each program of a scoring process, one after the other; reads no request itself."""
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        is_served = True
        while is_served:
            select.select([scorer], [], [])
            pid = os.fork()
            if pid == 0:
                _supervise(scorer, own_bytes)
            is_served = os.waitpid(pid, 0)[1] == 0  # else the scoring process ended, or its supervisor died
    finally:
        os._exit(0)


def _supervise(scorer: int, own_bytes: int) -> Never:
    """Forks the process of a program, then reads requests, so that the process holds only what it is sent."""
    status = 1
    try:
        inwards, outwards = os.pipe(), os.pipe()
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            _become_program(inwards[0], outwards[1], parent, own_bytes)
        os.close(inwards[0])
        os.close(outwards[1])
        program = _Program(pid, inwards[1], outwards[0])
        try:
            while (request := json.loads(read_frame(scorer))) is not None:
                reply = program.give(scorer, request)
                write_frame(scorer, json.dumps(reply).encode())
                if reply["ended"]:
                    break
            status = 0
        finally:
            program.kill()
    finally:
        os._exit(status)


class _Program:
    """The process of a program, as its supervisor sees it."""

    def __init__(self, pid: int, to: int, source: int) -> None:
        self._pid, self._to, self._from = pid, to, source
        self._exit = [os.pidfd_open(pid)] if hasattr(os, "pidfd_open") else list[int]()
        self._most_cpu_s, self._cpu_s, self._waited_s = 0.0, 0.0, 0.0
        for descriptor in (to, source):
            os.set_blocking(descriptor, False)

    def give(self, scorer: int, request: dict[str, Any]) -> dict[str, Any]:
        """Hands a program its source and input, or the call of a function; returns what it wrote, and how it ended.

        Without calls, `output` is all that the program prints until it ends, else one value. `ended` is "" while it
        runs, "done", "failed", "cpu", "hung" or "output". Raises EOFError if the scoring process ended.
        """
        frame, text, has_calls = request["frame"], request["text"], request["has_calls"]
        self._most_cpu_s, data = frame.get("cpu_s", self._most_cpu_s), json.dumps(frame).encode()
        left = memoryview(len(data).to_bytes(4) + data + text.encode("utf-8", "surrogatepass"))
        output, ended, began_s = bytearray(), "", time.monotonic() - self._waited_s
        moved_s = time.monotonic()
        while not ended and not (has_calls and len(output) >= _length(output)):
            if not left and not has_calls and self._to >= 0:
                os.close(self._to)
                self._to = -1
            reads = [each for each in (self._from, scorer, *self._exit) if each >= 0]
            reads, writes, _ = select.select(reads, [self._to] if left else [], [], _TURN_S)
            if scorer in reads:
                raise EOFError
            if writes:
                try:
                    left = left[os.write(self._to, left[: 2**16]) :]
                except BrokenPipeError:
                    left = left[:0]
            used_s, self._waited_s = self._cpu_s, time.monotonic() - began_s
            status = self._look()
            self._read(output)
            if self._cpu_s > used_s:
                moved_s = time.monotonic()
            if len(output) > MAX_OUTPUT_BYTES or (has_calls and _length(output) > MAX_OUTPUT_BYTES):
                ended = "output"
            elif self._cpu_s > self._most_cpu_s or status == signal.SIGKILL:  # by RLIMIT_CPU
                ended = "cpu"
            elif status is not None:
                ended = "failed" if status else "done"
            elif max(time.monotonic() - moved_s, self._waited_s - SLOWEST_PACE * self._cpu_s) > HANG_S:
                ended = "hung"
        value = bytes(output[4:] if has_calls else output)
        return {"ended": ended, "output": value.decode("utf-8", "replace"), "cpu_s": self._cpu_s}

    def _look(self) -> int | None:
        """Updates the CPU time; returns the exit status once the program has ended, else None."""
        pid, status, usage = os.wait4(self._pid, os.WNOHANG) if self._pid else (0, 0, None)
        if usage is not None and pid:
            self._pid, self._exit, self._cpu_s = 0, [], usage.ru_utime + usage.ru_stime
            return status
        with suppress(OSError):
            self._cpu_s = time.clock_gettime(~self._pid << 3 | 2)  # CPUCLOCK_SCHED of that process
        return None

    def _read(self, output: bytearray) -> None:
        """Adds the bytes that the program has written, up to 2^16 bytes beyond MAX_OUTPUT_BYTES."""
        with suppress(BlockingIOError):
            while self._from >= 0 and len(output) <= MAX_OUTPUT_BYTES:
                part = os.read(self._from, 2**16)
                output += part
                if not part:
                    os.close(self._from)
                    self._from = -1

    def kill(self) -> None:
        """Kills the program; its supervisor ends next, so nobody reaps it."""
        if self._pid:
            os.kill(self._pid, signal.SIGKILL)


def _length(output: bytearray) -> int:
    """Size of the frame at the start of `output` in bytes, the 4 bytes of its length included."""
    return 4 + int.from_bytes(output[:4]) if len(output) >= 4 else 4


def _become_program(source: int, sink: int, parent: int, own_bytes: int) -> Never:
    """Reads the program from `source`, gives up all rights and runs it; the bytes after the program are its input."""
    status = 1
    try:
        request = json.loads(read_frame(source))
        kept = (_CALLS, _VALUES) if request["has_calls"] else (0, 1)
        os.dup2(source, 62)
        os.dup2(sink, 63)
        os.dup2(62, kept[0])
        os.dup2(63, kept[1])
        os.closerange(max(3, kept[1] + 1), _MAX_DESCRIPTORS)
        _hide_clock()
        random.seed(0)
        _confine(parent, request["cpu_s"], own_bytes + request["memory_bytes"])
        status = _run(request["source"], has_calls=request["has_calls"])
    finally:
        os._exit(status)


def _confine(parent: int, cpu_s: float, memory_bytes: int) -> None:
    """Gives up the rights of this process for good; `_tried` tests the effect."""
    limit_scoring(math.ceil(cpu_s) + 1, parent)
    limit_memory(memory_bytes)
    leave_readable([])
    forbid_system_calls()


def _hide_clock() -> None:
    """Makes `time` and `datetime` count their calls: equal programs see equal times, and `sleep` returns at once."""
    looks = itertools.count(1)

    def now_s() -> float:
        return START_S + next(looks) * TICK_S

    class Datetime(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Datetime":
            return cls.fromtimestamp(now_s(), tz)

        @classmethod
        def utcnow(cls) -> "Datetime":
            return cls.fromtimestamp(now_s())

    for name in ("time", "monotonic", "perf_counter", "process_time", "thread_time"):
        setattr(time, name, now_s)
        setattr(time, f"{name}_ns", lambda: int(now_s() * 1e9))
    time.sleep = lambda seconds, /: None
    Datetime.__name__ = Datetime.__qualname__ = "datetime"
    datetime.datetime = Datetime  # pyright: ignore[reportAttributeAccessIssue]


def _run(source: str, *, has_calls: bool) -> int:
    """Runs a program, then the requested functions; returns the exit status, 1 if the program raised."""
    module = types.ModuleType("solution" if has_calls else "__main__")
    sys.modules[module.__name__] = module
    sys.stdin = open(0, encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    if has_calls:
        module.__dict__.update({name: value for name, value in vars(typing).items() if name in typing.__all__})
    status = 0
    try:
        exec(compile(source, "<program>", "exec"), module.__dict__)
        if has_calls:
            write_frame(_VALUES, b"=null")
        while has_calls:
            _call(module)
    except SystemExit as end:
        status = int(bool(end.code))
    except BaseException:
        status = 1
    with suppress(BaseException):
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        sys.stdout.flush()
    return status


def _call(module: types.ModuleType) -> None:
    """Calls one function of a program, or a method of its class Solution; writes its value or the class it raised."""
    request = json.loads(read_frame(_CALLS))
    name = request["name"]
    try:
        function = getattr(module, name) if hasattr(module, name) else getattr(module.Solution(), name)
        reply = b"=" + encode(function(*decode(request["arguments"].encode())))
    except Exception as error:  # of the program, which may raise anything
        reply = b"!" + type(error).__name__.encode()
    write_frame(_VALUES, reply)


if __name__ == "__main__":
    main()
