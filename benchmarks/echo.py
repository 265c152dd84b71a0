"""Three ways to follow a trainer, with one slow generator: synchronous, sequential pull, and asynchronous push.

    python -m benchmarks.echo                       # tiny model, about 12 minutes on 2 cores
    python -m benchmarks.echo --rounds 20 --seeds 0

Every run is a real swarm of processes (preset echo-tiny): a trainer, two generators, and one that takes `--slow` times
as long. Slowness is awaited, it burns no CPU. The trainer is slowed, too (`--trainer`), as training is the longer part
with a real model. Synchronous: every step waits for an equal share of groups of the present version from each of them.
Pull: a generator takes the newest version before each batch. Push: it takes versions as they come, in flight.
"""

import argparse
import asyncio
import json
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Final

from rich.console import Console
from rich.table import Table

from swarm.config import GeneratorConfig
from swarm.events import GroupPut, GroupsDrawn, StepMade, events_of
from swarm.report.figures import mean_change
from swarm.simulate.command import swarm_result
from swarm.simulate.local.run import SwarmRun, run_swarm
from swarm.simulate.presets import NAMES, Mode, SimulationOptions

MODES: Final[tuple[Mode, ...]] = ("synchronous", "pull", "push")
NUM_NODES: Final = 4
GROUP_SIZE: Final = GeneratorConfig().group_size


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One run."""

    mode: Mode
    seed: int
    seconds: float  # from the first step to the last
    rollouts_per_s: float  # made by all generators in that time
    wait_share: float  # of the trainer's time in which it waited for groups
    ages: dict[int, int]  # steps -> groups, at consumption
    accuracy: float | None  # greedy, mean over all tasks, at the end
    num_steps: int


def options_of(mode: Mode, seed: int, rounds: int, trainer: float, slow: float) -> SimulationOptions:
    """The simulation of one run; the last generator is the slow one."""
    return SimulationOptions(
        preset="echo-tiny",
        nodes=NUM_NODES,
        rounds=rounds,
        seed=seed,
        mode=mode,
        slow={NAMES[0]: trainer, NAMES[NUM_NODES - 1]: slow},
        minutes=10.0,
    )


def outcome_of(run: SwarmRun, mode: Mode, seed: int) -> Outcome:
    """The figures of a finished run, from the nodes' own events."""
    trainer, *generators = run.nodes
    steps = events_of(StepMade, trainer.events)
    begin, end = steps[0].at_s, steps[-1].at_s
    puts = [put.at_s for node in generators for put in events_of(GroupPut, node.events)]
    made = GROUP_SIZE * sum(begin <= at_s <= end for at_s in puts)
    waited = sum(step.seconds["draw_wait"] for step in steps[1:])
    groups = [group for draw in events_of(GroupsDrawn, trainer.events) for group in draw.groups]
    change = mean_change(swarm_result(run), "all", own=True)
    return Outcome(
        mode=mode,
        seed=seed,
        seconds=end - begin,
        rollouts_per_s=made / (end - begin),
        wait_share=waited / (end - begin),
        ages=dict(sorted(Counter(group.age_steps for group in groups).items())),
        accuracy=None if change is None else change.after,
        num_steps=len(steps),
    )


def table_of(outcomes: Sequence[Outcome]) -> Table:
    """A row for each mode: means over seeds, wait also as a share of the synchronous one."""
    by_mode = {mode: [outcome for outcome in outcomes if outcome.mode == mode] for mode in MODES}
    table = Table("mode", "seconds", "rollouts/s", "trainer waits", "of synchronous", "age 0/1/2/3/4", "accuracy")
    waits = {mode: fmean(o.wait_share for o in found) for mode, found in by_mode.items() if found}
    for mode, found in by_mode.items():
        if not found:
            continue
        ages = sum((Counter(outcome.ages) for outcome in found), Counter[int]())
        scores = [outcome.accuracy for outcome in found if outcome.accuracy is not None]
        base = waits.get("synchronous")
        table.add_row(
            mode,
            f"{fmean(o.seconds for o in found):.0f}",
            f"{fmean(o.rollouts_per_s for o in found):.1f}",
            f"{waits[mode]:.1%}",
            f"{waits[mode] / base:.1%}" if base else "-",
            " / ".join(f"{ages[age] / max(ages.total(), 1):.0%}" for age in range(5)),
            " ".join(f"{score:.2f}" for score in scores),
        )
    return table


def main() -> None:
    """Runs every mode with every seed and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="optimizer steps of each run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trainer", type=float, default=4.0, help="the trainer's steps take this many times as long")
    parser.add_argument("--slow", type=float, default=20.0, help="the last generator takes this many times as long")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    arguments = parser.parse_args()
    outcomes: list[Outcome] = []
    console = Console(stderr=True)
    for seed in arguments.seeds:
        for mode in arguments.modes:
            options = options_of(mode, seed, arguments.rounds, arguments.trainer, arguments.slow)
            with tempfile.TemporaryDirectory() as directory:
                run = asyncio.run(run_swarm(options, Path(directory), lambda name, event: None, lambda signs: None))
            outcomes.append(outcome_of(run, mode, seed))
            console.print(outcomes[-1])
    if arguments.json:
        print(json.dumps([asdict(outcome) for outcome in outcomes]))
    else:
        Console().print(table_of(outcomes))


if __name__ == "__main__":
    main()
