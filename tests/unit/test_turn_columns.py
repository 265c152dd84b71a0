"""Turns on their way to the learner: from the replay through store and local wire into the batch."""

import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from swarm.clock import ManualClock
from swarm.config import EnvironmentConfig
from swarm.environments.load import build_environment
from swarm.environments.replay import replay
from swarm.environments.tool_calls import render_call
from swarm.episode import EpisodeOutcome, Message, ToolCall, TurnStatus
from swarm.exchange.checks.reward_recheck import to_scored_group
from swarm.exchange.group_store import SqliteGroupStore
from swarm.model.token_alignment import cut_to_limit
from swarm.objectives.draw_batch import make_batch, turn_columns
from swarm.testing.builders import ToyTokenizer, answer_outcome, make_group, make_scored, make_sealed, toy_task
from swarm.testing.outcomes import make_outcome, make_scored_episodes, make_turns, make_turns_group
from swarm.types import Correction, Draw, DrawnGroup, FinishReason, ScoredGroup, SealedGroup
from swarm.wire.local import draw_from_parts, draw_to_fields
from swarm.wire.v1 import local_service_pb2 as pb

OUTCOMES = (
    make_outcome(
        1.0, observations=("1", "2", ""), turn_rewards=(0.5, -0.25, 1.0), state_keys=("x", "y", "z"), form=0.5
    ),
    make_outcome(0.0, observations=("1", ""), state_keys=("x", "w")),
)


def draw_of(*groups: ScoredGroup) -> Draw:
    return Draw(
        step=1, groups=tuple(DrawnGroup(scored=each, age_steps=0, use=1) for each in groups), num_zero_variance=0
    )


def stored(outcomes: tuple[EpisodeOutcome, ...] = OUTCOMES) -> tuple[ScoredGroup, SealedGroup]:
    """As admission makes it."""
    group = make_scored_episodes(*outcomes).group
    sealed = make_sealed(group)
    rewards = make_scored(group, rewards=[outcome.reward for outcome in outcomes]).rewards
    scored = to_scored_group(group, sealed, rewards, ToyTokenizer(), is_made_here=True, now_s=1.0, outcomes=outcomes)
    return scored, sealed


async def opened(path: Path) -> SqliteGroupStore:
    return await SqliteGroupStore.open(path, ManualClock(), 100_000)


def without_messages(outcome: EpisodeOutcome) -> EpisodeOutcome:
    return replace(outcome, transitions=tuple(replace(each, messages=()) for each in outcome.transitions))


def test_a_scored_group_keeps_outcomes_only_where_they_say_more_than_rewards() -> None:
    assert stored()[0].outcomes == tuple(map(without_messages, OUTCOMES)), "observation tokens are in the trace"
    plain = (answer_outcome(1.0), answer_outcome(0.0))
    assert stored(plain)[0].outcomes == ()
    assert stored((make_outcome(1.0, form=0.5), answer_outcome(0.0)))[0].outcomes != ()
    group = make_group(tokenizer=ToyTokenizer("other"), texts=["7", "8"])
    scored = to_scored_group(
        group,
        make_sealed(group),
        make_scored(group).rewards,
        ToyTokenizer(),
        is_made_here=False,
        now_s=1.0,
        outcomes=OUTCOMES,
    )
    assert scored.outcomes == OUTCOMES, "text only: the observations are encoded here"


async def test_outcomes_survive_a_restart_of_the_store_in_draws_too(tmp_path: Path) -> None:
    scored, sealed = stored()
    store = await opened(tmp_path / "groups.sqlite")
    await store.put(scored, sealed)
    await store.record_draw(draw_of(scored))
    await store.close()
    store = await opened(tmp_path / "groups.sqlite")
    assert [each.outcomes for each in await store.load_scored(5)] == [scored.outcomes]
    assert [drawn.scored.outcomes for draw in await store.draws(1) for drawn in draw.groups] == [scored.outcomes]
    await store.close()


async def test_a_store_of_before_episodes_opens_and_takes_them(tmp_path: Path) -> None:
    path = tmp_path / "groups.sqlite"
    plain, plain_sealed = stored((answer_outcome(1.0), answer_outcome(0.0)))
    store = await opened(path)
    await store.put(plain, plain_sealed)
    await store.close()
    with sqlite3.connect(path) as connection:
        connection.execute("ALTER TABLE groups DROP COLUMN outcomes")
    connection.close()
    store = await opened(path)
    await store.put(*stored())
    assert [each.outcomes for each in await store.load_scored(5)] == [(), stored()[0].outcomes]
    await store.close()


