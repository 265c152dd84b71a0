"""The path of our own groups: scored, sealed and stored, never refused."""

import asyncio
import errno
import math
from dataclasses import replace

import pytest

from swarm.config import DirectoryConfig, EnvironmentConfig, NodeConfig
from swarm.environments.load import build_environments
from swarm.environments.look_up import LookUpEnvironment
from swarm.errors import RolloutFailed, StorageFull
from swarm.events import Event, GroupUnscored
from swarm.exchange.agent import Agent
from swarm.exchange.own_groups import OwnGroups
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import InlineVerifier, ScriptedVerifier, ToyTokenizer, make_group, make_identity
from swarm.testing.episodes import make_episode_group
from swarm.testing.nodes import make_agent, make_context
from swarm.types import Correction, FinishReason, RefusalReason, Refused, Sampling, ScoredGroup


def node(number: int, usable: frozenset[Correction] = frozenset(Correction)) -> Agent:
    context = make_context(identity=make_identity(number), offload=asyncio.to_thread)
    store = MemoryGroupStore(context.clock, 10**7)
    return make_agent(context, store, verifier=ScriptedVerifier(crashes_on="CRASH"), usable=usable)


async def test_an_own_group_claims_the_sandboxs_rewards_and_is_admitted_by_another_node() -> None:
    ours, theirs = node(1), node(2)
    unscored = make_group(ours.node_id, texts=["7", "8"] * 4)
    scored, sealed, _ = await ours.own_groups.seal_and_store(unscored)
    assert scored.is_made_here and scored.correction is Correction.EXACT
    assert [r.claimed_reward for r in scored.group.rollouts] == [1.0, 0.0] * 4 == scored.rewards.tolist()
    assert await ours.store.get(sealed.digest) == sealed
    admitted = await theirs.admission.admit(sealed, ours.node_id)
    assert isinstance(admitted, ScoredGroup) and admitted.rewards.tolist() == scored.rewards.tolist()


async def test_a_verifier_that_fails_on_our_answers_is_reported_to_the_caller() -> None:
    ours = node(1)
    with pytest.raises(RolloutFailed):
        await ours.own_groups.seal_and_store(make_group(ours.node_id, texts=["CRASH"] * 8))
    assert (await ours.store.head()).sequence == 0


@pytest.mark.parametrize(("is_broken_off", "is_alone"), [(True, False), (False, False), (True, True)])
async def test_an_episode_of_ours_that_broke_off_is_neither_learned_from_nor_sent(
    is_broken_off: bool, is_alone: bool
) -> None:
    """Its environment failed in the middle: every peer would find that it goes on, and charge us for it. A node alone
    has no peers, and perhaps an environment that says something else each time."""
    told: list[Event] = []
    section = EnvironmentConfig(name="look_up", kind="look_up", params={"style": "char"}, num_tasks=100)
    config = NodeConfig(environments=(section,), directory=DirectoryConfig(kind="none" if is_alone else "dht"))
    environments = build_environments([section])
    context = make_context(config, make_identity(1), emit=told.append)
    ours = make_agent(
        context,
        MemoryGroupStore(context.clock, 10**7),
        verifier=InlineVerifier(environments),
        environments=frozenset(environments),
    )
    task_id = next(number for number in range(100) if not environments["look_up"].task(number).is_held_out)
    whole = LookUpEnvironment(section).demonstration(task_id)
    played = [whole[:1], *[whole] * 7] if is_broken_off else [whole] * 8
    sampling = Sampling(max_new_tokens=config.generator.max_new_tokens)
    group = make_episode_group(environments["look_up"], task_id, played, ToyTokenizer(), ours.node_id, sampling)
    mean = await ours.own_groups.put(group)
    unscored = [event.error for event in told if isinstance(event, GroupUnscored)]
    is_dropped = is_broken_off and not is_alone
    assert math.isnan(mean) is is_dropped
    assert (await ours.store.head()).sequence == (0 if is_dropped else 1)
    assert (ours.replay.num_groups, ours.own_groups.num_asked) == (0 if is_dropped else 1, 1)
    assert len(unscored) == is_dropped and all("though the environment goes on" in error for error in unscored)
    assert all(error.startswith(f"environment look_up, task {task_id}: not the episode") for error in unscored)


async def test_a_group_whose_answers_the_engine_cut_off_counts_as_asked_and_is_dropped() -> None:
    told: list[Event] = []
    context = make_context(identity=make_identity(1), emit=told.append)
    ours = make_agent(context, MemoryGroupStore(context.clock, 10**7), verifier=ScriptedVerifier())
    group = make_group(ours.node_id, texts=["7", "8"] * 4)
    cut_off = replace(group.rollouts[3], finish=FinishReason.ABORTED)
    assert math.isnan(await ours.own_groups.put(replace(group, rollouts=(*group.rollouts[:3], cut_off))))
    assert ours.own_groups.num_asked == 1 and (await ours.store.head()).sequence == 0
    assert ["cut off" in event.error for event in told if isinstance(event, GroupUnscored)] == [True]


async def test_a_group_that_the_recipe_may_not_learn_from_is_refused_at_admission() -> None:
    ours, theirs = node(1), node(2, usable=frozenset({Correction.NO_LOGPROBS}))
    _, sealed, _ = await ours.own_groups.seal_and_store(make_group(ours.node_id, texts=["7", "8"] * 4))
    refused = await theirs.admission.admit(sealed, ours.node_id)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.UNUSABLE_CORRECTION
    assert await theirs.store.get(sealed.digest) is None


async def test_a_full_store_is_logged_once_until_there_is_room(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def no_room(*_: object) -> None:
        raise StorageFull(errno.ENOSPC, "no space left on device")

    ours = node(1)
    caplog.set_level("INFO")
    for _ in range(2):
        with monkeypatch.context() as full:
            full.setattr(OwnGroups, "seal_and_store", no_room)
            for _ in range(3):
                await ours.own_groups.put(make_group(ours.node_id, texts=["7", "8"] * 4))
        assert ours.own_groups.is_full
        await ours.own_groups.put(make_group(ours.node_id, texts=["7", "8"] * 4))
        assert not ours.own_groups.is_full
    told = [record.message for record in caplog.records if "room" in record.message]
    assert len(told) == 4 and told[1] == told[3] == "the store has room again"
