"""Checkpoints of a learner: complete or absent, never half written.

Invariant: a directory `checkpoint-NNNNNNNN` exists only after everything in it reached the disk, and until it is no
longer needed; before and after that it has the name of a draft.
"""

import json
import logging
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarm.errors import ConfigError
from swarm.process import sync_path

logger = logging.getLogger(__name__)

NUM_KEPT = 2  # the newest, and the one before it in case the newest cannot be read
_NAME = re.compile(r"^checkpoint-(\d{8,})(\.replaced)?$")  # replaced: the same step was saved again
_TENSORS, _STATE = "tensors.safetensors", "state.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """What was saved."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]  # plain JSON


def write_checkpoint(root: Path, checkpoint: Checkpoint) -> Path:
    """Saves under `root` and deletes all but the newest two. Raises OSError when the disk refuses."""
    root.mkdir(parents=True, exist_ok=True)
    for draft in root.glob(_draft("checkpoint-*")):  # of a crash
        shutil.rmtree(draft)
    final = root / f"checkpoint-{checkpoint.step:08d}"
    staged = root / _draft(final.name)
    staged.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in checkpoint.tensors.items()}, staged / _TENSORS)
    (staged / _STATE).write_text(json.dumps({"step": checkpoint.step, **checkpoint.state}, indent=1), encoding="ascii")
    for path in (staged / _TENSORS, staged / _STATE, staged):
        sync_path(path)
    replaced = final.with_suffix(".replaced")
    if final.exists():
        _delete(replaced)  # of a crash
        final.rename(replaced)  # can be read until the new one is there
    staged.rename(final)
    sync_path(root)
    _delete(replaced)
    for old in _newest_first(root)[NUM_KEPT:]:
        _delete(old)
    return final


def has_checkpoint(root: Path) -> bool:
    """True where `read_checkpoint` has something to try."""
    return bool(_newest_first(root))


def read_checkpoint(root: Path) -> Checkpoint:
    """The newest readable checkpoint under `root`. Raises ConfigError where there is none."""
    for path in _newest_first(root):
        try:
            state = json.loads((path / _STATE).read_text(encoding="ascii"))
            return Checkpoint(step=int(state["step"]), tensors=load_file(path / _TENSORS), state=state)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            logger.warning("checkpoint cannot be read", extra={"checkpoint": path.name, "error": str(error)})
    raise ConfigError(f"{root}: no readable checkpoint to resume from")


def _newest_first(root: Path) -> list[Path]:
    found = [path for path in root.iterdir() if _NAME.match(path.name)] if root.is_dir() else []
    return sorted(found, key=lambda path: (int(path.stem.rpartition("-")[2]), not path.suffix), reverse=True)


def _draft(name: str) -> str:
    """What it is named while it is not yet complete, or no longer."""
    return f".{name}.part"


def _delete(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path.rename(path.with_name(_draft(path.name))))
