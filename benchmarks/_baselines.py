"""Figures of a benchmark as data: one file for each benchmark and kind of machine, with commit and versions.

Invariant: a file is written as a whole by one run of the benchmark, together with the arguments that make it again.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDER: Final = ROOT / "benchmarks" / "baselines"
PACKAGES: Final = ("torch", "transformers", "numpy", "grpcio", "zstandard")  # their speed is part of the figures


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """The figures of one run."""

    benchmark: str
    machine: str
    commit: str
    versions: dict[str, str]
    arguments: tuple[str, ...]
    figures: dict[str, float]

    @classmethod
    def read(cls, path: Path) -> "Baseline":
        """The run that a file keeps."""
        data = json.loads(path.read_text(encoding="utf-8"))
        return cls(**data | {"arguments": tuple(data["arguments"])})


def machine_kind() -> str:
    """Name of machines whose times can be compared, such as `linux-x86_64-2-cores`."""
    return f"{platform.system()}-{platform.machine()}-{os.cpu_count()}-cores".lower()


def add_record(parser: argparse.ArgumentParser) -> None:
    """Adds the option that `write_record` obeys."""
    text = "also write the figures as data: to this file, else to benchmarks/baselines (compared by make bench)"
    parser.add_argument("--record", type=Path, nargs="?", const=FOLDER, help=text)


def write_record(
    path: Path | None, benchmark: str, arguments: Sequence[str] | None, figures: Mapping[str, float]
) -> None:
    """Writes the figures where `--record` was given; `arguments` are those of the command, None: of this process."""
    if path is None:
        return
    given = list(sys.argv[1:] if arguments is None else arguments)
    at = given.index("--record")
    del given[at : at + (1 if path == FOLDER else 2)]
    baseline = Baseline(
        benchmark=benchmark,
        machine=machine_kind(),
        commit=_commit(),
        versions={"python": platform.python_version()} | _versions(),
        arguments=tuple(given),
        figures={name: float(f"{value:.6g}") for name, value in figures.items()},
    )
    if path == FOLDER:
        path = FOLDER / f"{benchmark}-{baseline.machine}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(baseline), indent=1) + "\n", encoding="utf-8")
    print(f"figures are in {path}", file=sys.stderr)


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
