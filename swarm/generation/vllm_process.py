"""Worker's side of a vLLM engine process: starts it in vLLM's own environment, calls it, and notices its end.

Invariant: the engine process ends when the worker's process ends, for whatever reason; its output goes to `vllm.log`;
calls in progress when the engine process ends raise Unavailable.
"""

import importlib.util
import itertools
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

from swarm.activity import GENERATING, OnProgress, ignore_progress
from swarm.config import EngineConfig
from swarm.errors import ConfigError, Unavailable, WeightsRefused
from swarm.generation.vllm_messages import EngineSettings, decode_line, encode_line
from swarm.process import thread_limits
from swarm.types import JsonDict

logger = logging.getLogger(__name__)

MODULE: Final = "swarm.generation.vllm_server"
LOG: Final = "vllm.log"
DEFAULT_PYTHON: Final = Path(".venv-vllm/bin/python")
SILENCE_S: Final = 1800.0  # without a line in its log while it starts: a large model is read from a slow disk
PROGRESS_S: Final = 10.0  # between two log lines while it starts
STOP_S: Final = 10.0
_ERRORS: Final = {"ConfigError": ConfigError, "WeightsRefused": WeightsRefused}  # answers of the engine
_MISSING = "make vllm creates .venv-vllm; or name an interpreter that has vllm and swarm-trainer in engine.python"


def vllm_python(config: EngineConfig) -> str:
    """Path of the interpreter for vLLM: the configured one, else that of .venv-vllm if it exists, else this one."""
    if config.python:
        return config.python
    return str(DEFAULT_PYTHON.absolute()) if DEFAULT_PYTHON.is_file() else sys.executable


def has_vllm(config: EngineConfig) -> bool:
    """True if the interpreter of `vllm_python` exists and, where it is this process's own, has vLLM."""
    python = vllm_python(config)
    if python != sys.executable:
        return Path(python).is_file()
    return importlib.util.find_spec("vllm") is not None


