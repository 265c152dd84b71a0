"""Seconds from pasting a link to the first admitted group, in each kind of network: joins one after another.

    python -m tests.lab.joins --num 20               # all kinds side by side, as root; about 10 minutes

A resident node on the "internet" trains meanwhile. Each join is a new node in a folder of its own, in the same network.
"""

import argparse
import json
import shutil
import signal
import statistics
import tempfile
import threading
from pathlib import Path

from tests.lab.lab_swarm import KINDS, LabSwarm
from tests.lab.laboratory import Laboratory, why_not
from tests.waits import HANG_S


def join_often(swarm: LabSwarm, kind: str, num: int, seconds: list[float]) -> None:
    """Joins and leaves again and again from one network of this kind."""
    namespace = swarm.network(kind, f"net-{kind}")
    for number in range(num):
        node = swarm.join_from(namespace, kind, f"{kind}-{number}")
        try:
            seconds.append(swarm.wait(lambda node=node: node.status().get("num_admitted"), f"{kind} {number}"))
            print(f"{kind} {number}: {seconds[-1]:.1f} s", flush=True)
        finally:
            node.process.send_signal(signal.SIGTERM)
            node.process.wait(HANG_S)
            shutil.rmtree(node.directory, ignore_errors=True)


def main() -> None:
    """Prints the table as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num", type=int, default=20, help="joins of each kind")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    arguments = parser.parse_args()
    if reason := why_not():
        raise SystemExit(reason)
    with tempfile.TemporaryDirectory() as folder, Laboratory() as lab, LabSwarm(lab, Path(folder)) as swarm:
        resident = swarm.join("open", "resident")
        swarm.wait(lambda: resident.status().get("num_put"), "the resident node has groups")
        found: dict[str, list[float]] = {kind: [] for kind in arguments.kinds}
        threads = [
            threading.Thread(target=join_often, args=(swarm, kind, arguments.num, found[kind])) for kind in found
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    table = {
        kind: {
            "joins": len(seconds),
            "median_s": round(statistics.median(seconds), 1),
            "p95_s": round(sorted(seconds)[max(0, -(-95 * len(seconds) // 100) - 1)], 1),
            "worst_s": round(max(seconds), 1),
        }
        for kind, seconds in found.items()
        if seconds
    }
    print(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
