"""Export of a node's model: a folder that is complete or absent, with signed provenance.

Invariant: nothing in the node's directory is changed, so a running node can be exported.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

from swarm.errors import ConfigError
from swarm.trained.formats import WRITERS, Format
from swarm.trained.model import WhichStep, load_trained
from swarm.trained.provenance import write_provenance
from swarm.types import PolicyVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """A written export."""

    folder: Path
    version: PolicyVersion
    size_bytes: int
    prefills: tuple[str, ...] = ()  # beginnings of its answers in training, which no other tool writes by itself


def export_model(directory: Path, folder: Path, kind: Format, step: WhichStep, now_s: float) -> Exported:
    """Writes the model of a node's checkpoint to a new or empty folder (blocking, slow).

    Args:
        directory: directory of the node.
        folder: folder to write.
        kind: format of the export.
        step: checkpoint; None for the newest.
        now_s: wall clock.

    Raises:
        ConfigError: the folder is not empty, there is no such checkpoint, the format cannot hold this model, or the
            node's key is not the one that trained it.
        OSError: a file cannot be written; nothing of the export stays.
    """
    folder = folder.expanduser().resolve()  # "." has no name, and a link to an empty folder cannot be replaced
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty: name another folder, or move it away")
    model = load_trained(directory, step)
    assert model.version is not None
    staging = folder.with_name(f".{folder.name}.part")
    if staging.exists():
        shutil.rmtree(staging)  # of a kill
    staging.mkdir(parents=True)
    try:
        WRITERS[kind](model, staging)
        write_provenance(model, staging, kind, now_s)
        size = sum(path.stat().st_size for path in staging.rglob("*") if path.is_file())
        staging.rename(folder)  # an empty folder is replaced
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    assert model.config is not None, "it is of a node"
    prefills = tuple(dict.fromkeys(each.prefill for each in model.config.environments if each.prefill))
    return Exported(folder=folder, version=model.version, size_bytes=size, prefills=prefills)
