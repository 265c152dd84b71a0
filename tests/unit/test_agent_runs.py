"""Runs of agents: recorded token by token, rewarded once, compared within their task, and told what became of them."""

import asyncio
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from node.python_api.agent_run import agent_run
from swarm.clock import ManualClock
from swarm.config.node_config import AGENT_RUNS
from swarm.episode import EpisodeOutcome
from swarm.errors import StorageFull, Unavailable
from swarm.events import PolicyEvaluated
from swarm.exchange.agent import Agent
from swarm.model.conversations import conversation_ids
from swarm.objectives.draw_batch import make_batch
from swarm.serving import agent_runs, held_out_runs
from swarm.serving.agent_runs import RunKey
from swarm.serving.run_groups import RecordedCall
from swarm.serving.run_store import RunState, RunStore
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import ScriptedVerifier
from swarm.testing.nodes import make_agent, make_context
from swarm.trained.learning_evidence import Learned, learning_evidence
from swarm.types import Correction, Draw, DrawnGroup, Evaluation, Rollout, RolloutGroup
from swarm.wire.envelopes import seal_group
from tests.worlds.agent_world import ADA, BOB, IDENTITY, world
from tests.worlds.scripted_model import KEY, TOOL, called, tokenizer, user


def calls_of(group: RolloutGroup, rollout: Rollout, outcome: EpisodeOutcome) -> list[tuple[list[int], list[int]]]:
    """Each action of a rollout, behind what its conversation has before it."""
    trace, calls = rollout.trace, list[tuple[list[int], list[int]]]()
    assert trace is not None
    own = conversation_ids(outcome.conversations, trace.turn_ids, trace.action_mask)
    for turn in range(len(rollout.actions)):
        action = np.flatnonzero((trace.turn_ids == turn) & trace.action_mask)
        conversation = own[action[0]]
        before = trace.token_ids[: action[0]][own[: action[0]] == conversation].tolist()
        opening = [] if conversation else group.prompt_ids.tolist()
        calls.append(([*opening, *before], trace.token_ids[action].tolist()))
    return calls


def test_a_group_holds_the_tokens_that_were_sampled_after_the_very_tokens_that_they_were_sampled_after(
    tmp_path: Path,
) -> None:
    with world(tmp_path, called(), "a part", "the sum is 3", "no") as it:
        question = user("1+2?")
        replies = [it.call("one", question, tools=[TOOL])]
        replies.append(it.call("one", user("a sub-agent's question")))
        message = replies[0]["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
        replies.append(it.call("one", question, message, result, tools=[TOOL]))
        other = it.call("two", user("1+2? quickly"), tools=[TOOL])
        assert it.reward("one", {"rewards": {"outcome": 1.0, "brevity": -2.5}})[1]["group"]["runs"] == 1
        assert it.reward("two", {"reward": 0.25})[1]["state"] == "closed"
        it.hand_over()
        ((group, outcomes),) = it.put
        assert group.env == AGENT_RUNS and [outcome.reward for outcome in outcomes] == [1.0, 0.25]
        assert outcomes[0].rewards == {"outcome": 1.0, "brevity": -2.5}
        assert outcomes[0].conversations == (0, 1, 0) and outcomes[1].conversations == (0,)
        assert group.rollouts[0].actions == (called(), "a part", "the sum is 3")
        for rollout, outcome, expected in zip(group.rollouts, outcomes, (replies, [other]), strict=True):
            assert calls_of(group, rollout, outcome) == [
                (reply["prompt_token_ids"], reply["choices"][0]["token_ids"]) for reply in expected
            ]
            trace = rollout.trace
            assert trace is not None and trace.logprobs is not None
            assert rollout.sampling.temperature == 0.9
            assert np.all(trace.logprobs[trace.action_mask] == -0.5)
            assert np.isnan(trace.logprobs[~trace.action_mask]).all()
            assert [span.version.step for span in trace.spans] == [3]
        states = [it.server.ask(f"/v1/episodes/{run}/reward", {"reward": 0.25}, key=ADA)[0] for run in ("one", "two")]
        assert states == [409, 200]


def agent() -> Agent:
    context = make_context(identity=IDENTITY)
    store = MemoryGroupStore(context.clock, 10**7)
    return make_agent(context, store, verifier=ScriptedVerifier(), tokenizer=tokenizer())


async def test_a_group_of_runs_is_learned_from_once_with_its_outcomes_though_the_worker_dies_and_never_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object) -> None:
        raise Unavailable("killed")

    with world(tmp_path, "yes", "no") as it:
        for run, value in (("one", 1.0), ("two", 0.0)):
            await asyncio.to_thread(it.call, run, user(f"{run}?"))
            await asyncio.to_thread(it.reward, run, {"rewards": {"outcome": value, "style": 0.5}})
        ours = agent()
        with monkeypatch.context() as killed:
            killed.setattr(RunStore, "settle", die)
            with pytest.raises(Unavailable):
                await it.runs.hand_over(ours.local.put)
        assert ours.replay.num_local == 1 and ours.own_groups.num_asked == 0
        (scored,) = await ours.store.load_scored(10)
        assert scored.rewards.tolist() == [1.0, 0.0] and scored.correction is Correction.EXACT
        draw = Draw(step=1, groups=(DrawnGroup(scored=scored, age_steps=0, use=1),), num_zero_variance=0)
        batch = make_batch(draw, tokenizer())
        assert batch.reward_parts["style"].tolist() == [0.5, 0.5]
        assert AGENT_RUNS in ours.config.own_environments
        ours.replay.discard(scored.digest, "learned from")
        it.restart()
        it.clock.advance(30.0)
        await it.runs.hand_over(ours.local.put)
        assert ours.replay.num_local == 0 and (await ours.store.head()).sequence == 1
        assert (await it.runs.state(RunKey("ada", "one")))["state"] == "learned"
        await it.runs.hand_over(it.take)
        assert it.put == []