@pytest.mark.parametrize("blob", [b"", b"rubbish", "text", 7, "another"])
async def test_a_group_whose_outcomes_the_disk_changed_is_left_out(tmp_path: Path, blob: object) -> None:
    path = tmp_path / "groups.sqlite"
    store = await opened(path)
    await store.put(*stored())
    await store.put(*stored((make_outcome(1.0, observations=("", "")), *OUTCOMES)))
    await store.close()
    with sqlite3.connect(path) as connection:
        if blob == "another":  # whole, but of another number of rollouts
            ((blob,),) = connection.execute("SELECT outcomes FROM groups WHERE sequence = 2")
        connection.execute("UPDATE groups SET outcomes = ? WHERE sequence = 1", (blob,))
    connection.close()
    store = await opened(path)
    assert [len(each.outcomes) for each in await store.load_scored(5)] == [3]
    await store.close()


def test_a_draw_with_outcomes_arrives_at_the_worker_as_it_was_made() -> None:
    draw = draw_of(make_scored_episodes(*OUTCOMES), make_scored(rewards=[1.0] * 4 + [0.0] * 4))
    header, *groups = draw_to_fields(draw)
    messages = [pb.DrawResponse(**fields) for fields in groups]
    parts = [pb.DrawResponse.FromString(message.SerializeToString()) for message in messages]
    arrived = draw_from_parts(pb.DrawResponse(**header), parts)
    assert [each.scored.outcomes for each in arrived.groups] == [OUTCOMES, ()]


def test_a_batch_has_the_turns_of_every_rollout_and_follows_its_groups() -> None:
    call = render_call(ToolCall(name="add", arguments={"a": 1}))
    policy_id = make_group().producer
    called = make_turns([(call * 2, "3"), ("3", "")], policy_id=policy_id)
    outcome = make_outcome(1.0, observations=("3", ""))
    group = replace(make_scored(make_turns_group(called), rewards=[1.0]), outcomes=(outcome,))
    single = make_scored(make_group(texts=["7", "8"]))
    batch = make_batch(draw_of(make_scored_episodes(*OUTCOMES), single, group), ToyTokenizer())
    assert batch.turn_rewards is not None and batch.num_turns is not None and batch.num_calls is not None
    assert batch.turn_rewards.tolist() == [[0.5, -0.25, 1.0], [0] * 3, [0] * 3, [0] * 3, [0] * 3]
    assert batch.num_turns.tolist() == [3, 2, 1, 1, 2]
    assert batch.num_calls.tolist() == [[0, 0, 0]] * 4 + [[2, 0, 0]]
    assert batch.state_keys is not None and batch.state_keys[:2] == (("x", "y", "z"), ("x", "w"))
    assert batch.turn_statuses == tuple((TurnStatus.OK,) * count for count in (3, 2, 1, 1, 2))
    assert batch.actions == (("a", "b", "c"), ("a", "b"), ("7",), ("8",), (call * 2, "3"))
    assert batch.reward_parts["form"].tolist() == [0.5, 0, 0, 0, 0]
    assert batch.reward_parts["outcome"].tolist() == [1, 0, 1, 0, 1], "a single answer has its reward"
    assert batch.max_new_tokens.tolist() == [24, 16, 8, 8, 16], "8 are a turn's"

    tokens = [int(each) for each in (batch.turn_ids * 10 + batch.mask)[0, :8]]
    assert tokens == [1, 1, 0, 11, 11, 10, 21, 21], (
        "an observation belongs to the turn before it, and is not trained on"
    )

    _, part = batch.of_groups([2, 0])
    assert part.num_turns is not None and part.num_turns.tolist() == [2, 3, 2]
    assert part.turn_rewards is not None and part.turn_rewards.shape == (3, 3)
    assert part.state_keys == (("", ""), ("x", "y", "z"), ("x", "w"))
    assert part.actions == ((call * 2, "3"), ("a", "b", "c"), ("a", "b"))
    assert part.reward_parts["form"].tolist() == [0, 0.5, 0]


def test_single_answers_have_no_turns() -> None:
    batch = make_batch(draw_of(make_scored(make_group(texts=["7", "8"]))), ToyTokenizer())
    assert {batch.turn_rewards, batch.num_turns, batch.num_calls, batch.state_keys, batch.actions} == {None}
    assert batch.reward_parts == {}


def test_actions_behind_the_end_change_nothing() -> None:
    scored = make_scored_episodes(*OUTCOMES)
    short = replace(OUTCOMES[0], transitions=OUTCOMES[0].transitions[:1])
    batch = make_batch(draw_of(replace(scored, outcomes=(short, OUTCOMES[1]))), ToyTokenizer())
    assert batch.turn_rewards is not None and batch.turn_rewards[0].tolist() == [0.5, 0, 0]
    assert batch.state_keys is not None and batch.state_keys[0] == ("x", "x", "x")


