"""Starts the process of a vLLM engine in vLLM's own environment, and knows when it ended.

Invariant: the process ends with this one, however that ends; what it prints is in `vllm.log`.
"""

import importlib.util
import json
import logging
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Final

from swarm.config import EngineConfig
from swarm.errors import ConfigError, Unavailable
from swarm.generation.vllm_settings import EngineSettings
from swarm.wire.engine import EngineClient

logger = logging.getLogger(__name__)

MODULE: Final = "swarm.generation.vllm_server"
LOG: Final = "vllm.log"
DEFAULT_PYTHON: Final = Path(".venv-vllm/bin/python")
START_S: Final = 1800.0  # a large model from a slow disk
PROGRESS_S: Final = 10.0  # between two log lines while it starts
STOP_S: Final = 10.0
MAX_SOCKET_PATH_BYTES: Final = 107  # sockaddr_un
_MISSING = "make vllm creates .venv-vllm; or name an interpreter that has vllm and swarm-trainer in engine.python"


def vllm_python(config: EngineConfig) -> str:
    """The interpreter that has vLLM: the configured one, that of .venv-vllm, or this one."""
    if config.python:
        return config.python
    return str(DEFAULT_PYTHON.absolute()) if DEFAULT_PYTHON.is_file() else sys.executable


def has_vllm(config: EngineConfig) -> bool:
    """Whether that interpreter is there and has vLLM, without starting it where it is another one."""
    python = vllm_python(config)
    if python != sys.executable:
        return Path(python).is_file()
    return importlib.util.find_spec("vllm") is not None


class EngineProcess:
    """A running engine.

    Args:
        python: interpreter of vLLM's environment.
        settings: of the engine.
        directory: for socket, settings and log.
        num_threads: of its computations on CPU.

    Raises:
        ConfigError: it cannot be started this way; the message gives the fix.
        Unavailable: it ended, or was not ready in time; another attempt may succeed.
    """

    def __init__(self, python: str, settings: EngineSettings, directory: Path, num_threads: int) -> None:
        socket = directory / f"{secrets.token_hex(3)}.sock"
        if len(os.fsencode(str(socket.absolute()))) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(f"dir: {str(socket)!r} is too long for a Unix socket; choose a shorter directory")
        self._socket = socket.absolute()
        self._log = directory / LOG
        self._python = python
        self._settings = directory / "settings.json"
        settings.write(self._settings)
        self._environment = _environment(num_threads)
        self._answers: queue.SimpleQueue[str | OSError] = queue.SimpleQueue()  # its first line, or why there is none
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self._is_closing = False
        # The thread lives as long as the process: Linux ends a process with the thread that started it.
        threading.Thread(target=self._watch, name="vllm-process", daemon=True).start()
        try:
            self.name = self._wait_until_ready()
        except BaseException:
            self.close()
            raise
        self.client = EngineClient(str(self._socket))

    @property
    def is_running(self) -> bool:
        """False once it has ended."""
        return not self._ended.is_set()

    @property
    def pid(self) -> int:
        """Its process id."""
        assert self._process is not None
        return self._process.pid

    def wait(self, timeout_s: float) -> bool:
        """True when it ended within that time."""
        return self._ended.wait(timeout_s)

    def close(self) -> None:
        """Ends it: it is asked by the end of its standard input, then killed."""
        self._is_closing = True
        process = self._process
        if process is not None:
            if hasattr(self, "client"):
                self.client.close()
            assert process.stdin is not None
            process.stdin.close()
            if not self._ended.wait(STOP_S):
                process.kill()
                self._ended.wait(STOP_S)
        self._socket.unlink(missing_ok=True)

    def _watch(self) -> None:
        """Starts the process, hands on its first line, waits for its end."""
        command = [self._python, "-P", "-m", MODULE]
        command += ["--settings", str(self._settings.absolute()), "--socket", str(self._socket)]
        command += ["--parent", str(os.getpid())]
        try:
            with self._log.open("ab") as log:
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=self._environment
                )
        except OSError as error:
            self._ended.set()
            self._answers.put(error)
            return
        self._process = process
        assert process.stdout is not None
        self._answers.put(_first_line(process.stdout))
        code = process.wait()
        process.stdout.close()
        self._ended.set()
        if not self._is_closing:
            logger.warning("the engine's process ended", extra={"code": code, "log": str(self._log)})

    def _wait_until_ready(self) -> str:
        began_s = time.monotonic()
        while True:
            waited_s = time.monotonic() - began_s
            try:
                answer = self._answers.get(timeout=PROGRESS_S)
                break
            except queue.Empty:
                logger.info("the engine is starting", extra={"seconds": round(waited_s), "log": str(self._log)})
            if waited_s > START_S:
                raise Unavailable(f"vllm: not ready after {START_S:.0f} s; see {self._log}")
        if isinstance(answer, OSError):
            raise ConfigError(f"engine.python {self._python!r}: {answer.strerror}; {_MISSING}")
        said: dict[str, str] = json.loads(answer) if answer else {}
        if "ready" in said:
            logger.info("the engine is ready", extra={"engine": said["ready"], "seconds": round(waited_s, 1)})
            return said["ready"]
        raise self._failure(said)

    def _failure(self, said: Mapping[str, str]) -> ConfigError | Unavailable:
        """Why the process ended instead of becoming ready."""
        self._ended.wait(STOP_S)
        if "error" in said:
            return ConfigError(said["error"])
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = lines[-1] if lines else "it printed nothing"
        if "missing" in said or "No module named" in last:  # the latter: our own package, before it can say anything
            return ConfigError(f"engine.python {self._python!r}: {said.get('missing', last)}; {_MISSING}")
        return Unavailable(f"vllm: its process ended while it started: {last[:200]} (see {self._log})")


def _first_line(stream: IO[bytes]) -> str:
    return stream.readline().decode("utf-8", errors="replace").strip()


def _environment(num_threads: int) -> dict[str, str]:
    """Of the engine's process: nothing of this one's environment may be imported there, and nothing is sent home."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    return {
        **inherited,
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines of one machine would bind to the same cores
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process that is stepped
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a local folder
        "TOKENIZERS_PARALLELISM": "false",
    }
