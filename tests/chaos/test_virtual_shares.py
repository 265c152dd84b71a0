"""Free keys in the virtual swarm whose groups are right, fresh and many, under faults, restarts and all."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest

from swarm.interfaces import StreamItem
from swarm.peers.parties import Parties
from swarm.simulate.invariants import ADMITTED, SHARES
from swarm.simulate.virtual.faults import Crash, FaultPlan
from swarm.simulate.virtual.hostile_node import CLAIMED_STEP, SEND_EVERY_S, HostileNode
from swarm.simulate.virtual.node import Parts
from swarm.simulate.virtual.run import run_seed
from swarm.simulate.virtual.shared_work import kept_environments
from swarm.types import Cursor, NodeId, SealedGroup, StreamFilter
from swarm.wire.envelopes import seal_group


class FloodingNode(HostileNode):
    """Sends groups that admission has nothing against, written by a script: a right answer and a wrong one each."""

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        for number in itertools.count(1):
            await asyncio.sleep(SEND_EVERY_S / 2)
            sealed = self._next()
            yield StreamItem(
                cursor=Cursor(epoch="hostile", sequence=number),
                digest=sealed.digest,
                size_bytes=sealed.size_bytes,
                sealed=sealed,
            )

    def _next(self) -> SealedGroup:
        group = self._group(step=CLAIMED_STEP, claimed_reward=0.0)
        wrong = group.rollouts[0]
        text = kept_environments()[group.env].reference(group.task_id)
        assert wrong.trace is not None
        ids = np.asarray(self._tokenizer.encode_response(text), dtype=np.int32)
        count = len(ids)
        trace = replace(
            wrong.trace,
            token_ids=ids,
            action_mask=np.ones(count, dtype=np.bool_),
            logprobs=np.full(count, -0.5, dtype=np.float32),
            turn_ids=np.zeros(count, dtype=np.int16),
        )
        right = replace(wrong, text=text, trace=trace, claimed_reward=1.0)
        return seal_group(replace(group, rollouts=(right, *group.rollouts[1:])), self._identity)


FLOODS = Parts(hostile=FloodingNode)
PLANS = {
    "perfect network": FaultPlan(num_hostile=5),
    "losses and restarts": FaultPlan(
        num_hostile=5,
        latency_s=0.05,
        drop_rate=0.02,
        crashes=tuple(Crash(node=node, at_s=14.0 + 4 * node, down_s=3.0) for node in range(3)),
    ),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("plan", PLANS.values(), ids=list(PLANS))
@pytest.mark.parametrize("is_out", [False, True], ids=["defended", "mutation: every key counts in full"])
def test_keys_that_flood_with_right_answers_have_an_eighth_of_the_places(
    plan: FaultPlan, is_out: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_out:
        monkeypatch.setattr(Parties, "is_established", lambda *_: True)
    run = run_seed(8, 4, 10, plan, FLOODS)
    details = {verdict.name: verdict.detail for verdict in run.invariants.verdicts()}
    if is_out:
        assert run.invariants.violations[SHARES], details
    else:
        # The attackers' groups are admissible, and their own events are in no log.
        violations = [each for name, found in run.invariants.violations.items() if name != ADMITTED for each in found]
        violations += [each for each in run.invariants.violations[ADMITTED] if "its producer never made it" not in each]
        assert not violations
        assert not details[SHARES].startswith("0 "), "some of theirs are drawn"


def test_a_run_with_newcomers_repeats_bit_for_bit() -> None:
    plan = PLANS["losses and restarts"]
    assert run_seed(3, 4, 6, plan, FLOODS).log_digest == run_seed(3, 4, 6, plan, FLOODS).log_digest
