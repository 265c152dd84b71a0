"""The whole swarm under 300 seeded fault plans on virtual time: what must hold, holds; what is seeded, repeats."""

import logging
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from swarm.simulate.virtual_run import run_seed

NUM_PLANS = 300
NUM_NODES = 10
NUM_ROUNDS = 4


def _broken(seed: int) -> str:
    """Empty when every invariant held under that seed's plan; else what broke and how to replay it."""
    logging.disable(logging.CRITICAL)
    run = run_seed(seed, NUM_NODES, NUM_ROUNDS)
    if run.invariants.hold:
        return ""
    broken = [f"{verdict.name}: {verdict.detail}" for verdict in run.invariants.verdicts() if not verdict.holds]
    command = f"swarm simulate --virtual --nodes {NUM_NODES} --rounds {NUM_ROUNDS} --seed {seed}"
    return f"{command}\n" + "\n".join(broken)


@pytest.mark.timeout(300)
def test_invariants_hold_under_every_fault_plan() -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        failures = [found for found in pool.map(_broken, range(NUM_PLANS), chunksize=5) if found]
    assert not failures, "\n\n".join(failures[:5])


def test_same_seed_gives_the_same_event_log_bit_for_bit() -> None:
    assert run_seed(11, NUM_NODES, NUM_ROUNDS).log_digest == run_seed(11, NUM_NODES, NUM_ROUNDS).log_digest


def test_other_seed_gives_another_event_log() -> None:
    assert run_seed(1, 4, 2).log_digest != run_seed(2, 4, 2).log_digest


def test_nodes_learn_from_each_other_on_a_perfect_network() -> None:
    run = run_seed(5, 4, 6, faults=False)
    assert run.invariants.hold
    assert not set(run.refusals) - {"too_old", "duplicate"}
    assert min(run.steps.values()) > 0
