"""Sandboxed verifier: scores answers in a confined process, so that no answer can run code on the node.

Invariant: nothing of an answer is interpreted in this process; what comes back is bounded, parsed as JSON
and checked; a scoring process that misbehaves is killed, never waited for.
"""

import asyncio
import json
import logging
import os
import secrets
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np

from swarm.config import EnvironmentConfig, SandboxConfig
from swarm.environments.load import READS_FILES
from swarm.errors import ConfigError, RolloutFailed, TooLarge
from swarm.interfaces import Verdict
from swarm.types import Message, Task

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 16 * 2**20
MAX_REPLY_BYTES = 16 * 2**20
START_TIMEOUT_S = 60.0  # imports on a busy machine; no answer is involved
# The child sees nothing of our environment. One thread: a thread pool would count against its limits.
_CHILD_ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8"}
_COMMAND = (sys.executable, "-I", "-B", "-m", "swarm.environments.sandbox.child")


class SandboxVerifier:
    """An `interfaces.Verifier` over one confined, long-lived child, started when first needed.

    The child is replaced when it used `limits.cpu_s` of CPU, and killed when a request takes longer than
    `limits.timeout_s`; the next request starts a new one. Requests take turns.
    """

    def __init__(self, configs: tuple[EnvironmentConfig, ...], limits: SandboxConfig) -> None:
        """`configs`: every environment that may be scored; the child builds them all when it starts."""
        self._configs = configs
        self._names = frozenset(config.name for config in configs)
        self._limits = limits
        self._turn = asyncio.Lock()
        self._child: asyncio.subprocess.Process | None = None
        self._in_force: dict[str, bool] = {}
        self._cpu_s = 0.0  # used by the child, as of its last reply
        self.num_started = 0

    async def score(self, env: str, task_id: int, answers: Sequence[str]) -> Verdict:
        """Rebuilds the task and scores each answer.

        Raises:
            LookupError: unknown environment or task.
            RolloutFailed: the verifier crashed, ran out of memory or out of time on these answers.
            TooLarge: the answers together are beyond MAX_REQUEST_BYTES; nothing was sent.
            ConfigError: the environments cannot be built.
        """
        if env not in self._names:
            raise LookupError(f"environment {env!r} is not part of this run")
        request = {"nonce": secrets.token_hex(16), "env": env, "task_id": task_id, "answers": list(answers)}
        frame = json.dumps(request).encode()
        if len(frame) > MAX_REQUEST_BYTES:
            raise TooLarge(f"answers of {len(frame)} bytes exceed {MAX_REQUEST_BYTES}")
        async with self._turn:
            child = await self._running()
            reply = await self._ask(child, frame, self._limits.timeout_s)
            if reply.get("nonce") != request["nonce"]:
                await self._stop()
                raise RolloutFailed(f"environment {env}: the scoring process answered another request")
            await self._account(reply)
            try:
                return _verdict(env, task_id, len(answers), reply)
            except ValueError as error:  # no verifier of ours answers so: an answer has taken the child over
                await self._stop()
                raise RolloutFailed(f"environment {env}: malformed verdict: {error}") from None

    async def limits_in_force(self) -> dict[str, bool]:
        """Name of each limit -> whether the kernel enforces it, as the child found. Starts the child."""
        async with self._turn:
            await self._running()
            return dict(self._in_force)

    async def close(self) -> None:
        """Ends the child; a later request would start another."""
        async with self._turn:
            await self._stop()

    async def _running(self) -> asyncio.subprocess.Process:
        if self._child is not None and self._child.returncode is None:
            return self._child
        await self._stop()
        budget_s = self._limits.cpu_s + self._limits.timeout_s + 1  # replaced before the kernel would kill it
        child = await asyncio.create_subprocess_exec(
            *_COMMAND,
            str(budget_s),
            str(self._limits.memory_bytes),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=_CHILD_ENVIRONMENT,
            cwd="/" if not any(config.kind in READS_FILES for config in self._configs) else None,
            start_new_session=True,
        )
        self._child = child
        self.num_started += 1
        configs = [config.model_dump(mode="json") for config in self._configs]
        hello = await self._ask(child, json.dumps({"environments": configs}).encode(), START_TIMEOUT_S)
        if hello.get("error") == "config":
            await self._stop()
            raise ConfigError(str(hello.get("detail")))
        self._in_force = {str(name): value is True for name, value in hello["limits"].items()}
        self._cpu_s = float(hello["cpu_s"])
        return child

    async def _ask(self, child: asyncio.subprocess.Process, frame: bytes, timeout_s: float) -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                return await _exchange(child, frame)
        except TimeoutError:
            await self._stop()
            raise RolloutFailed(f"scoring took longer than timeout_s {timeout_s:g}") from None
        except (OSError, EOFError, ValueError, RecursionError) as error:
            await self._stop()
            raise RolloutFailed(f"the scoring process died or answered nonsense: {type(error).__name__}") from None
        except BaseException:  # cancelled: the reply that is on its way would be taken for the next one's
            await self._stop()
            raise

    async def _account(self, reply: dict[str, Any]) -> None:
        used_s = reply.get("cpu_s")
        self._cpu_s = used_s if isinstance(used_s, float) else float("inf")
        if not self._cpu_s < self._limits.cpu_s:
            logger.debug("scoring process replaced", extra={"cpu_s": self._cpu_s})
            await self._stop()

    async def _stop(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        if child.stdin is not None:
            child.stdin.close()
        await asyncio.shield(child.wait())


async def _exchange(child: asyncio.subprocess.Process, frame: bytes) -> dict[str, Any]:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(len(frame).to_bytes(4) + frame)
    await child.stdin.drain()
    size = int.from_bytes(await child.stdout.readexactly(4))
    if size > MAX_REPLY_BYTES:
        raise ValueError(f"reply of {size} bytes exceeds {MAX_REPLY_BYTES}")
    reply = json.loads(await child.stdout.readexactly(size))
    if not isinstance(reply, dict):
        raise ValueError("reply is not an object")
    return cast("dict[str, Any]", reply)


def _verdict(env: str, task_id: int, num_answers: int, reply: dict[str, Any]) -> Verdict:
    """Checks a reply as if its sender were hostile. Raises ValueError for one that no verifier makes."""
    if reply.get("error") == "lookup":
        raise LookupError(str(reply.get("detail")))
    if "error" in reply:
        raise RolloutFailed(f"environment {env}, task {task_id}: the verifier raised {reply.get('detail')}")
    try:
        data = reply["task"]
        messages = tuple(Message(role=str(m["role"]), content=str(m["content"])) for m in data["messages"])
        task = Task(env=env, task_id=task_id, messages=messages, is_held_out=data["is_held_out"] is True)
        rewards = np.array(reply["rewards"], dtype=np.float32)
        verifier, reference = str(reply["verifier"]), str(reply["reference"])
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(type(error).__name__) from None
    if rewards.shape != (num_answers,) or not np.all((rewards >= 0) & (rewards <= 1)):
        raise ValueError(f"rewards must be {num_answers} numbers in [0, 1]")
    return Verdict(task=task, rewards=rewards, verifier=verifier, reference=reference)
