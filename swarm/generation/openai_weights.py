"""New weights for a server: a folder that both sides see, and a request that names it.

Invariant: no folder and no adapter name is ever used for two versions (a server may cache by name), and the former
version is deleted only after the canaries of the new version agree.
"""

import itertools
import logging
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, cast

from swarm.errors import ConfigError, SwarmError, Unavailable, WeightsRefused
from swarm.generation.http_json import JsonClient, Refusal
from swarm.model.lora import is_adapter_name
from swarm.model.network import save_tensors
from swarm.model.peft_folder import write_published_adapter
from swarm.model.version_digest import PublishedTensors
from swarm.types import PolicyVersion, short

logger = logging.getLogger(__name__)

_PREFIX: Final = "swarm-"  # of the folders that are ours


@dataclass(frozen=True, slots=True)
class WeightsChange:
    """A version that a server has loaded but whose canaries are not yet checked."""

    model: str  # name of the version in requests
    keep: Callable[[], None]  # accepts the version, and deletes the former one
    undo: Callable[[], None]  # returns to the former version; raises Unavailable if the server does not


class Taking(Protocol):
    """Method to load weights into a server."""

    model: str  # name in requests of the weights that the server has at the start

    def take(self, version: PolicyVersion, weights: PublishedTensors) -> WeightsChange:
        """Loads a version into the server (blocking); the caller then calls `keep` or `undo` of the result.

        Raises:
            ConfigError: this method cannot carry these weights, or its folder cannot be made.
            WeightsRefused: the server did not load the weights; it still serves the former version.
            Unavailable: it is unknown which weights the server has now.
        """
        ...


class NoWeights:
    """Method for a server whose weights this node cannot replace: every version is refused."""

    def __init__(self, model: str) -> None:
        self.model = model

    def take(self, version: PolicyVersion, weights: PublishedTensors) -> WeightsChange:
        """Raises ConfigError: no method is configured."""
        raise ConfigError(
            f"engine.options.weights: no method is configured to give the server step {version.step}; set it "
            "to sglang_disk or vllm_lora, with engine.options.weights_dir for a directory that the server sees "
            "under the same path"
        )


class DiskWeights:
    """Replaces all weights in place through SGLang's `/update_weights_from_disk`, which also empties the prefix cache.

    Args:
        client: client of the server.
        folder: a directory of this node alone that the server sees under the same path; versions are written below it,
            and those of an earlier start deleted.
        base: the run's initial tensors; the server loads them first, since its weights are unknown.

    Raises:
        ConfigError: the folder cannot be made, or the server does not load `base`.
        WeightsRefused: `base` cannot be written.
    """

    def __init__(self, client: JsonClient, folder: Path, base: PublishedTensors) -> None:
        self._client = client
        self._folders = _Folders(folder)
        self._layout = _layout(base)
        self._serving = self._written(PolicyVersion(policy_id="base", step=0), base)
        self.model = self._serving.name
        try:
            self._load(self._serving)
        except (Unavailable, Refusal, WeightsRefused) as error:
            raise ConfigError(f"engine.options.weights_dir {str(folder)!r}: {error}") from error

    def take(self, version: PolicyVersion, weights: PublishedTensors) -> WeightsChange:
        """Has the server load the tensors or, if that fails, the former tensors again. Raises as `Taking.take`."""
        if _layout(weights) != self._layout:
            raise ConfigError(f"weights: step {version.step} has other tensors than the run's model")
        fresh, before = self._written(version, weights), self._serving

        def keep() -> None:
            self._serving = fresh
            shutil.rmtree(before, ignore_errors=True)

        def undo() -> None:
            try:
                self._load(before)
            except (Refusal, WeightsRefused) as error:
                raise Unavailable(f"the server does not go back to what it served before: {error}") from error
            finally:
                shutil.rmtree(fresh, ignore_errors=True)

        try:
            self._load(fresh)
        except (Unavailable, Refusal, WeightsRefused) as error:
            undo()
            raise WeightsRefused(f"step {version.step}: {error}") from error
        return WeightsChange(fresh.name, keep, undo)

    def _written(self, version: PolicyVersion, weights: PublishedTensors) -> Path:
        return self._folders.written(version, lambda folder: save_tensors(weights, folder / "model.safetensors"))

    def _load(self, folder: Path) -> None:
        body = {"model_path": str(folder), "weight_version": folder.name}
        reply = self._client.call("POST", "/update_weights_from_disk", body, attempts=1)
        if not (isinstance(reply, dict) and cast("dict[str, Any]", reply).get("success")):
            raise WeightsRefused(f"the server did not take {folder.name}: {str(reply)[:200]}")