class EngineProcess:
    """A running engine process; any thread may call it.

    Two threads of the worker serve it: one starts it, reads its answers and waits for its end, the other writes
    requests, so that a caller (above all of `cancel`) never waits for a pipe that a busy or stopped process does not
    read.

    Args:
        python: interpreter of vLLM's environment.
        settings: settings of the engine.
        directory: folder of its log.
        num_threads: threads of its computations on CPU.
        on_progress: takes the number of tokens that the engine reports.

    Raises:
        ConfigError: the process cannot be started with these settings; the message gives the fix.
        Unavailable: the process ended while it started, or logged nothing for SILENCE_S; another attempt may succeed.
    """

    def __init__(
        self,
        python: str,
        settings: EngineSettings,
        directory: Path,
        num_threads: int,
        on_progress: OnProgress = ignore_progress,
    ) -> None:
        self._python = python
        self._on_progress = on_progress
        self._log = directory / LOG
        self._environment = _environment(num_threads)
        self._first: queue.SimpleQueue[JsonDict | OSError] = queue.SimpleQueue()  # ready, or why not
        self._requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._requests.put(encode_line(settings))
        self._numbers = itertools.count(1)
        self._calls: dict[int, Future[Any]] = {}
        self._changing = threading.Lock()  # of the calls, and whether it has ended
        self._ended = threading.Event()
        self._is_closing = False
        self._process: subprocess.Popen[bytes] | None = None
        # The thread lives as long as the process: Linux ends a process with the thread that started it.
        threading.Thread(target=self._watch, name="vllm-process", daemon=True).start()
        try:
            self.compute_dtype = self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    @property
    def is_running(self) -> bool:
        """True until the process has ended."""
        return not self._ended.is_set()

    @property
    def pid(self) -> int:
        """Id of the engine process."""
        assert self._process is not None
        return self._process.pid

    def call(self, name: str, body: object) -> Any:
        """Sends a request and returns its result (blocking).

        Raises:
            ConfigError, WeightsRefused: the engine answered with this error.
            Unavailable: the process has ended, or ended during the call, or answered with another error.
        """
        number, result = next(self._numbers), Future[Any]()
        with self._changing:
            if self._is_closing or self._ended.is_set():
                raise Unavailable(f"{name}: the engine's process has ended")
            self._calls[number] = result
        self._requests.put(encode_line({"id": number, "call": name, "body": body}))
        return result.result()

    def cancel(self) -> None:
        """Asks the engine to end every sequence in progress, and returns at once."""
        self._requests.put(encode_line({"id": 0, "call": "cancel", "body": None}))

    def close(self) -> None:
        """Ends the process: closes its standard input, and kills it if it still runs after STOP_S."""
        self._is_closing = True
        self._requests.put(None)
        if self._process is not None and not self._ended.wait(STOP_S):
            self._process.kill()
            self._ended.wait(STOP_S)

    def _watch(self) -> None:
        """Starts the process, reads its answers, and waits for its end."""
        try:
            with self._log.open("ab") as log:
                process = subprocess.Popen(
                    [self._python, "-P", "-m", MODULE, str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=self._environment,
                )
        except OSError as error:
            self._ended.set()
            self._first.put(error)
            return
        self._process = process
        assert process.stdin is not None and process.stdout is not None
        writer = threading.Thread(target=self._write, args=(process.stdin,), name="vllm-requests", daemon=True)
        writer.start()
        with process.stdout:
            try:
                first = process.stdout.readline()
                self._first.put(decode_line(first) if first else {})
                for line in process.stdout:
                    self._settle(decode_line(line))
            except (ConfigError, ValueError, KeyError) as error:
                self._first.put({"error": f"engine.python {self._python!r}: it does not answer as ours does: {error}"})
                process.kill()
        code = process.wait()
        with self._changing:
            self._ended.set()
            lost, self._calls = self._calls, {}
        for result in lost.values():
            result.set_exception(Unavailable(f"the engine's process ended with code {code}"))
        self._requests.put(None)
        if not self._is_closing:
            logger.warning("the engine's process ended", extra={"code": code, "log": str(self._log)})

    def _write(self, pipe: Any) -> None:
        """Writes requests until `close`, then closes the pipe, which ends the process."""
        try:
            with pipe:
                while (line := self._requests.get()) is not None:
                    pipe.write(line)
                    pipe.flush()
        except OSError:  # it ended: `_watch` says so
            pass

    def _settle(self, answer: JsonDict) -> None:
        if "tokens" in answer:
            return self._on_progress(GENERATING, num_tokens=answer["tokens"])
        result = self._calls.pop(answer["id"])
        if "error" not in answer:
            result.set_result(answer["result"])
        else:
            result.set_exception(_ERRORS.get(answer["error"], Unavailable)(answer["message"]))

    def _wait_until_ready(self) -> str:
        """Waits for the engine and returns the dtype that it computes in. Raises as the constructor."""
        began_s = printed_s = time.monotonic()
        num_bytes = 0
        while True:
            waited_s = time.monotonic() - began_s
            try:
                first = self._first.get(timeout=PROGRESS_S)
                break
            except queue.Empty:
                logger.info("the engine is starting", extra={"seconds": round(waited_s), "log": str(self._log)})
            if self._process is not None and (size := self._log.stat().st_size) != num_bytes:
                num_bytes, printed_s = size, time.monotonic()
            silent_s = time.monotonic() - printed_s
            if silent_s > SILENCE_S:
                raise Unavailable(
                    f"vllm: process {self._process and self.pid} is not ready, and printed nothing for {silent_s:.0f} s"
                    f"; its last line: {self._last_line()[:200]} (see {self._log})"
                )
        if isinstance(first, OSError):
            raise ConfigError(f"engine.python {self._python!r}: {first.strerror}; {_MISSING}")
        if "ready" in first:
            logger.info("the engine is ready", extra={"engine": first["ready"], "seconds": round(waited_s, 1)})
            return first["compute_dtype"]
        raise self._failure(first)

    def _failure(self, first: Mapping[str, str]) -> ConfigError | Unavailable:
        """Error to raise if the process ended instead of becoming ready."""
        self._ended.wait(STOP_S)
        if "error" in first:
            return ConfigError(first["error"])
        last = self._last_line()
        if "missing" in first or "No module named" in last:  # the latter: our own package, before it can say anything
            return ConfigError(f"engine.python {self._python!r}: {first.get('missing', last)}; {_MISSING}")
        return Unavailable(f"vllm: its process ended while it started: {last[:200]} (see {self._log})")

    def _last_line(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "it printed nothing"


def _environment(num_threads: int) -> dict[str, str]:
    """Environment variables of the engine process: no Python path of the worker, and no usage statistics."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME")}
    return {
        **inherited,
        **thread_limits(num_threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # several engines of one machine would bind to the same cores
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in the process that is stepped
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",  # the model is a local folder
    }
