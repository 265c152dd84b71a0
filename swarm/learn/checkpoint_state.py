"""Checkpoint state (JSON, read without torch) and the folders of checkpoints.

Invariant: a state is returned as it was written, or not at all; only states of release 0.1.0 have no checksum.
"""

import hashlib
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from swarm.read_files import read_json

CHECKPOINTS = "checkpoints"  # folder of a node's directory
STATE = "state.json"
# Key in the state: SHA-256 of each tensor, by name (missing in release 0.1.0). 1.26 GB/s on one core with SHA
# instructions: for SmolLM2-135M (1.61 GB with its moments) 1.3 s when it is written, and 1.3 s when it is read.
DIGESTS = "tensors"
COMPUTE_DTYPE = "compute_dtype"  # key in the state: dtype of the passes that led to the state
CHECKSUM = "checksum"  # key in the state: SHA-256 of all other keys
_MAX_BYTES = 2**28  # a state that remembers 4,096 sources has some MB
_NAME = re.compile(r"^checkpoint-(\d{8,})(\.replaced)?$")  # replaced: the same step was saved again


def newest_compute_dtype(root: Path, published: str) -> str:
    """The compute dtype of the newest checkpoint with an intact state; "" if there is none.

    Args:
        root: folder of the checkpoints.
        published: dtype of the run's tensors; returned for a state without the key, from an early release.
    """
    for path in newest_first(root):
        with suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
            return str(read_state(path).get(COMPUTE_DTYPE, published))
    return ""


def read_state(folder: Path) -> dict[str, Any]:
    """The state of a checkpoint, without the checksum. Raises OSError, ValueError, TypeError or AttributeError."""
    state: dict[str, Any] = read_json(folder / STATE, _MAX_BYTES)
    checksum = state.pop(CHECKSUM, None)
    if (checksum or DIGESTS in state) and checksum != checksum_of(state):
        raise ValueError(f"{STATE} is not as it was written")
    return state


def checksum_of(state: dict[str, Any]) -> str:
    """SHA-256 of a state, in hex."""
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def step_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(path.stem.rpartition("-")[2])


def newest_first(root: Path) -> list[Path]:
    """Folders of the checkpoints under `root`, highest step first."""
    found = [path for path in root.iterdir() if _NAME.match(path.name)] if root.is_dir() else []
    return sorted(found, key=lambda path: (step_of(path), not path.suffix), reverse=True)