def test_a_kill_in_the_middle_of_a_run_loses_nothing_and_a_run_without_reward_is_not_learned_from(
    tmp_path: Path,
) -> None:
    with world(tmp_path, "a", "b", "c") as it:
        first = it.call("one", user("1"))["choices"][0]
        it.restart()
        it.call("one", user("1"), first["message"], user("2"))
        it.call("half", user("1"))
        it.call("two", user("1"))
        it.reward("one", {"reward": 1})
        it.restart()
        it.reward("two", {"reward": 0})
        it.restart()
        it.mean = float("nan")  # the node has no room
        it.hand_over()
        it.mean = 0.5
        it.hand_over()
        (refused, again) = it.put
        assert [rollout.actions for rollout in again[0].rollouts] == [("a", "b"), ("c",)]
        assert seal_group(refused[0], IDENTITY).digest == seal_group(again[0], IDENTITY).digest
        it.clock.advance(agent_runs.IDLE_S + 1)
        it.hand_over()
        assert len(it.put) == 2
        _, state = it.reward("half", {"reward": 1})
        assert state["error"]["message"].startswith("the run 'half' is over")


def test_a_group_closes_after_a_time_that_is_shown_and_old_or_single_runs_are_told_why_they_do_not_count(
    tmp_path: Path,
) -> None:
    with world(tmp_path, "a", group_size=4) as it:
        for run in ("one", "two", "three"):
            it.call(run, user("1"))
        it.reward("one", {"reward": 1})
        it.clock.advance(20)
        assert it.reward("two", {"reward": 0})[1]["group"] == {"runs": 2, "of": 4, "closes_in_s": 40}
        it.call("old", user("1"), task="of old")
        it.call("alone", user("1"), task="")
        it.clock.advance(41)
        it.version = replace(it.version, step=8)
        told = [it.reward(run, {"reward": 1})[1] for run in ("old", "three")]
        assert {each["reason"] for each in told} == {"age 5 steps exceeds replay.max_age_steps 4"}
        assert {each["state"] for each in told} == {"not_learned"}
        it.version = replace(it.version, step=7)
        it.hand_over()
        assert [len(group.rollouts) for group, _ in it.put] == []  # they grew too old while they waited
        assert it.reward("alone", {"reward": 1})[1]["reason"].endswith("replay.keep_zero_variance = true)")
        status, seen = it.server.ask(SESSION, key=ADA)
        assert status == 200 and seen["states"] == {"not_learned": 5} and sum(seen["reasons"].values()) == 5
    (tmp_path / "b").mkdir()
    with world(tmp_path / "b", "a", group_size=4, takes_single_runs=True) as it:
        for run in ("one", "two", "three"):
            it.call(run, user("1"), task="" if run == "three" else "t")
            it.reward(run, {"reward": 1})
        it.hand_over()
        it.clock.advance(61)
        it.hand_over()
        assert [len(group.rollouts) for group, _ in it.put] == [1, 2]


