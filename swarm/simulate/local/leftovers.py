"""Deletes from a finished run the gigabytes that only a restart would read; events, logs and groups stay.

Invariant: deletes nothing but folders that a node of this very run made.
"""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Final

HEAVY: Final = ("checkpoints", "weights", "engine")  # of a node's directory


def delete_heavy(directories: Iterable[Path]) -> int:
    """Deletes what is heavy in the directories of nodes that have ended; returns bytes."""
    freed = 0
    for folder in [directory / name for directory in directories for name in HEAVY]:
        if folder.is_dir() and not folder.is_symlink():
            freed += sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())
            shutil.rmtree(folder)
    return freed
