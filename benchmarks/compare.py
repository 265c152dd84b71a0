"""Figures of this machine against those recorded for machines of its kind: `make bench`.

    python -m benchmarks.compare                          # every file of benchmarks/baselines for this kind of machine
    python -m benchmarks.compare --benchmarks exchange --tolerance 0.5

Each recorded benchmark runs again with the arguments of its file. Exit code 1: a figure is further from the recorded
one than the tolerance. `python -m benchmarks.NAME ... --record` writes a file anew.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from benchmarks._baselines import FOLDER, ROOT, Baseline, machine_kind

TOLERANCE: Final = 0.25
KEEPS_RUNS: Final = ("turns",)  # runs are made anew here, in a file of their own


def rows(recorded: Baseline, found: Baseline, tolerance: float) -> tuple[list[str], bool]:
    """Lines of the table, and whether all figures are within the tolerance of the recorded ones."""
    lines: list[str] = []
    holds = True
    for name, before in recorded.figures.items():
        now = found.figures.get(name)
        is_near = now is not None and abs(now - before) <= tolerance * abs(before)
        holds = holds and is_near
        shown = "missing" if now is None else f"{now:.6g}"
        ratio = f"{now / before:.2f}" if now is not None and before else "-"
        lines.append(f"| {recorded.benchmark} | {name} | {before:.6g} | {shown} | {ratio}{'' if is_near else ' !'} |")
    return lines, holds


def run_again(recorded: Baseline) -> Baseline:
    """The same benchmark with the same arguments, now. Raises CalledProcessError where it fails."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figures.json"
        command = [sys.executable, "-m", f"benchmarks.{recorded.benchmark}", *recorded.arguments]
        command += ["--out", f"{folder}/runs.jsonl"] if recorded.benchmark in KEEPS_RUNS else []
        subprocess.run([*command, "--record", str(path)], cwd=ROOT, stdout=sys.stderr, check=True)
        return Baseline.read(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the table; 0 when every figure is within the tolerance."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--benchmarks", nargs="+", metavar="NAME", help="only these")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="of a figure, relative (default 0.25)")
    options = parser.parse_args(arguments)
    recorded = [Baseline.read(path) for path in sorted(FOLDER.glob(f"*-{machine_kind()}.json"))]
    chosen = [each for each in recorded if options.benchmarks is None or each.benchmark in options.benchmarks]
    if not chosen:
        print(f"no figures are recorded for {machine_kind()}; a benchmark with --record writes them", file=sys.stderr)
        return 1
    print("| benchmark | figure | recorded | now | ratio |\n|---|---|---|---|---|", flush=True)
    holds = True
    for baseline in chosen:
        lines, is_near = rows(baseline, run_again(baseline), options.tolerance)
        print("\n".join(lines), flush=True)
        holds = holds and is_near
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
