"""Cost of a slow or frozen node for the others, asynchronously and with a barrier.

    python -m benchmarks.overlap            # about 4 minutes on 2 cores
    python -m benchmarks.overlap --minutes 1 --nodes 4

Every case is a real swarm of processes (tiny preset). The figure is the optimizer steps per minute of the
nodes that were left alone, as a share of the undisturbed run of the same form in the same session. A slowed
node awaits, it does not burn CPU, so its core is free for the others: more than 100 % is possible.
"""

import argparse
import asyncio
import json
import tempfile
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from swarm.events import StepMade, events_of
from swarm.simulate.local.run import SwarmRun, run_swarm
from swarm.simulate.presets import NAMES, SimulationOptions

SLOW_FACTOR = 4.0
FREEZE_AFTER_S = 5.0
CASES = ("free", "slowed", "stopped", "barrier, free", "barrier, slowed")


def options_of(case: str, minutes: float, num_nodes: int) -> SimulationOptions:
    """The simulation of one case; the disturbed node is the last one."""
    victim = NAMES[num_nodes - 1]
    return SimulationOptions(
        preset="tiny",
        nodes=num_nodes,
        minutes=minutes,
        slow={victim: SLOW_FACTOR} if "slowed" in case else {},
        stop=((victim, FREEZE_AFTER_S),) if case == "stopped" else (),
        barrier=case.startswith("barrier"),
        overrides=("evaluation.num_problems=1",),  # the clock measures learning, not evaluation
    )


def steps_per_minute(run: SwarmRun, names: tuple[str, ...], from_s: float) -> float:
    """Mean optimizer steps per minute of some nodes from `from_s` seconds after the first step to the end."""
    begin = run.first_step_at_s + from_s
    rates: list[float] = []
    for node in run.nodes:
        if node.name in names:
            times = [step.at_s for step in events_of(StepMade, node.events) if step.at_s >= begin]
            rates.append(60 * (len(times) - 1) / (times[-1] - times[0]) if len(times) > 2 else 0.0)
    return fmean(rates)


def main() -> None:
    """Runs every case and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=0.5, help="length of each case after its first step")
    parser.add_argument("--nodes", type=int, default=3, help="nodes, the last of which is disturbed")
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    arguments = parser.parse_args()
    others = NAMES[: arguments.nodes - 1]
    rates: dict[str, float] = {}
    console = Console(stderr=True)
    for case in CASES:
        console.print(f"{case} ...")
        options = options_of(case, arguments.minutes, arguments.nodes)
        with tempfile.TemporaryDirectory() as directory:
            run = asyncio.run(run_swarm(options, Path(directory), lambda name, event: None, lambda signs: None))
        rates[case] = steps_per_minute(run, others, FREEZE_AFTER_S + 1)
    if arguments.json:
        print(json.dumps(rates))
        return
    table = Table("case", "steps per minute of the others", "share of the undisturbed run")
    for case, rate in rates.items():
        free = rates["barrier, free" if case.startswith("barrier") else "free"]
        table.add_row(case, f"{rate:.0f}", f"{rate / free:.0%}" if free else "-")
    Console().print(table)


if __name__ == "__main__":
    main()
