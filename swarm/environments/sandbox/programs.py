"""Programs for the judge in a scoring process: run on an input, or called function by function, in another process.

Invariant: a program gets its inputs and gives bytes or plain values; tests and expected outputs stay here.
"""

import builtins
import json
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, Self, cast

from swarm.environments.sandbox.plain_values import decode, encode, read_frame, write_frame


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramLimits:
    """Limits of one process of a program."""

    cpu_s: float
    memory_bytes: int  # of address space beyond that of the bare interpreter


_ENDS_OF_LOOPS: Final = (StopIteration, StopAsyncIteration)  # a test that maps a function would end, and pass


class ProgramEnded(BaseException):  # no Exception: a test that expects one is not passed by a program that died
    """A program ended, or was ended, before a function returned."""


class HostGone(BaseException):  # no Exception either: no answer loses reward for it
    """The processes that carry out programs ended; this scoring process can score no program any more."""


class ProgramRaised(Exception):
    """A function of a program raised an exception that is not built in, or the end of an iteration."""


@dataclass(slots=True)
class _Host:
    """The socket to the keeper of this scoring process; -1: there is none."""

    socket: int = -1
    is_asked: bool = False  # and has not answered yet
    cpu_s: float = 0.0  # of all programs that ended, since the last `take_cpu_s`


_HOST: Final = _Host()


def use_host(socket: int) -> None:
    """Sets the socket of the keeper that carries out programs for this process."""
    _HOST.socket = socket


def require_host() -> None:
    """Raises RuntimeError in a process that has no keeper: neither programs nor their tests are carried out there."""
    if _HOST.socket < 0:
        raise RuntimeError("programs are carried out for the confined process that scores answers, and no other")


def is_asking() -> bool:
    """True while an answer of the keeper is awaited; an exception must not interrupt its reading."""
    return _HOST.is_asked


def take_cpu_s() -> float:
    """CPU seconds that programs took since the last call."""
    taken_s, _HOST.cpu_s = _HOST.cpu_s, 0.0
    return taken_s


class Program:
    """A program in a process of its own, as a context manager; `ended` says how it ended, "" while it runs.

    Ends: "done" (by itself, with status 0), "failed" (otherwise), "cpu" (over `cpu_s`), "hung" (no CPU time for HANG_S,
    or over HANG_S + SLOWEST_PACE x its CPU time in all) and "output" (it wrote more than MAX_OUTPUT_BYTES).

    Example:
        with Program("print(int(input()) + 1)", limits) as program:
            assert program.output("1") == "2\\n" and program.ended == "done"
        with Program("def f(x): return x + 1", limits) as program:
            assert program.call("f", 1) == 2
    """

    def __init__(self, source: str, limits: ProgramLimits) -> None:
        self._source, self._limits = source, limits
        self._is_begun = False
        self.ended = ""
        self.cpu_s = 0.0

    def output(self, text: str) -> str:
        """All that the program prints, with `text` as its standard input, until it ends in any way."""
        return self._give(self._begin(has_calls=False), text, has_calls=False)

    def call(self, name: str, *arguments: object) -> Any:
        """The value of a function of the program, or of a method of its class Solution, for plain arguments.

        Raises:
            ProgramEnded: the program ended, now or before.
            ValueError: it returned no plain value (`plain_values`).
            Exception: the one that the function raised, without its message; ProgramRaised for other classes.
        """
        if not self._is_begun:
            self._give(self._begin(has_calls=True), "", has_calls=True)
        if self.ended:
            raise ProgramEnded(self.ended)
        reply = self._give({"name": name, "arguments": encode(arguments).decode()}, "", has_calls=True)
        if self.ended:
            raise ProgramEnded(self.ended)
        if reply.startswith("="):
            return decode(reply[1:].encode())
        raised = getattr(builtins, reply[1:], None)
        if isinstance(raised, type) and issubclass(raised, Exception) and not issubclass(raised, _ENDS_OF_LOOPS):
            raise raised
        raise ProgramRaised(reply[1:][:80])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _HOST.is_asked = True
        if self._is_begun and not self.ended:
            with suppress(OSError):
                write_frame(_HOST.socket, b"null")
        _HOST.cpu_s += self.cpu_s
        _HOST.is_asked = False

    def _begin(self, *, has_calls: bool) -> dict[str, Any]:
        require_host()
        self._is_begun = True
        limits = {"cpu_s": self._limits.cpu_s, "memory_bytes": self._limits.memory_bytes}
        return {"source": self._source, "has_calls": has_calls, **limits}

    def _give(self, frame: dict[str, Any], text: str, *, has_calls: bool) -> str:
        request = {"frame": frame, "text": text, "has_calls": has_calls}
        _HOST.is_asked = True
        try:
            write_frame(_HOST.socket, json.dumps(request).encode())
            answer = read_frame(_HOST.socket)
        except OSError:
            answer = b""
        finally:
            _HOST.is_asked = False
        if not answer:
            raise HostGone
        reply = cast("dict[str, Any]", json.loads(answer))
        self.ended, self.cpu_s = str(reply["ended"]), float(reply["cpu_s"])
        return str(reply["output"])
