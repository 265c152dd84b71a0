"""Many seeded fault plans of the virtual swarm, resumable: which break an invariant, and what was least needed for it.

    python -m benchmarks.fault_plans --plans 20000 --file runs/fault_plans.jsonl
    python -m benchmarks.fault_plans --first 6000 --plans 20000    # where the file of the first 6,000 is gone

Each plan is a line of the file: seed, digest of its event log, and what broke. Started again with the same file it
goes on after the plans that are there; at the end it prints one digest of all. Every 50th plan runs twice: equal seeds
have to give equal logs. A failing plan is made smaller until no fault can be taken out of it; the smallest is printed
as Python, to be given to `run_seed`. With `--episodes` the nodes play episodes of several turns, with `--outward .7`
nobody can dial seven in ten of them; these plans, and those of other sizes, need a file of their own:

    python -m benchmarks.fault_plans --nodes 1000 --outward .7 --plans 300 --file runs/thousand.jsonl  # 2 hours of CPU
"""

import argparse
import hashlib
import json
import logging
import os
import time
import traceback
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from swarm.simulate.virtual.faults import FaultPlan, shrink
from swarm.simulate.virtual.node import Parts
from swarm.simulate.virtual.run import draw_plan, run_seed
from tests.worlds.one_ledger import violations

NUM_NODES: Final = 10
NUM_ROUNDS: Final = 6
TWICE_EVERY: Final = 50
PER_PROCESS: Final = 50  # chunks of plans, then a new one: a process grows by a quarter of a MB with each plan


def run_plan(
    seed: int, *, num_nodes: int = NUM_NODES, has_episodes: bool = False, outward_share: float | None = None
) -> dict[str, Any]:
    """One plan: its line of the file."""
    logging.disable(logging.CRITICAL)
    plan = draw_plan(seed, num_nodes, NUM_ROUNDS, has_episodes=has_episodes, outward_share=outward_share)
    digest, broken = _judge(seed, num_nodes, plan)
    if seed % TWICE_EVERY == 0 and _judge(seed, num_nodes, plan)[0] != digest:
        broken.append("equal seeds gave two event logs")
    line: dict[str, Any] = {"seed": seed, "digest": digest, "broken": broken}
    if broken and num_nodes == NUM_NODES:
        line["smallest"] = repr(shrink(plan, lambda smaller: bool(_judge(seed, num_nodes, smaller)[1])))
    return line


def _judge(seed: int, num_nodes: int, plan: FaultPlan) -> tuple[str, list[str]]:
    """Digest of the event log, and what the run broke: invariants with their first violations, or itself."""
    try:
        run = run_seed(seed, num_nodes, NUM_ROUNDS, plan, Parts(judge_coordinator=violations))
    except Exception as error:  # a node ended: that is a finding like any other
        return "", [f"the run ended: {''.join(traceback.format_exception(error, limit=-3))}"]
    broken = [f"{verdict.name}: {verdict.detail}" for verdict in run.invariants.verdicts() if not verdict.holds]
    return run.log_digest, broken


def main() -> None:
    """Runs what is missing; exits with 1 when anything broke."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--plans", type=int, default=1000, help="seeds up to this minus 1")
    parser.add_argument("--file", type=Path, default=Path("runs/fault_plans.jsonl"), help="one line for each plan")
    parser.add_argument("--episodes", action="store_true", help="episodes in place of single answers")
    parser.add_argument("--outward", type=float, help="share of nodes that nobody can dial; else the seed draws it")
    parser.add_argument("--nodes", type=int, default=NUM_NODES, help="honest ones of each plan")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    arguments.file.parent.mkdir(parents=True, exist_ok=True)
    lines = arguments.file.read_text(encoding="utf-8").splitlines() if arguments.file.exists() else []
    known: list[dict[str, Any]] = [json.loads(line) for line in lines]
    seeds = sorted(set(range(arguments.first, arguments.plans)) - {line["seed"] for line in known})
    failed = [line for line in known if line["broken"]]
    began_s = time.monotonic()
    play = partial(
        run_plan, num_nodes=arguments.nodes, has_episodes=arguments.episodes, outward_share=arguments.outward
    )
    with (
        ProcessPoolExecutor(
            arguments.processes, mp_context=get_context("spawn"), max_tasks_per_child=PER_PROCESS
        ) as pool,
        arguments.file.open("a", encoding="utf-8") as file,
    ):
        chunks = 10 if arguments.nodes == NUM_NODES else 1
        for number, line in enumerate(pool.map(play, seeds, chunksize=chunks), start=1):
            file.write(json.dumps(line) + "\n")
            file.flush()
            known.append(line)
            if line["broken"]:
                failed.append(line)
                print(json.dumps(line, indent=1), flush=True)
            if number % 500 == 0 or number == len(seeds):
                print(f"{number} of {len(seeds)} plans, {time.monotonic() - began_s:.0f} s", flush=True)
    known.sort(key=lambda line: line["seed"])
    all_of_them = hashlib.sha256("".join(f"{line['seed']} {line['digest']}\n" for line in known).encode()).hexdigest()
    print(f"{len(known)} plans, {len(failed)} broke an invariant; digests are in {arguments.file}, {all_of_them[:16]}")
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
