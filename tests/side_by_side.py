"""Runs tests as pytest processes, two side by side, so that neither of two cores is idle.

`python tests/side_by_side.py test|check [flags for all]` prints what each says, line by line, and ends with the sum of
all, after what failed; with the flag `-x` the first failure ends everything. Each side has tests of its own first; who
is through with them takes the next part that is left, so that both end at about the same time on any machine. Workers
of pytest-xdist gained nothing here, nor did a third side of low priority. A side that says nothing for 30 minutes shows
where its threads stand and is killed: a test has a time limit of its own, but not what it leaves for pytest's end.
"""

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTCOMES = ("passed", "failed", "error", "errors", "skipped", "xfailed", "xpassed")
TOLD = ("--color=no", "--durations=10", "--durations-min=10")  # and what is slow, for whoever looks for time
Sides = dict[str, list[str]]
NUM_PARTS = 6  # of tests/integration, which is more than half of all
SILENCE_S = 1800.0  # a line of dots is 72 tests: 90 s on idle cores; one that hangs takes 300 s
LAST_WORDS_S = 10.0  # what pytest's own children may still print once it has ended


def sides_of(which: str) -> tuple[Sides, list[list[str]]]:
    """Name of each side -> what it runs first, and the parts that either takes then, the longest early."""
    if which == "test":  # one computes, beside one that mostly waits for processes
        files = _files("integration")
        first, *parts = [files[number::NUM_PARTS] for number in range(NUM_PARTS)]
        firsts = {"computes": ["tests/unit", "tests/packaging"], "waits": first}
        return firsts, [
            *parts[:2],
            ["tests/chaos"],
            ["tests/lab", "tests/golden"],
            *parts[2:],
            ["tests/property"],
            ["tests/extras"],
        ]
    unit = _files("unit")
    return {"even": [*unit[::2], "tests/property"], "odd": unit[1::2]}, []


def _files(folder: str) -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(f"tests/{folder}/test_*.py"))


class Side:
    """One side: a pytest process, and another one for each part that it takes after it."""

    def __init__(
        self,
        name: str,
        flags: tuple[str, ...],
        left: deque[list[str]],
        stop: threading.Event,
        silence_s: float = SILENCE_S,
    ) -> None:
        self.name = name
        self.others: list[Side] = []
        self.codes: list[int] = []
        self.endings: list[str] = []  # the closing line of each process
        self.failures: list[str] = []  # pytest's line on each, with the reason
        self._flags = flags
        self._left = left
        self._stop = stop
        self._silence_s = silence_s
        self._process: subprocess.Popen[str] | None = None

    def run(self, tests: list[str] | None) -> None:
        """Runs its own tests, then what is left."""
        while tests is not None and not self._stop.is_set():
            self._run_one(tests)
            try:
                tests = self._left.popleft()
            except IndexError:
                tests = None

    def interrupt(self) -> None:
        """Ctrl-C: pytest ends its fixtures, and so their daemons."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)

    def _run_one(self, tests: list[str]) -> None:
        command = [sys.executable, "-X", "faulthandler", "-m", "pytest", *TOLD, *self._flags, *tests]
        self._process = process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "BUILD_NUMBER": "0"},  # so that pytest tells a failure's whole reason
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        lines: queue.Queue[str | None] = queue.Queue()
        reader = threading.Thread(target=_read, args=(process, lines), daemon=True)  # an orphan may keep the pipe open
        reader.start()
        ending, heard_s, is_hung = "", time.monotonic(), False
        while True:
            try:
                line = lines.get(timeout=0.5)
            except queue.Empty:
                silent_s = time.monotonic() - heard_s
                if process.poll() is not None and silent_s > LAST_WORDS_S:
                    break  # it ended, but a process that it left behind holds the pipe
                if silent_s > self._silence_s and not is_hung:
                    is_hung = True
                    self._say(f"nothing for {silent_s:.0f} s: killed; this is where its threads stood:\n")
                    process.send_signal(signal.SIGABRT)  # faulthandler prints them
                continue
            if line is None:
                break
            self._say(line)
            heard_s, ending = time.monotonic(), line if line.strip() else ending
            if line.startswith(("FAILED ", "ERROR ")):
                self.failures.append(line.rstrip())
        with contextlib.suppress(ProcessLookupError):  # nobody is left of its group
            os.killpg(process.pid, signal.SIGKILL)
        self.codes.append(process.wait())
        self.endings.append(ending)
        if self.codes[-1] and "-x" in self._flags:
            self._stop.set()
            for other in self.others:
                other.interrupt()

    def _say(self, line: str) -> None:
        print(f"{self.name:8} | {line}", end="", flush=True)


def _read(process: subprocess.Popen[str], lines: queue.Queue[str | None]) -> None:
    assert process.stdout is not None
    with process.stdout as stdout:
        for line in stdout:
            lines.put(line)
    lines.put(None)


def main(which: str, *flags: str) -> int:
    """Runs `make test` or `make check`.

    Returns:
        Exit code 0 when everything passed, else the first other one.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the sides are sessions of their own: end them too
    firsts, left = sides_of(which)
    parts, stop = deque(left), threading.Event()
    sides = [Side(name, flags, parts, stop) for name in firsts]
    for side in sides:
        side.others = [other for other in sides if other is not side]
    threads = [threading.Thread(target=side.run, args=(firsts[side.name],)) for side in sides]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except KeyboardInterrupt:  # the terminal sends it to all as well
        stop.set()
        for side in sides:
            side.interrupt()
        for thread in threads:
            thread.join()
        return 130
    total = dict.fromkeys(OUTCOMES, 0)
    for ending in [ending for side in sides for ending in side.endings]:
        for count, outcome in re.findall(r"(\d+) (" + "|".join(OUTCOMES) + r")\b", ending):
            total[outcome] += int(count)
    failed = total["failed"] + total["error"] + total["errors"]
    for failure in [failure for side in sides for failure in side.failures]:
        print(failure)  # again: the end is what a log is cut down to
    unfinished = {side.name: code for side in sides for code in side.codes if code not in (0, 1)}
    if unfinished:
        print(f"not all tests ran: {', '.join(f'{name} ended with exit code {c}' for name, c in unfinished.items())}")
    print(f"{total['passed']} passed, {failed} failed, {total['skipped']} skipped")
    return next((code for side in sides for code in side.codes if code), 0)


if __name__ == "__main__":
    if sys.argv[1:2] not in (["test"], ["check"]):
        raise SystemExit("usage: python tests/side_by_side.py test|check [flags of pytest]")
    raise SystemExit(main(*sys.argv[1:]))
