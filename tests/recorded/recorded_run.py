"""Records the directories that a run of this release leaves, for releases after it to start from.

`python tests/recorded/recorded_run.py` makes a short run of the echo-tiny preset and writes
tests/recorded/<version>.tar.xz: the directories of its coordinator, its trainer and one generator, and the report.
A recording is never made again: what an old release wrote cannot change. tests/integration/test_recorded_release.py
starts from it. The keys in it belong to nobody.
"""

import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from swarm import __version__

PLACE = "@RECORDED@"  # stands for the directory of the run in its configuration files
PROCESSES = ("coordinator", "ada", "bell")
FOLDER = Path(__file__).parent


def record(target: Path) -> None:
    """Makes the run and packs what it left."""
    with tempfile.TemporaryDirectory() as name:
        run = Path(name) / "run"
        command = ["swarm", "simulate", "--preset", "echo-tiny", "--rounds", "8", "--keep-checkpoints"]
        # Adapters, since whole models of random numbers do not compress; a checkpoint that is not of the last step.
        changes = ["model.lora_rank=2", "learner.checkpoint_every=3"]
        subprocess.run(
            [Path(sys.executable).parent / command[0], *command[1:], "--out", run]
            + [part for change in changes for part in ("--set", change)],
            check=True,
        )
        for path in run.rglob("*.toml"):
            path.write_text(path.read_text().replace(str(run), PLACE))
        with tarfile.open(target, "w:xz") as archive:
            for part in ("report.json", *(f"swarm/{process}" for process in PROCESSES)):
                archive.add(run / part, part, filter=_belongs_to_nobody)


def unpack(archive: Path, directory: Path) -> None:
    """The run of a recording, with its configuration naming `directory`."""
    with tarfile.open(archive) as packed:
        packed.extractall(directory, filter="data")
    for path in directory.rglob("*.toml"):
        path.write_text(path.read_text().replace(PLACE, str(directory)))


def _belongs_to_nobody(info: tarfile.TarInfo) -> tarfile.TarInfo | None:
    info.uid = info.gid = 0
    info.uname = info.gname = ""
    return info if info.isfile() or info.isdir() else None  # no sockets


if __name__ == "__main__":
    target = FOLDER / f"{__version__}.tar.xz"
    if target.exists():
        raise SystemExit(f"{target} is there: a recording is never made again; raise the version first")
    record(target)
    print(f"{target}: {target.stat().st_size:,} bytes")
