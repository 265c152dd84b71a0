"""Free keys in the virtual swarm whose groups are right, fresh and many, under faults, restarts and all."""

import pytest

from swarm.peers.parties import Parties
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
@pytest.mark.parametrize("is_out", [False, True], ids=["defended", "mutation: every key counts in full"])
def test_keys_that_flood_with_right_answers_have_an_eighth_of_the_places(
    plan: FaultPlan, is_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_out:
        monkeypatch.setattr(Parties, "is_established", lambda *_: True)
    run = run_seed(8, 4, 10, plan)
    details = {verdict.name: verdict.detail for verdict in run.invariants.verdicts()}
    if is_out:
        assert run.invariants.violations[SHARES], details
    else:
        assert run.invariants.hold, run.invariants.violations
        assert not details[SHARES].startswith("0 "), "some of theirs are drawn"


def test_a_run_with_newcomers_repeats_bit_for_bit() -> None:
    plan = PLANS["losses and restarts"]
    assert run_seed(3, 4, 6, plan).log_digest == run_seed(3, 4, 6, plan).log_digest
