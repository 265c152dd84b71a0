"""What the confined process does with a request: rebuild the task, score each answer, say what CPU was used.

Invariant: every request gets exactly one reply that repeats its nonce; an exception of a verifier is a reply.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swarm.config import EnvironmentConfig
from swarm.environments.environment import NumberedEnvironment
from swarm.environments.jsonl import record_paths
from swarm.environments.load import build_environments
from swarm.errors import ConfigError


class Scorer:
    """The environments of one scoring process."""

    def __init__(self) -> None:
        self._environments: dict[str, NumberedEnvironment] = {}
        self.data_paths: list[Path] = []  # files and folders that environments go on reading records from

    def start(self, frame: bytes) -> dict[str, Any]:
        """Builds the environments of the first frame; the reply names what cannot work."""
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
