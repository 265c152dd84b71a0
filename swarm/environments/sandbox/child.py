"""The process in which answers are scored: `python -I -m swarm.environments.sandbox.child CPU_S MEMORY_BYTES`.

Invariant: limits come before every other import, the loss of the file system and of system calls before the
first answer, and only frames written here reach the parent: file descriptors 0, 1 and 2 are /dev/null.
"""

import os
import sys

from swarm.environments.sandbox.confine import confine, forbid_system_calls
from swarm.environments.sandbox.landlock import leave_readable, python_places

MAX_FRAME_BYTES = 64 * 2**20


def main() -> None:
    """Confines itself, reads the environments, then answers one request after the other until end of file."""
    in_force = confine(float(sys.argv[1]), int(sys.argv[2]))
    source, sink = _take_standard_streams()
    from swarm.environments.sandbox.scorer import (
        Scorer,  # loads pydantic, numpy and the environments' libraries: limited by now
    )

    scorer = Scorer()
    hello = scorer.start(_read(source))
    in_force["file_reads"] = leave_readable([*python_places(), *scorer.data_paths])
    in_force["system_calls"] = forbid_system_calls()
    in_force["no_network"] = in_force["no_network"] or in_force["system_calls"]
    _write(sink, scorer.encode({**hello, "limits": in_force}))
    while frame := _read(source):
        _write(sink, scorer.answer(frame))


def _take_standard_streams() -> tuple[int, int]:
    source, sink = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)
    return source, sink


def _read(source: int) -> bytes:
    """One frame: four bytes of length, then that many. Empty at end of file."""
    size = int.from_bytes(_read_exactly(source, 4))
    if size > MAX_FRAME_BYTES:
        raise SystemExit(3)
    return _read_exactly(source, size)


def _read_exactly(source: int, size: int) -> bytes:
    parts: list[bytes] = []
    while size > 0:
        part = os.read(source, min(size, 2**20))
        if not part:
            return b""
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write(sink: int, frame: bytes) -> None:
    data = memoryview(len(frame).to_bytes(4) + frame)
    while data:
        data = data[os.write(sink, data) :]


if __name__ == "__main__":
    main()
