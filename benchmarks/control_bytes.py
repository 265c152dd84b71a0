"""Cost of nodes that nobody can dial: bytes that are neither groups nor weights.

    python -m benchmarks.control_bytes --nodes 1000 --rounds 60     # 4 minutes of CPU
    python -m benchmarks.control_bytes --nodes 100 --rounds 20

Two virtual swarms of one seed: all nodes can be dialled (and measure that), or nobody can dial `--outward` of them; 50
ms one way, no faults. Ends with exit code 1 where an invariant is broken.
"""

import argparse
import sys

from benchmarks._baselines import add_record, write_record
from swarm.simulate.virtual.faults import FaultPlan
from swarm.simulate.virtual.run import VirtualRun, run_seed

LATENCY_S = 0.05


def main() -> None:
    """Prints a row for each share and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=60, help="optimizer steps of each node")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--outward", type=float, default=0.7, help="share of nodes that nobody can dial")
    add_record(parser)
    arguments = parser.parse_args()
    runs: dict[float, VirtualRun] = {}
    for share in (0.0, arguments.outward):
        plan = FaultPlan(latency_s=LATENCY_S, outward_share=share)
        run = run_seed(arguments.seed, arguments.nodes, arguments.rounds, plan)
        runs[share] = run
        steps = sum(run.steps.values())
        kinds = ", ".join(f"{kind} {count / steps:.0f}" for kind, count in sorted(run.control_bytes.items()))
        print(f"{share:.1f} outward only: {run.control_bytes_per_step:.0f} bytes per step of a node ({kinds})")
        print(f"  {steps} steps in {run.virtual_s:.0f} virtual seconds, {run.cpu_s:.0f} s of CPU", flush=True)
    print(f"ratio {runs[arguments.outward].control_bytes_per_step / runs[0.0].control_bytes_per_step:.2f}")
    figures = {f"bytes per step, {share:g} outward": run.control_bytes_per_step for share, run in runs.items()}
    write_record(arguments.record, "control_bytes", None, figures)
    broken = [f"{name}: {what[0]}" for run in runs.values() for name, what in run.invariants.violations.items() if what]
    if broken:
        sys.exit("\n".join(broken))


if __name__ == "__main__":
    main()
