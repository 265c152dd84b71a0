"""Best version: the version with the best success on held-out problems so far, kept beside the checkpoints for export.

Invariant: the run's own evaluations choose the version (the first of equals), and the choice survives restarts. The
best of many noisy figures is too high by chance: `swarm eval` on more problems measures the true success.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from torch import Tensor

from swarm.learn.checkpoint import Checkpoint, write_checkpoint
from swarm.types import PolicyVersion

BEST: Final = "best"  # in the directory of a node: published tensors and their state, as a checkpoint is kept


class BestVersion:
    """Keeps the best version of a training under a folder.

    Example:
        best = BestVersion(directory / BEST)
        best.offer(version, tensors, accuracy=0.7)
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._accuracy = _kept_accuracy(root)

    def offer(self, version: PolicyVersion, tensors: Mapping[str, Tensor], accuracy: float) -> bool:
        """Replaces the kept version if the offered one is better (blocking); returns True if it was replaced.

        Args:
            tensors: published tensors of the version.
            accuracy: mean success over held-out environments.

        Raises:
            OSError: the disk refuses; the version kept before stays.
            NonFiniteStep: a tensor holds NaN or infinity.
        """
        if accuracy <= self._accuracy:
            return False
        state = {"policy_id": version.policy_id, "digest": version.digest.hex(), "accuracy": accuracy}
        write_checkpoint(self._root, Checkpoint(step=version.step, tensors=dict(tensors), state=state), num_kept=1)
        self._accuracy = accuracy
        return True


def _kept_accuracy(root: Path) -> float:
    """Accuracy of the version kept under a folder; -inf if there is none that can be read."""
    found = [-math.inf]
    for path in root.glob("checkpoint-*/state.json"):
        try:
            found.append(float(json.loads(path.read_text(encoding="ascii"))["accuracy"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return max(found)
