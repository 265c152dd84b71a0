"""What the process of a vLLM engine is started with: written by the worker, read in vLLM's own environment."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self, cast

from swarm.errors import ConfigError
from swarm.types import PolicyVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Travels as JSON, since the other side may have another Python and another torch.

    Example:
        EngineSettings(model="/models/smollm2", dtype="bfloat16", max_rows=64, eos_ids=[2], version=base,
            options={}, stall_s=600)
    """

    model: str  # a Hugging Face directory
    dtype: str  # as torch names it
    max_rows: int
    eos_ids: list[int]
    version: PolicyVersion  # what the model is
    options: dict[str, Any]  # of vLLM's EngineArgs
    stall_s: float  # a step, or a change of weights, that takes longer ends the process

    def write(self, path: Path) -> None:
        """Replaces that file (blocking)."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        version = self.version
        plain["version"] = {"policy_id": version.policy_id, "step": version.step, "digest": version.digest.hex()}
        path.write_text(json.dumps(plain), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Of such a file (blocking).

        Raises:
            ConfigError: another release of swarm-trainer wrote it.
        """
        plain = cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
        try:
            version = plain.pop("version")
            digest = bytes.fromhex(version["digest"])
            start = PolicyVersion(policy_id=version["policy_id"], step=version["step"], digest=digest)
            return cls(version=start, **plain)
        except (KeyError, TypeError) as error:
            raise ConfigError(
                f"engine.python has another release of swarm-trainer ({error}); make vllm installs this one there"
            ) from error
