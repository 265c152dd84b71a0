"""Newest result of each stage of `make nightly` (docs/nightly.tsv); ends with status 1 where one is red or too old.

A stage that never ran is named and fails nothing. The commit that mends a red stage may carry the line of its new run.
"""

import csv
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_COMMITS = 100
# Stage -> folders and files that it tests.
STAGES = {
    "mutants": ("swarm", "node", "coordinator", "tests"),
    "sweeps": ("swarm/objectives", "swarm/learn", "swarm/environments", "tests"),
    "plans": ("swarm", "tests/chaos", "tests/property"),
    "tinker": ("swarm/extras/tinker", "swarm/learn", "tests/extras"),
    "trackio": ("swarm/telemetry", "swarm/environments/hub_datasets.py", "examples"),
    "gpu_offline": ("swarm/model", "swarm/learn", "benchmarks/gpu_check.py", "benchmarks/_gpu_stages.py"),
}


def git(*arguments: str) -> list[str] | None:
    """Lines of its output; None where it fails, as in a clone without history."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines() if done.returncode == 0 else None


def main() -> int:
    """Prints a line for each stage; 1 where one fails."""
    with (ROOT / "docs" / "nightly.tsv").open() as lines:
        newest = {row["stage"]: row for row in csv.DictReader(lines, delimiter="\t")}
    status = 0
    for stage, places in STAGES.items():
        row = newest.get(stage)
        if row is None:
            print(f"{stage}: never ran")
            continue
        commit = row["commit"].removesuffix("-dirty")
        since = git("rev-list", f"{commit}..HEAD")
        changed = git("diff", "--name-only", commit, "HEAD", "--", *places)
        age = "at a commit that is not in this clone" if since is None else f"{len(since)} commits ago"
        bad = row["result"] != "passed" or (since is not None and len(since) > MOST_COMMITS)
        status |= bad
        others = "unknown" if changed is None else str(len(changed))
        words = f"{row['result']} {age}, in {row['seconds']} s on {row['CPU capability, cores']}"
        print(f"{stage}: {words}; files that it tests and that changed since: {others}{' <- FAILS' if bad else ''}")
    return status


if __name__ == "__main__":
    sys.exit(main())
