"""Runs the tests as two pytest processes side by side: one that computes beside one that mostly waits for processes.

`python tests/side_by_side.py [flags for both]` prints what each says, line by line, and ends with the sum of both.
One pytest after the other would leave a core idle while daemons start; workers of pytest-xdist gained nothing here.
"""

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).parents[1]
HALVES = {
    "computes": ("tests/unit", "tests/property", "tests/golden", "tests/packaging"),
    "waits": ("tests/integration", "tests/chaos"),
}
OUTCOMES = ("passed", "failed", "error", "errors", "skipped", "xfailed", "xpassed")


def main(flags: list[str]) -> int:
    """Exit code 0 when both halves passed, else the first other one."""
    halves = {
        name: subprocess.Popen(
            [sys.executable, "-m", "pytest", "--color=no", *flags, *folders],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for name, folders in HALVES.items()
    }
    lines: dict[str, list[str]] = {name: [] for name in halves}
    readers = [threading.Thread(target=_show, args=(name, half, lines[name])) for name, half in halves.items()]
    try:
        for reader in readers:
            reader.start()
        codes = {name: half.wait() for name, half in halves.items()}
        for reader in readers:
            reader.join()
    except KeyboardInterrupt:  # the terminal sends it to both as well; they end their fixtures, and so their daemons
        for half in halves.values():
            half.send_signal(signal.SIGINT)
            half.wait()
        return 130
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


def _show(name: str, half: "subprocess.Popen[str]", said: list[str]) -> None:
    assert half.stdout is not None
    for line in half.stdout:
        print(f"{name:8} | {line}", end="", flush=True)
        if line.strip():
            said.append(line)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
