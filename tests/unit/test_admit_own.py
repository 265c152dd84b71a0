"""The path of our own groups: scored, sealed and stored, never refused."""

import asyncio

import pytest

from swarm.clock import ManualClock
from swarm.errors import RolloutFailed
from swarm.exchange.admission import Admission, AdmissionLimits
from swarm.peers.reputation import Reputation
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import TOY_ENV, TOY_RUN_ID, ScriptedVerifier, ToyTokenizer, make_group, make_identity
from swarm.types import Correction, RefusalReason, Refused, ScoredGroup


def make_admission(
    number: int, usable: frozenset[Correction] = frozenset(Correction)
) -> tuple[Admission, MemoryGroupStore]:
    clock = ManualClock()
    store = MemoryGroupStore(clock, 10**7)
    admission = Admission(
        run_id=TOY_RUN_ID,
        node_id=make_identity(number).node_id,
        tokenizer=ToyTokenizer(),
        verifier=ScriptedVerifier(crashes_on="CRASH"),
        store=store,
        clock=clock,
        limits=AdmissionLimits(),
        head_of=lambda _: None,
        environments=frozenset({TOY_ENV}),
        reputation=Reputation(clock, 6000),
        offload=asyncio.to_thread,
        usable=usable,
    )
    return admission, store


async def test_an_own_group_claims_the_sandboxs_rewards_and_passes_another_nodes_door() -> None:
    ours, store = make_admission(1)
    theirs, _ = make_admission(2)
    identity = make_identity(1)
    unscored = make_group(identity.node_id, texts=["7", "8"] * 4)
    scored, sealed = await ours.own(unscored, identity)
    assert scored.is_made_here and scored.correction is Correction.EXACT
    assert [r.claimed_reward for r in scored.group.rollouts] == [1.0, 0.0] * 4 == scored.rewards.tolist()
    assert await store.get(sealed.digest) == sealed
    admitted = await theirs.admit(sealed, identity.node_id)
    assert isinstance(admitted, ScoredGroup) and admitted.rewards.tolist() == scored.rewards.tolist()


async def test_a_verifier_that_fails_on_our_answers_is_told_to_the_caller() -> None:
    admission, store = make_admission(1)
    identity = make_identity(1)
    with pytest.raises(RolloutFailed):
        await admission.own(make_group(identity.node_id, texts=["CRASH"] * 8), identity)
    assert (await store.head()).sequence == 0


async def test_a_group_that_the_recipe_may_not_learn_from_is_refused_at_the_door() -> None:
    ours, _ = make_admission(1)
    theirs, store = make_admission(2, usable=frozenset({Correction.NO_LOGPROBS}))
    identity = make_identity(1)
    _, sealed = await ours.own(make_group(identity.node_id, texts=["7", "8"] * 4), identity)
    refused = await theirs.admit(sealed, identity.node_id)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.UNUSABLE_CORRECTION
    assert await store.get(sealed.digest) is None
