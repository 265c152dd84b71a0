"""Nodes of the virtual swarm that turn: ordinary agents whose groups are those of an attack, newcomers and members."""

import pytest

from swarm.simulate.virtual.adversaries import ADMISSIBLE, ATTACKS, INADMISSIBLE
from swarm.simulate.virtual.faults import FaultPlan, Turncoat
from swarm.simulate.virtual.run import VirtualRun, run_seed

NUM_NODES, NUM_ROUNDS = 5, 6


def run_attack(attack: str) -> VirtualRun:
    """A newcomer and a member who turns, beside five honest nodes."""
    turncoats = (Turncoat(attack=attack), Turncoat(attack=attack, is_member=True, honest_s=6.0))
    return run_seed(4, NUM_NODES, NUM_ROUNDS, FaultPlan(latency_s=0.02, turncoats=turncoats))


@pytest.mark.parametrize("attack", ATTACKS)
def test_invariants_hold_beside_nodes_that_turn(attack: str) -> None:
    run = run_attack(attack)
    assert run.invariants.hold, run.invariants.violations
    assert set(run.steps) == {f"n{index}" for index in range(NUM_NODES)}
    if attack in INADMISSIBLE:
        assert run.refusals.keys() & {"bad_tokens", "text_mismatch"}, run.refusals


def test_a_run_with_nodes_that_turn_repeats_bit_for_bit() -> None:
    assert run_attack(ADMISSIBLE[0]).log_digest == run_attack(ADMISSIBLE[0]).log_digest
