"""Learning of an environment that a node never generates, from episodes of others, against not sharing.

    python -m benchmarks.foreign_episodes                       # preset tiny-agents, three seeds: about 10 minutes
    python -m benchmarks.foreign_episodes --preset agents       # SmolLM2
    python -m benchmarks.foreign_episodes --read runs/x runs/y  # of runs that were made before, one for each seed

Each seed is one `swarm simulate --compare silo`. Success is on held-out problems, as the preset evaluates it, at the
last step that all nodes of both runs were evaluated at: a mean over the nodes that never generate the environment, or
over those that do.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks._statistics import estimate, signed


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Success on one environment, mean over nodes."""

    env: str
    is_own: bool
    before: float
    shared: float
    silo: float

    @property
    def gain(self) -> float:
        return self.shared - self.silo


def rows_of(report: dict[str, Any]) -> list[Row]:
    """The figures of a report.json that has a silo beside it, foreign environments first."""
    step = report["derived"]["shared_step"]
    shared, silo = report["result"]["swarm"]["nodes"], report["result"]["rival"]["nodes"]
    environments = sorted({env for node in shared for env in node["curriculum"]})
    return [
        Row(
            env=env,
            is_own=is_own,
            before=_success(shared, env, is_own, 0),
            shared=_success(shared, env, is_own, step),
            silo=_success(silo, env, is_own, step),
        )
        for is_own in (False, True)
        for env in environments
    ]


def table(reports: Sequence[dict[str, Any]]) -> str:
    """A Markdown table: a line for each seed and environment, then the gains over all seeds."""
    lines = [
        "| seed | environment | nodes | before | sharing | silo | sharing - silo |",
        "|---|---|---|---|---|---|---|",
    ]
    gains: dict[tuple[bool, str], list[float]] = {}
    for report in reports:
        seed = report["result"]["options"].get("seed", 0)
        for row in rows_of(report):
            words = "generate it" if row.is_own else "never generate it"
            cells = (row.env, words, f"{row.before:.3f}", f"{row.shared:.3f}", f"{row.silo:.3f}", f"{row.gain:+.3f}")
            lines.append(f"| {seed} | {' | '.join(cells)} |")
            gains.setdefault((row.is_own, row.env), []).append(row.gain)
    for (is_own, env), values in gains.items():
        words = "generate it" if is_own else "never generate it"
        lines.append(f"| all | {env} | {words} | | | | {signed(estimate(values))} |")
    return "\n".join(lines)


def run(preset: str, seed: int, out: Path, arguments: Sequence[str]) -> dict[str, Any]:
    """Runs a seed with and without sharing; its report. Raises CalledProcessError where an invariant broke."""
    command = [sys.executable, "-m", "swarm.cli.main", "simulate", "--preset", preset, "--compare", "silo"]
    subprocess.run([*command, "--seed", str(seed), "--out", str(out), *arguments], check=True, stdout=sys.stderr)
    return read(out)


def read(out: Path) -> dict[str, Any]:
    """The report of a run."""
    return json.loads((out / "report.json").read_text(encoding="utf-8"))


def _success(nodes: Sequence[dict[str, Any]], env: str, is_own: bool, step: int) -> float:
    values = [
        row["accuracy"]
        for node in nodes
        if (env in node["curriculum"]) == is_own
        for row in node["evaluations"]
        if (row["env"], row["split"], row["step"]) == (env, "held_out", step)
    ]
    return fmean(values)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny-agents")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--read", type=Path, nargs="+", default=[], help="directories of runs, in place of new ones")
    parser.add_argument("--out", type=Path, help="where runs go; default: a folder that is deleted")
    given, others = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = given.out or Path(temporary)
        reports = [read(each) for each in given.read] or [
            run(given.preset, seed, out / f"seed{seed}", others) for seed in given.seeds
        ]
    print(table(reports))


if __name__ == "__main__":
    main()