class LoraAdapters:
    """Loads low-rank adapters, each under its own name, through vLLM's `/v1/load_lora_adapter`.

    The server needs VLLM_ALLOW_RUNTIME_LORA_UPDATING=True, --enable-lora and --max-lora-rank, and must serve the run's
    base model.

    Args:
        client: client of the server.
        model: served name of the base.
        folder: a directory of this node alone that the server sees under the same path; adapters are written below it,
            and those of an earlier start deleted.
        scale: `model.lora_scale`.
    """

    def __init__(self, client: JsonClient, model: str, folder: Path, scale: float) -> None:
        self.model = model
        self._client = client
        self._folders = _Folders(folder)
        self._scale = scale
        self._serving: Path | None = None  # None: the base itself

    def take(self, version: PolicyVersion, weights: PublishedTensors) -> WeightsChange:
        """Has the server load the new adapter beside the old one, until `keep` or `undo`. Raises as `Taking.take`."""
        if not weights or not all(is_adapter_name(name) for name in weights):
            raise ConfigError("engine.options.weights: vllm_lora carries adapters only; set model.lora_rank in the run")
        before = self._serving
        fresh = self._folders.written(version, lambda folder: write_published_adapter(weights, self._scale, folder))
        try:
            body = {"lora_name": fresh.name, "lora_path": str(fresh)}
            self._client.call("POST", "/v1/load_lora_adapter", body, attempts=1)
        except (Unavailable, Refusal) as error:
            self._give_up(fresh)
            raise WeightsRefused(f"step {version.step}: {error}") from error

        def keep() -> None:
            self._serving = fresh
            if before is not None:
                self._give_up(before)

        return WeightsChange(fresh.name, keep, lambda: self._give_up(fresh))

    def _give_up(self, folder: Path) -> None:
        """Unloads an adapter and deletes its folder; a refusal is logged: a leftover only costs the server memory."""
        try:
            self._client.call("POST", "/v1/unload_lora_adapter", {"lora_name": folder.name})
        except SwarmError as error:
            logger.warning("the server keeps an adapter", extra={"adapter": folder.name, "error": str(error)})
        shutil.rmtree(folder, ignore_errors=True)


class _Folders:
    """Makes folders in one directory, under names that no process has used; deletes those of earlier processes."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory.resolve()
        self._start = secrets.token_hex(4)
        self._numbers = itertools.count()
        for left in self._directory.glob(f"{_PREFIX}*"):  # of a worker that was killed, or whose server went on
            shutil.rmtree(left, ignore_errors=True)

    def written(self, version: PolicyVersion, write: Callable[[Path], None]) -> Path:
        """Makes a folder that `write` fills. Raises ConfigError without a folder, WeightsRefused if `write` fails."""
        name = f"{_PREFIX}{self._start}-{next(self._numbers)}-step{version.step}-{short(version.digest) or 'x'}"
        folder = self._directory / name
        try:
            folder.mkdir(parents=True)
        except OSError as error:
            raise ConfigError(f"engine.options.weights_dir {str(self._directory)!r}: {error}") from error
        try:
            write(folder)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise WeightsRefused(f"step {version.step}: {error}") from error
        return folder


def _layout(weights: PublishedTensors) -> dict[str, tuple[object, ...]]:
    return {name: (tensor.dtype, *tensor.shape) for name, tensor in weights.items()}