def test_calls_that_make_no_episode_are_answered_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_runs, "MAX_TURNS", 2)
    with world(tmp_path, "a", max_episode_tokens=300) as it:
        it.call("ways", user("1"))
        it.call("ways", user("1"), temperature=0.1)
        for _ in range(3):
            it.call("many", user("1"))
        it.call("long", user("1 " * 200))
        it.call("long", user("2 " * 200))
        reasons = [it.reward(run, {"reward": 1})[1]["reason"] for run in ("ways", "many", "long")]
        assert reasons[0].startswith("its calls have 2 ways of sampling") and reasons[1] == "more than 2 calls"
        assert "exceed generator.max_episode_tokens 300" in reasons[2]
        answer = it.call("cut", user("1"), max_tokens=1000)
        assert it.server.engine.requests[-1].sampling.max_new_tokens == 120 and answer["choices"]


SESSION = "/v1/episodes"


def test_a_key_of_its_own_binds_calls_and_reward_to_one_run(tmp_path: Path) -> None:
    with world(tmp_path, "a") as it:
        status, opened = it.server.ask(SESSION, {"task": "t"}, key=ADA)
        assert status == 200 and opened["state"] == "open"
        key, reward_key, run = opened["key"], opened["reward_key"], opened["id"]
        it.restart()
        status, _ = it.server.ask("/v1/chat/completions", {"messages": [user("1")]}, key=key)
        assert status == 200
        assert it.server.ask(SESSION, {}, key=key)[0] == 403
        it.call("other", user("1"))
        assert it.reward("other", {"reward": 1}, key=reward_key)[0] == 404
        status, refusal = it.reward(run, {"reward": 1}, key=key)  # its agent would reward itself
        assert status == 403 and "reward_key" in refusal["error"]["message"]
        assert (
            it.server.ask("/v1/chat/completions", {"messages": [user("1")]}, key=key, headers={"X-Episode": "x"})[0]
            == 403
        )
        assert it.reward(run, {"reward": 1}, key=reward_key)[1]["num_calls"] == 1
        assert it.server.ask("/v1/chat/completions", {"messages": [user("1")]}, key=key)[0] == 409
        assert it.server.ask(SESSION, {"id": run}, key=ADA)[0] == 409


def test_nobody_rewards_a_run_of_another_key_or_records_with_a_key_that_does_not_learn(tmp_path: Path) -> None:
    with world(tmp_path, "a") as it:
        it.call("one", user("1"))
        for key, status in ((BOB, 404), (KEY, 403), ("run-x", 401), ("reward-x", 401), (ADA[:-1], 401)):
            assert it.reward("one", {"reward": 1}, key=key)[0] == status
        it.call("one", user("1"), key=BOB)  # a run of its own
        body, headers = {"messages": [user("1")]}, {"X-Episode": "one"}
        assert it.server.ask("/v1/chat/completions", body, key=KEY, headers=headers)[0] == 403
        assert it.server.ask("/v1/chat/completions", body, key=KEY)[0] == 200
        state = it.reward("one", {"reward": 0.5})[1]
        assert (state["num_calls"], state["group"]["runs"]) == (1, 1)


@pytest.mark.parametrize(
    "body",
    [
        b'{"reward": NaN}',
        b'{"reward": 1e999}',
        {"reward": 1.5},
        {"reward": -1},
        {"reward": "x"},
        {},
        {"reward": 1, "rewards": {"a": 1}},
        {"rewards": {}},
        {"rewards": {"outcome": 2}},
        {"rewards": {"a": 5, "b": 1}},
        {"rewards": {"a b": 1}},
        {"rewards": {"a": 1e9, "outcome": 1}},
        {"rewards": {str(i): 0 for i in range(33)}},
        {"reward": 1, "learn": True},
        b"[" * 10_000,
    ],
    ids=str,
)
def test_a_reward_that_is_no_bounded_number_changes_nothing(tmp_path: Path, body: object) -> None:
    with world(tmp_path, "a") as it:
        it.call("one", user("1"))
        status, reply = it.reward("one", body)
        assert status == 400 and reply["error"]["type"] == "invalid_request_error"
        assert it.reward("one", {"reward": 1})[0] == 200


