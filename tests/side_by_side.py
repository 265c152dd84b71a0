"""Runs tests as two pytest processes side by side, so that neither of two cores is idle.

`python tests/side_by_side.py test|check [flags for both]` prints what each says, line by line, and ends with the sum of
both; with the flag `-x` the first failure ends both. Workers of pytest-xdist gained nothing here.
"""

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[1]
OUTCOMES = ("passed", "failed", "error", "errors", "skipped", "xfailed", "xpassed")
Halves = dict[str, list[str]]


def halves_of(which: str) -> Halves:
    """Name of each process -> what it runs."""
    if which == "test":  # one computes, beside one that mostly waits for processes, about as long
        return {
            "computes": ["tests/unit", "tests/property", "tests/golden", "tests/packaging", "tests/chaos"],
            "waits": ["tests/integration"],
        }
    unit = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("tests/unit/test_*.py"))
    return {"even": [*unit[::2], "tests/property"], "odd": unit[1::2]}


def main(which: str, *flags: str) -> int:
    """Runs the two halves of `make test` or `make check`.

    Returns:
        Exit code 0 when both halves passed, else the first other one.
    """
    halves = {
        name: subprocess.Popen(
            [sys.executable, "-m", "pytest", "--color=no", *flags, *tests],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for name, tests in halves_of(which).items()
    }
    lines: dict[str, list[str]] = {name: [] for name in halves}

    def follow(name: str) -> None:
        half = halves[name]
        assert half.stdout is not None
        for line in half.stdout:
            print(f"{name:8} | {line}", end="", flush=True)
            if line.strip():
                lines[name].append(line)
        if half.wait() and "-x" in flags:
            for other in halves.values():
                other.send_signal(signal.SIGINT)  # it ends its fixtures, and so their daemons

    readers = [threading.Thread(target=follow, args=(name,)) for name in halves]
    try:
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    except KeyboardInterrupt:  # the terminal sends it to both as well; they end their fixtures, and so their daemons
        for half in halves.values():
            half.send_signal(signal.SIGINT)
            half.wait()
        return 130
    codes = {name: half.wait() for name, half in halves.items()}
    total = dict.fromkeys(OUTCOMES, 0)
    for said in lines.values():
        for count, outcome in re.findall(r"(\d+) (" + "|".join(OUTCOMES) + r")\b", said[-1] if said else ""):
            total[outcome] += int(count)
    failed = total["failed"] + total["error"] + total["errors"]
    unfinished = [name for name, code in codes.items() if code not in (0, 1)]
    if unfinished:
        print(f"not all tests ran: {', '.join(f'{name} ended with exit code {codes[name]}' for name in unfinished)}")
    print(f"{total['passed']} passed, {failed} failed, {total['skipped']} skipped")
    return next((code for code in codes.values() if code), 0)


if __name__ == "__main__":
    if sys.argv[1:2] not in (["test"], ["check"]):
        raise SystemExit("usage: python tests/side_by_side.py test|check [flags of pytest]")
    raise SystemExit(main(*sys.argv[1:]))
