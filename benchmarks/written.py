"""Bytes that a command and everything it starts write to the disk, as the kernel counts them (Linux).

    python -m benchmarks.written swarm simulate --preset smollm   # what `make simulate` writes
    python -m benchmarks.written swarm train -m tiny --env char:copy --steps 20

A process that has ended was counted with whoever waited for it. This one adopts what its children leave behind, so at
the end its own count is that of all of them. Counted are pages that go to the disk, whatever is deleted later, and not
pages that were deleted before they went there.
"""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

from swarm.process import written_bytes

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def main() -> None:
    """Runs the command and prints the count; exits with the command's code."""
    command = sys.argv[1:]
    if not command or command[0].startswith("-"):
        sys.exit("usage: python -m benchmarks.written COMMAND [ARGUMENT ...]")
    beside = Path(sys.executable).with_name(command[0])
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
    code = subprocess.run([str(beside) if beside.exists() else command[0], *command[1:]], check=False).returncode
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    count = written_bytes()
    print(
        "written: unknown, /proc/self/io is missing" if count is None else f"{count / 1e6:,.1f} MB written",
        file=sys.stderr,
    )
    sys.exit(code)


if __name__ == "__main__":
    main()