def test_a_call_that_ends_while_its_run_is_rewarded_is_looked_at_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(tmp_path, "a") as it:
        it.call("one", user("1"))
        looks, read = list[int](), RunStore.calls

        def read_late(store: RunStore, run: int) -> tuple[RecordedCall, ...]:
            calls = read(store, run)
            looks.append(len(calls))
            if len(looks) == 1:
                it.call("one", user("2"))
            return calls

        monkeypatch.setattr(RunStore, "calls", read_late)
        assert it.reward("one", {"reward": 1})[1]["num_calls"] == 2
        assert looks[:2] == [1, 2]


def test_a_call_beyond_the_bounds_while_its_run_is_rewarded_spoils_no_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world(tmp_path, "a") as it:
        for run in ("one", "two", "three"):
            it.call(run, user("1"))
        calls = RunStore.calls

        def look(store: RunStore, number: int) -> tuple[RecordedCall, ...]:
            found = calls(store, number)
            if found:
                store.add_call(number, found[0], 0.0, max_calls=1, max_bytes=10**6)
            return found

        with monkeypatch.context() as racing:
            racing.setattr(RunStore, "calls", look)
            assert it.reward("one", {"reward": 1})[1]["reason"] == "more than 1 calls"
        for run in ("two", "three"):
            it.reward(run, {"reward": 0.5})
        it.hand_over()
        assert [outcome.reward for outcome in it.put[0][1]] == [0.5, 0.5]


async def test_a_group_that_the_node_cannot_take_ends_neither_the_node_nor_other_groups(tmp_path: Path) -> None:
    refused: list[Exception] = [StorageFull("full"), ValueError("out of range")]
    with world(tmp_path, "a", group_size=1) as it:

        async def put(group: RolloutGroup, outcomes: Sequence[EpisodeOutcome]) -> float:
            if refused and outcomes[0].reward == 1:
                raise refused.pop(0)
            return await it.take(group, outcomes)

        for task in ("first", "second"):
            await asyncio.to_thread(it.call, task, user("1"), task=task)
            await asyncio.to_thread(it.reward, task, {"reward": float(task == "first")})
        with pytest.raises(StorageFull):
            await it.runs.hand_over(put)
        await it.runs.hand_over(put)
        assert len(it.put) == 1 and it.put[0][1][0].reward == 0
        first, second = [await it.runs.state(RunKey("ada", each)) for each in ("first", "second")]
        assert first["state"] == "not_learned" and "ValueError: out of range" in first["reason"]
        assert second["state"] == "learned"


async def test_a_full_store_loses_no_run(tmp_path: Path) -> None:
    with world(tmp_path, "a", group_size=1) as it:
        await asyncio.to_thread(it.call, "one", user("1"))
        await asyncio.to_thread(it.reward, "one", {"reward": 1})
        full = make_agent(make_context(identity=IDENTITY), MemoryGroupStore(ManualClock(), 10), tokenizer=tokenizer())
        for _ in range(agent_runs.MAX_PUTS + 1):
            with pytest.raises(StorageFull):
                await it.runs.hand_over(full.local.put)
        await it.runs.hand_over(agent().local.put)
        assert (await it.runs.state(RunKey("ada", "one")))["state"] == "learned"


def test_a_count_that_no_group_can_hold_is_refused(tmp_path: Path) -> None:
    with world(tmp_path, "a") as it:
        body = {"messages": [user("1")], "top_k": 2**40}
        status, reply = it.server.ask("/v1/chat/completions", body, key=ADA, headers={"X-Episode": "one"})
        assert status == 400 and "top_k: Input should be less than 2147483648" in reply["error"]["message"]


def test_runs_and_bytes_of_a_key_are_bounded_and_of_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_runs, "MAX_OPEN_RUNS", 2)
    with world(tmp_path, "a") as it:
        for run in ("one", "two"):
            it.call(run, user("1"))
        body = {"messages": [user("1")]}
        status, reply = it.server.ask("/v1/chat/completions", body, key=ADA, headers={"X-Episode": "three"})
        assert status == 429 and "at most 2" in reply["error"]["message"]
        it.call("three", user("1"), key=BOB)
        it.reward("two", {"reward": 1})  # now it waits for others of its task
        assert it.server.ask("/v1/chat/completions", body, key=ADA, headers={"X-Episode": "three"})[0] == 429
        monkeypatch.setattr(agent_runs, "MAX_BYTES", 10)
        it.call("one", user("2"))  # it is answered, and not kept
        assert "bytes are kept for this key" in it.reward("one", {"reward": 1})[1]["reason"]


