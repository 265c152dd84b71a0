"""The confined process that scores answers: `python -I -m swarm.environments.sandbox.child CPU_S MEMORY_BYTES`.

Invariant: limits come before every third-party import, the loss of the file system and of system calls before the first
answer, and only frames written here reach the parent: file descriptors 0, 1 and 2 are /dev/null. Every request gets
exactly one reply that repeats its nonce; an exception of a verifier is a reply.
"""

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm.environments.sandbox.confine import confine, forbid_system_calls, leave_readable, python_places

if TYPE_CHECKING:
    from swarm.interfaces import Environment

MAX_FRAME_BYTES = 64 * 2**20


def main() -> None:
    """Confines itself, reads the environments, then answers one request after the other until end of file."""
    in_force = confine(float(sys.argv[1]), int(sys.argv[2]))
    source, sink = _take_standard_streams()
    scorer = Scorer()
    hello = scorer.start(_read(source))
    in_force["file_reads"] = leave_readable([*python_places(), *scorer.data_paths])
    in_force["system_calls"] = forbid_system_calls()
    in_force["no_network"] = in_force["no_network"] or in_force["system_calls"]
    _write(sink, scorer.encode({**hello, "limits": in_force}))
    while frame := _read(source):
        _write(sink, scorer.answer(frame))


class Scorer:
    """The environments of one scoring process."""

    def __init__(self) -> None:
        self._environments: dict[str, Environment] = {}
        self.data_paths: list[Path] = []  # files and folders that environments go on reading records from

    def start(self, frame: bytes) -> dict[str, Any]:
        """Builds the environments of the first frame; the reply names what cannot work."""
        # Imported here: pydantic, numpy and the environments' libraries load under the limits.
        from swarm.config import EnvironmentConfig
        from swarm.environments.load import build_environments, record_paths
        from swarm.errors import ConfigError

        try:
            configs = [EnvironmentConfig.model_validate(data) for data in json.loads(frame)["environments"]]
            self._environments = build_environments(configs)
            self.data_paths = [path for config in configs for path in record_paths(config)]
        except ConfigError as error:
            return {"error": "config", "detail": str(error)}
        return {"cpu_s": time.process_time()}

    def answer(self, frame: bytes) -> bytes:
        """The reply to one request frame."""
        request = json.loads(frame)
        try:
            reply = self._score(request["env"], request["task_id"], request["answers"])
        except LookupError as error:
            reply = {"error": "lookup", "detail": str(error)}
        except Exception as error:  # a verifier may raise anything on hostile text
            reply = {"error": "failed", "detail": type(error).__name__}
        return self.encode({**reply, "nonce": request["nonce"], "cpu_s": time.process_time()})

    def encode(self, reply: dict[str, Any]) -> bytes:
        """A reply as the bytes of a frame."""
        return json.dumps(reply).encode()

    def _score(self, env: str, task_id: int, answers: list[str]) -> dict[str, Any]:
        environment = self._environments[env]
        task, reference = environment.task(task_id), environment.reference(task_id)
        try:
            rewards = [environment.reward(task_id, answer) for answer in answers]
        except LookupError as error:  # of the verifier, not of the task: that exists
            return {"error": "failed", "detail": type(error).__name__}
        return {"task": asdict(task), "reference": reference, "verifier": environment.verifier, "rewards": rewards}


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
