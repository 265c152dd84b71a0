"""Free keys in the virtual swarm whose groups are right, fresh and many, under faults, restarts and all."""

import pytest

from swarm.report.invariants import SHARES
from swarm.simulate.virtual.faults import Crash, FaultPlan, Turncoat
from swarm.simulate.virtual.run import run_seed

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


def test_a_run_with_newcomers_repeats_bit_for_bit() -> None:
    plan = PLANS["losses and restarts"]
    assert run_seed(3, 4, 6, plan).log_digest == run_seed(3, 4, 6, plan).log_digest
