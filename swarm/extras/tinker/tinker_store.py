"""Saved weights of a Tinker server: a folder for each, in PEFT's form, with the optimizer if they can be trained on.

    <store>/<run>/weights/<name>/          adapter, optimizer.safetensors, saved.json: tinker://<run>/weights/<name>
    <store>/<run>/sampler_weights/<name>/  adapter, saved.json

Invariant: a folder under its final name is complete; expired weights are not loaded, and the next save deletes them.
"""

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from swarm.clock import Clock
from swarm.errors import ConfigError
from swarm.extras.tinker.adapter_training import AdapterShape, AdapterTraining, adapted
from swarm.model.network import save_tensors
from swarm.model.peft_folder import read_adapter, write_adapter
from swarm.serving.openai_requests import RequestRefused
from swarm.types import Digest

Kind = Literal["weights", "sampler_weights"]
MAX_BYTES: Final = 64 * 2**30  # of all of them
_RUN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9:_-]{0,127}")
_PATH: Final = re.compile(rf"tinker://({_RUN.pattern})/(weights|sampler_weights)/([\w.-]{{1,128}})")
_ABOUT: Final = "saved.json"
_OPTIMIZER: Final = "optimizer.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavedWeights:
    """Description of saved weights (`saved.json` in their folder)."""

    path: str  # tinker://...
    base_model: str
    base_digest: str  # hex, of the initial model's published tensors
    shape: AdapterShape
    num_steps: int
    expires_at_s: float | None  # unix time
    notes: Mapping[str, str] = field(default_factory=dict[str, str])  # of the client


class TinkerStore:
    """Saves and loads adapters below one folder (blocking).

    Args:
        folder: folder of all saved weights, made at the first save.
        base_model: name of the base model for clients.
        base_name: name of the base model for PEFT.
        base_digest: digest of the base model; adapters of another model are not loaded.
        clock: clock of expiry.
    """

    def __init__(self, folder: Path, base_model: str, base_name: str, base_digest: Digest, clock: Clock) -> None:
        self._folder = folder
        self._base_model, self._base_name, self._base_digest = base_model, base_name, base_digest.hex()
        self._clock = clock

    def save(
        self,
        training: AdapterTraining,
        run: str,
        kind: Kind,
        name: str,
        *,
        notes: Mapping[str, str],
        ttl_s: int | None,
        overwrite: bool,
    ) -> str:
        """Writes an adapter, whole or not at all; returns its tinker:// path.

        Args:
            training: adapter to save, with its optimizer if `kind` is weights.
            run: id of the model in training.
            kind: weights to train on, or sampler_weights to sample from alone.
            name: name of the weights.
            notes: what the client wrote to the run.
            ttl_s: seconds until the weights expire; None: never.
            overwrite: replaces weights of the same name.

        Raises:
            RequestRefused: there are weights of that name, or the store is full.
            OSError: the disk refuses it.
        """
        self._tidy()
        folder = self._folder / run / kind / name
        if folder.exists() and not overwrite:
            raise RequestRefused(f"path: {run} has {kind} {name!r} already; take another name, or overwrite=True")
        used = sum(path.stat().st_size for path in self._folder.rglob("*") if path.is_file())
        if used > MAX_BYTES:
            raise RequestRefused(f"saved weights take {used} bytes of {MAX_BYTES}; delete some below {self._folder}")
        saved = SavedWeights(
            path=f"tinker://{run}/{kind}/{name}",
            base_model=self._base_model,
            base_digest=self._base_digest,
            shape=training.shape,
            num_steps=training.num_steps,
            expires_at_s=None if ttl_s is None else self._clock.now_s() + ttl_s,
            notes=notes,
        )
        staging = folder.with_name(f".{name}.partial")
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
        try:
            write_adapter(training.network, staging, self._base_name)
            if kind == "weights":
                save_tensors(training.state(), staging / _OPTIMIZER)
            (staging / _ABOUT).write_text(json.dumps(asdict(saved), indent=1), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            staging.rename(folder)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        return saved.path

    def find(self, path: str) -> SavedWeights:
        """Description of the weights at a tinker:// path.

        Raises:
            RequestRefused: there are none, they have expired, or they are of another base model.
        """
        folder = self._at(path)
        try:
            about: dict[str, Any] = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
            about["shape"] = AdapterShape(**about["shape"])
            saved = SavedWeights(**about)
        except (OSError, ValueError, TypeError, KeyError):
            raise RequestRefused(f"path: nothing is saved at {path}", status=404) from None
        if saved.expires_at_s is not None and saved.expires_at_s <= self._clock.now_s():
            raise RequestRefused(f"path: {path} has expired", status=404)
        if saved.base_digest != self._base_digest:
            raise RequestRefused(f"path: {path} is an adapter of another model, {saved.base_model!r}")
        return saved

    def newest_of(self, run: str) -> SavedWeights:
        """Description of the weights that a run saved last. Raises RequestRefused if it saved none that are here."""
        written = self._folder.glob(f"{run}/*/[!.]*/{_ABOUT}") if _RUN.fullmatch(run) else ()
        newest = max(written, key=lambda path: path.stat().st_mtime, default=None)
        if newest is None:
            raise RequestRefused(f"training_runs: nothing is saved of {run[:200]!r}", status=404)
        return self.find("tinker://" + "/".join(newest.parts[-4:-1]))

    def delete(self, path: str) -> None:
        """Deletes the weights at a tinker:// path. Raises as `find`."""
        self.find(path)
        shutil.rmtree(self._at(path))

    def network(self, saved: SavedWeights, base: nn.Module) -> nn.Module:
        """A network that shares the base's weights and has a saved adapter. Raises RequestRefused."""
        network = adapted(base, saved.shape)
        try:
            read_adapter(network, self._at(saved.path))
        except ConfigError as error:
            raise RequestRefused(str(error)) from None
        return network

    def state(self, saved: SavedWeights) -> dict[str, Tensor]:
        """Saved state for `AdapterTraining.load_state`. Raises RequestRefused if it was saved for sampling alone."""
        try:
            return load_file(self._at(saved.path) / _OPTIMIZER)
        except (OSError, SafetensorError):
            raise RequestRefused(
                f"path: {saved.path} cannot be trained on; save_state keeps what training needs"
            ) from None

    def _at(self, path: str) -> Path:
        found = _PATH.fullmatch(path)
        if found is None or found.group(3).startswith("."):
            raise RequestRefused(f"path: {path[:200]!r} is no tinker://RUN/weights/NAME or /sampler_weights/NAME")
        return self._folder.joinpath(*found.groups())

    def _tidy(self) -> None:
        for about in self._folder.glob(f"*/*/*/{_ABOUT}"):
            try:
                expires_at_s = json.loads(about.read_text(encoding="utf-8"))["expires_at_s"]
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if expires_at_s is not None and expires_at_s <= self._clock.now_s():
                shutil.rmtree(about.parent, ignore_errors=True)
