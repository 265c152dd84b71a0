"""Checkpoints of a learner: complete or absent, never half written, and never loaded with a changed byte.

Invariant: everything in a directory `checkpoint-NNNNNNNN` has reached the disk; while a checkpoint is written or
deleted, its directory has the name of a draft. A checkpoint that is read hashes to what was written: the state holds a
digest of each tensor, and a checksum of itself (release 0.1.0 wrote neither).
"""

import errno
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from swarm.errors import ConfigError, NonFiniteStep
from swarm.learn.checkpoint_state import (
    CHECKSUM,
    DIGESTS,
    STATE,
    checksum_of,
    newest_first,
    read_state,
    step_of,
)
from swarm.model.version_digest import weights_digest
from swarm.process import sync_path

logger = logging.getLogger(__name__)

NUM_KEPT = 2  # the newest, and the one before it in case the newest cannot be read
SMALL_BYTES = 64_000_000  # checkpoints up to this size are written whenever they are due
BYTES_PER_S = 2_000_000  # average rate of larger checkpoints: 300 TB in five years, about what a disk lasts
LONGEST_PAUSE_S = 900.0  # at most this much work is repeated after a kill
_TENSORS = "tensors.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Tensors and state of a learner after a step."""

    step: int
    tensors: dict[str, Tensor]
    state: dict[str, Any]  # plain JSON


def checkpoint_pause_s(size_bytes: int) -> float:
    """Least seconds between two checkpoints of `size_bytes`: 0 up to SMALL_BYTES, at most LONGEST_PAUSE_S."""
    return 0.0 if size_bytes <= SMALL_BYTES else min(size_bytes / BYTES_PER_S, LONGEST_PAUSE_S)


def write_checkpoint(root: Path, checkpoint: Checkpoint, num_kept: int = NUM_KEPT) -> Path:
    """Saves a checkpoint under `root`; deletes those of later steps, and all but the newest `num_kept` of the others.

    Raises:
        OSError: the disk refuses. Every checkpoint that was there can still be read, and nothing half written stays.
        NonFiniteStep: a tensor holds NaN or infinity. Nothing is written, so that the good checkpoints stay.
    """
    broken = _first_not_finite(checkpoint.tensors)
    if broken:
        raise NonFiniteStep(f"step {checkpoint.step}: {broken} holds numbers that are not finite; it is not saved")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    for draft in root.glob(_draft("checkpoint-*")):  # of a crash
        shutil.rmtree(draft)
    final = root / f"checkpoint-{checkpoint.step:08d}"
    staged = root / _draft(final.name)
    staged.mkdir()
    try:
        _write_files(staged, checkpoint)
    except OSError:
        shutil.rmtree(staged, ignore_errors=True)  # on a full disk, other files need its space
        raise
    replaced = final.with_suffix(".replaced")
    if final.exists():
        _delete(replaced)  # of a crash
        final.rename(replaced)  # can be read until the new one is there
    staged.rename(final)
    sync_path(root)
    _delete(replaced)
    found = newest_first(root)
    of_earlier = [path for path in found if step_of(path) <= checkpoint.step]
    for old in found:
        if old not in of_earlier[:num_kept]:  # a later step is damaged, or of an abandoned branch
            _delete(old)
    return final


def has_checkpoint(root: Path) -> bool:
    """True if `root` holds a checkpoint, readable or not."""
    return bool(newest_first(root))


def checkpoint_steps(root: Path) -> list[int]:
    """Steps of the checkpoints under `root`, oldest first."""
    return sorted({step_of(path) for path in newest_first(root)})


def read_checkpoint(root: Path, step: int | None = None) -> Checkpoint:
    """The newest intact checkpoint under `root`, or the one of step `step`.

    Raises:
        ConfigError: no such checkpoint is intact; the message names the folder and the fix.
    """
    reason = "none is there"
    for path in newest_first(root):
        if step is not None and step_of(path) != step:
            continue
        try:
            return _read_files(path)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError) as error:
            reason = f"{path.name}: {error}"
            warning = (
                "a checkpoint is damaged: the one before it is taken; a later save deletes it, and checks the disk"
            )
            logger.warning(warning, extra={"checkpoint": str(path), "error": str(error)})
    raise ConfigError(
        f"{root}: no readable checkpoint to resume from ({reason}); put a copy of one back there, "
        "or move this folder and groups.sqlite away to begin again at step 0"
    )


def _write_files(folder: Path, checkpoint: Checkpoint) -> None:
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in checkpoint.tensors.items()}
    digests = {name: weights_digest({name: tensor}).hex() for name, tensor in tensors.items()}
    state = json.loads(json.dumps({"step": checkpoint.step, **checkpoint.state, DIGESTS: digests}))
    state[CHECKSUM] = checksum_of(state)
    try:
        save_file(tensors, folder / _TENSORS)
    except SafetensorError as error:  # errors of the operating system have this type, too
        raise OSError(errno.EIO, f"{folder / _TENSORS}: {error}") from error
    (folder / STATE).write_text(json.dumps(state, indent=1), encoding="ascii")
    for path in (folder / _TENSORS, folder / STATE, folder):
        sync_path(path)


def _read_files(folder: Path) -> Checkpoint:
    """Reads and verifies the checkpoint in a folder.

    Raises one of the errors that `read_checkpoint` catches if a file is missing, unreadable or changed.
    """
    state = read_state(folder)
    digests = state.get(DIGESTS)
    tensors = load_file(folder / _TENSORS)
    if digests is not None:
        if tensors.keys() != digests.keys():
            raise ValueError(f"{_TENSORS}: other tensors than were written: {min(tensors.keys() ^ digests.keys())}")
        for name, tensor in tensors.items():
            if weights_digest({name: tensor}).hex() != digests[name]:
                raise ValueError(f"{_TENSORS}: {name} is not as it was written")
    broken = _first_not_finite(tensors)
    if broken:  # saved by an older release, or damaged before its digests were taken
        raise ValueError(f"{_TENSORS}: {broken} holds numbers that are not finite")
    return Checkpoint(step=int(state["step"]), tensors=tensors, state=state)


def _first_not_finite(tensors: Mapping[str, Tensor]) -> str:
    """Name of the first tensor with NaN or infinity; "" if there is none."""
    return next((name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), "")


def _draft(name: str) -> str:
    """Name of a folder that is not yet complete, or is being deleted."""
    return f".{name}.part"


def _delete(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path.rename(path.with_name(_draft(path.name))))