@pytest.mark.parametrize(
    ("headers", "fields", "words"),
    [
        ({"X-Episode": "a/b"}, {}, "X-Episode: 'a/b' does not match"),
        ({"X-Episode": "a" * 65}, {}, "does not match"),
        ({"X-Episode": "one", "X-Task": "t" * 129}, {}, "X-Task"),
        ({"X-Task": "t"}, {}, "X-Task: names the task of a run"),
        ({"X-Episode": "one"}, {"n": 2}, "n: 2 answers"),
    ],
)
def test_a_call_that_belongs_to_no_one_run_is_refused(
    tmp_path: Path, headers: dict[str, str], fields: dict[str, Any], words: str
) -> None:
    with world(tmp_path, "a") as it:
        body = {"messages": [user("1")], **fields}
        status, reply = it.server.ask("/v1/chat/completions", body, key=ADA, headers=headers)
        assert status == 400 and words in reply["error"]["message"]
        assert it.server.engine.requests == []


def test_streamed_calls_and_missed_forms_are_recorded_too(tmp_path: Path) -> None:
    with world(tmp_path, "streamed", "no call") as it:
        headers, body = {"X-Episode": "one", "X-Task": "t"}, {"messages": [user("1")]}
        assert it.server.send("/v1/chat/completions", body | {"stream": True}, key=ADA, headers=headers)[0] == 200
        needed = body | {"tools": [TOOL], "tool_choice": "required"}
        assert it.server.send("/v1/chat/completions", needed, key=ADA, headers=headers)[0] == 422
        assert it.reward("one", {"reward": 0})[1]["num_calls"] == 2  # the last try of the second


def test_of_the_tries_at_a_form_the_answer_that_is_sent_alone_is_an_action_of_the_run(tmp_path: Path) -> None:
    with world(tmp_path, "") as it:
        for run in ("one", "two"):
            it.server.engine.texts = ["no", '{"a": 1', '{"a": 2}', "no", "{}"]
            fields: dict[str, Any] = {"response_format": {"type": "json_object"}}
            first = it.call(run, user("?"), **fields)
            message = first["choices"][0]["message"]
            second = it.call(run, user("?"), message, user("more"), **fields)
            assert it.reward(run, {"reward": 1})[1]["num_calls"] == 2
        it.hand_over()
        ((group, outcomes),) = it.put
        assert group.rollouts[0].actions == ('{"a": 2}', "{}")
        assert outcomes[0].conversations == (0, 0)
        prompts = [prompt for prompt, _ in calls_of(group, group.rollouts[0], outcomes[0])]
        assert prompts == [first["prompt_token_ids"], second["prompt_token_ids"]]


def test_held_out_runs_are_measured_round_by_round_and_never_learned_from(tmp_path: Path) -> None:
    names = [f"task {number}" for number in range(8)]
    with world(tmp_path, "a") as it:

        def measure(task: str, reward: float) -> tuple[int, dict[str, Any]]:
            status, run = it.server.ask("/v1/episodes", {"task": task, "held_out": True}, key=ADA)
            assert status == 200 and run["state"] == "held_out"
            path = f"/v1/episodes/{run['id']}/reward"
            assert it.server.ask(path, {"reward": reward}, key=ADA)[0] == 409  # nothing was called
            assert it.server.ask("/v1/chat/completions", {"messages": [user("1")]}, key=run["key"])[0] == 200
            return it.server.ask(path, {"reward": reward}, key=run["reward_key"])

        for name in names:
            assert measure(name, 0.0)[1]["state"] == "measured"
        it.clock.advance(held_out_runs.QUIET_S)
        (before,) = asyncio.run(it.runs.ended_rounds())
        it.version = it.server.engine.version = replace(it.version, step=9)
        for name in names:
            measure(name, 1.0)
        (after,) = asyncio.run(it.runs.ended_rounds())  # each is measured
        measure(names[0], 0.25)
        measure(names[0], 1.0)  # measured again: another round
        (alone,) = asyncio.run(it.runs.ended_rounds())
        it.hand_over()
        assert it.put == [] and it.server.ask("/v1/episodes", {"held_out": True}, key=ADA)[0] == 400
    assert (before.step, before.accuracy, after.step, after.accuracy) == (3, 0.0, 9, 1.0)
    assert alone.num_right == (0, *(7 * [-1])) and alone.rewards[0] == 0.25 and alone.num_problems == 1
    evidence = learning_evidence(map(PolicyEvaluated.of, (before, after)))
    assert evidence.verdict is Learned.YES and evidence.words.startswith("learned: held out 0.00 -> 1.00 of 8 problems")


