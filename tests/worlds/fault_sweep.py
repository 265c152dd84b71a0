"""Sweep over seeded fault plans of the virtual swarm."""

import logging
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

from swarm.simulate.virtual.node import Parts
from swarm.simulate.virtual.run import run_seed
from tests.worlds.one_ledger import violations

NUM_NODES = 10
NUM_ROUNDS = 6
WORTH_A_POOL = 8  # plans: the processes of a pool import torch first


def failures(seeds: Sequence[int], **options: Any) -> list[str]:
    """The command and the broken invariants of each seed whose run broke one; `options` are those of `run_seed`."""
    broken = partial(_broken, options)
    if len(seeds) < WORTH_A_POOL:
        found = [*map(broken, seeds)]
        logging.disable(logging.NOTSET)
    else:
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            found = [*pool.map(broken, seeds, chunksize=4)]
    return [text for text in found if text]


def _broken(options: dict[str, Any], seed: int) -> str:
    logging.disable(logging.CRITICAL)
    run = run_seed(seed, NUM_NODES, NUM_ROUNDS, parts=Parts(judge_coordinator=violations), **options)
    broken = [f"{verdict.name}: {verdict.detail}" for verdict in run.invariants.verdicts() if not verdict.holds]
    return "\n".join([run.command, *broken]) if broken else ""