def test_an_episode_in_other_tokens_is_encoded_turn_by_turn_with_the_observations_of_our_replay() -> None:
    ours, theirs = ToyTokenizer(), ToyTokenizer("other")
    first = make_turns([("7", "not what we saw"), ("88", "")], policy_id="p" * 64, tokenizer=theirs)
    cut = replace(first, sampling=replace(first.sampling, max_new_tokens=2), finish=FinishReason.LENGTH)
    gone = replace(first, trace=None, finish=FinishReason.ABORTED)
    scored = make_scored(
        make_turns_group(first, cut, gone, tokenizer=theirs), rewards=[1.0, 0.0, 0.0], correction=Correction.TEXT_ONLY
    )
    scored = replace(scored, outcomes=(make_outcome(1.0, observations=("12", "")),) * 3)
    batch = make_batch(draw_of(scored), ours, task_of=toy_task)
    seven, eight, end = ours.encode_response("7")[0], ours.encode_response("8")[0], ours.EOS_ID
    seen = ours.encode_observation([Message(role="user", content="12")], True)
    assert batch.token_ids[0].tolist() == [seven, end, *seen, eight, eight, end]
    assert batch.mask[0].tolist() == [True, True, *[False] * len(seen), True, True, True]
    assert batch.turn_ids[0].tolist() == [0, 0, *[0] * len(seen), 1, 1, 1]
    assert batch.token_ids[1].tolist() == [seven, end, *seen, eight, eight, 0], "both turns were cut off"
    assert batch.mask[1].tolist() == [True, False, *[False] * len(seen), True, True, False]
    assert not bool(batch.mask[2].any()), "aborted"
    assert bool(torch.isnan(batch.behavior_logprobs[batch.mask]).all())


def test_a_turn_that_is_too_long_here_is_cut_off_and_its_end_is_not_trained_on() -> None:
    ours, theirs = ToyTokenizer(), ToyTokenizer("other")
    long = make_turns([("12345", "9"), ("7", "")], policy_id="p" * 64, tokenizer=theirs)
    long = replace(long, sampling=replace(long.sampling, max_new_tokens=3))
    cut = cut_to_limit(long, ours)
    assert cut.actions == ("123", "7") and cut.finish is FinishReason.STOP
    group = make_turns_group(long, long, tokenizer=theirs)
    scored = make_scored(group, rewards=[1.0, 0.0], correction=Correction.TEXT_ONLY, is_made_here=False)
    scored = replace(scored, outcomes=(make_outcome(1.0, observations=("9", "")),) * 2)
    batch = make_batch(draw_of(scored), ours, task_of=toy_task)
    end = ours.encode_observation([Message(role="user", content="9")], False)
    assert batch.token_ids[0].tolist() == [*ours.encode_response("123")[:-1], *end, *ours.encode_response("7")]
    assert batch.mask[0].tolist() == [True] * 3 + [False] * len(end) + [True] * 2
    assert batch.actions is not None and batch.actions[0] == ("123", "7"), "as it was replayed"


@pytest.mark.parametrize(
    ("kind", "params", "actions", "expected"),
    [
        ("look_up", {"style": "char"}, ("?{0}", "?zzz", "{1}"), [1, 1, 0]),
        ("look_up", {}, ("search {0}", '{{"name": "search", "arguments": {{"query": "Rome"}}}}', "{1}"), [1, 1, 0]),
        ("calculator", {"call": "line"}, ("CALC(1 + 2)", "3"), [1, 0]),
        ("calculator", {}, (render_call(ToolCall(name="calculator", arguments={})), "3"), [1, 0]),
    ],
)
def test_calls_in_words_of_an_environment_count_as_tool_calls(
    kind: str, params: dict[str, str], actions: tuple[str, ...], expected: list[int]
) -> None:
    environment = build_environment(EnvironmentConfig.model_validate({"name": "env", "kind": kind, "params": params}))
    person = environment.task(0).messages[-1].content.partition("get:")[2].rstrip("=")
    said = tuple(each.format(person or "Ada", "x") if kind == "look_up" else each for each in actions)
    outcome = replay(environment, 0, said)
    group = make_scored_episodes(outcome).group
    rollout = replace(group.rollouts[0], actions=said)
    scored = replace(make_scored_episodes(outcome), group=replace(group, rollouts=(rollout,)))
    columns = turn_columns([scored])
    assert columns["num_calls"].tolist() == [expected]