def test_a_held_out_run_that_is_under_way_keeps_its_round_open(tmp_path: Path) -> None:
    with world(tmp_path, "a") as it:
        runs = [it.server.ask("/v1/episodes", {"task": task, "held_out": True}, key=ADA)[1] for task in "ab"]
        for run in runs:
            it.server.ask("/v1/chat/completions", {"messages": [user("1")]}, key=run["key"])
        it.server.ask(f"/v1/episodes/{runs[0]['id']}/reward", {"reward": 1}, key=ADA)
        it.restart()
        it.clock.advance(held_out_runs.QUIET_S)
        assert asyncio.run(it.runs.ended_rounds()) == []
        it.server.ask(f"/v1/episodes/{runs[1]['id']}/reward", {"reward": 1}, key=ADA)
        it.clock.advance(held_out_runs.QUIET_S)
        (seen,) = asyncio.run(it.runs.ended_rounds())
        assert seen.num_problems == 2  # one of them was measured before the restart


def test_a_task_that_comes_later_is_compared_with_its_own_first_result(tmp_path: Path) -> None:
    reported: list[Evaluation] = []
    with world(tmp_path, "a") as it:

        def measure(tasks: Sequence[str], reward: float) -> None:
            for task in tasks:
                run = it.server.ask("/v1/episodes", {"task": task, "held_out": True}, key=ADA)[1]
                it.server.ask("/v1/chat/completions", {"messages": [user("1")]}, key=run["key"])
                it.server.ask(f"/v1/episodes/{run['id']}/reward", {"reward": reward}, key=ADA)
            it.clock.advance(held_out_runs.QUIET_S)
            reported.extend(asyncio.run(it.runs.ended_rounds()))

        later = [f"later {number}" for number in range(8)]
        measure(["a try"], 1.0)
        measure(later, 0.0)
        it.restart()
        it.version = it.server.engine.version = replace(it.version, step=9)
        measure(later, 1.0)
    assert [(each.step, each.num_problems) for each in reported] == [(3, 1), (3, 9), (3, 8), (9, 8)]
    evidence = learning_evidence(map(PolicyEvaluated.of, reported))
    assert evidence.words.startswith("learned: held out 0.00 -> 1.00 of 8 problems")


def test_a_damaged_file_of_runs_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "agent_runs.sqlite"
    path.write_bytes(b"no database" * 1000)
    store = RunStore(path, 0.0)
    assert store.moved_aside is not None and store.sessions() == {} and path.stat().st_mode & 0o777 == 0o600
    store.close()


def test_a_group_is_closed_once_though_several_threads_see_that_it_is_complete(tmp_path: Path) -> None:
    with world(tmp_path, "a") as it:
        for run in ("one", "two"):
            it.call(run, user("1"))
            row = it.store.find("ada", run)
            assert row is not None and it.store.reward(row, {"outcome": 1.0}, 3, "", it.clock.now_s())
        (members,) = it.store.waiting().values()
        for _ in range(2):  # as two threads that read before either wrote
            it.store.close_group([row.number for row in members], "t", "float32", it.clock.now_s())
        it.store.refuse([members[0].number], RunState.WAITING, "too late")
        (closed,) = it.store.closed_groups()
        assert len(it.store.runs_of(closed.number)) == 2


def test_the_key_for_a_server_of_this_machine_goes_to_no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{proxy.getsockname()[1]}")
        with pytest.raises(Unavailable), agent_run("http://127.0.0.1:9/v1", "key"):
            pass
        proxy.setblocking(False)
        with pytest.raises(BlockingIOError):
            proxy.accept()
