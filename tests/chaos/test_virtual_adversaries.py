"""Nodes of the virtual swarm that turn: ordinary agents whose groups are those of an attack, newcomers and members."""

import pytest

from swarm.report.invariants import SHARES
from swarm.simulate.virtual.adversaries import ATTACKS, INADMISSIBLE
from swarm.simulate.virtual.faults import Crash, FaultPlan, Turncoat
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


FLOOD = (Turncoat(attack="flood"),) * 5
PLANS = {
    "perfect network": FaultPlan(turncoats=FLOOD),
    "losses and restarts": FaultPlan(
        turncoats=FLOOD,
        latency_s=0.05,
        drop_rate=0.02,
        crashes=tuple(Crash(node=node, at_s=14.0 + 4 * node, down_s=3.0) for node in range(3)),
    ),
}


@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
def test_keys_that_flood_with_right_answers_have_an_eighth_of_the_places(plan: FaultPlan) -> None:
    run = run_seed(8, 4, 10, plan)
    details = {verdict.name: verdict.detail for verdict in run.invariants.verdicts()}
    assert run.invariants.hold, run.invariants.violations
    assert not details[SHARES].startswith("0 "), "some of theirs are drawn"
