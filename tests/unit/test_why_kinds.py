"""Kinds of faults that `swarm why` names whatever plants them, each with a healthy neighbour of which it says nothing.

They are of the data, of rewards beside right answers, of what is drawn, of the pace, and of a restless process.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from swarm.causes import Diagnosed, Gravity, Snapshot, diagnose
from swarm.causes.snapshot import AnsweredGroup
from swarm.config import NodeConfig
from swarm.environments.record_facts import RecordFacts
from swarm.events import (
    NODE,
    Event,
    GroupAdmitted,
    GroupPut,
    GroupsDrawn,
    GroupUse,
    LoopFailed,
    NodeRestored,
    NodeStarted,
    PolicyEvaluated,
    StepMade,
    VersionApplied,
    VersionPublished,
)

START = NodeStarted(at_s=700.0, node_id="a")
STATUS: dict[str, Any] = {"at_s": 1000.0, "last_step_at_s": 1000.0, "started_at_s": 700.0, "pid": 7, "num_put": 40}
OWN: dict[str, Any] = {"name": "own", "kind": "function", "dataset": "my.py:score", "params": {"path": "q.jsonl"}}
JSONL: dict[str, Any] = {"name": "own", "kind": "jsonl", "dataset": "q.jsonl"}


def said(config: dict[str, Any] | None = None, env: dict[str, Any] = OWN, **changes: Any) -> list[Diagnosed]:
    """What is found, notes left out."""
    return [each for each in everything_said(config, env, **changes) if each.gravity is not Gravity.NOTE]


def everything_said(config: dict[str, Any] | None = None, env: dict[str, Any] = OWN, **changes: Any) -> list[Diagnosed]:
    """The same with the notes."""
    status = {**STATUS, **changes.pop("status", {})}
    events = (START, *changes.pop("events", ()))
    sections = {"environments": [env], "directory": {"kind": "none"}, "model": {"source": "tiny"}, **(config or {})}
    model = NodeConfig.model_validate(sections)
    return diagnose(Snapshot(now_s=1000.0, status=status, events=events, config=model, **changes))


def first(found: Sequence[Diagnosed]) -> str:
    return found[0].name if found else ""


# --- records of a file -----------------------------------------------------------------------------------


def records(**facts: Any) -> dict[str, RecordFacts]:
    counts: dict[str, Any] = {"num_records": 100, "num_questions": 100, "answer_chars": (3,) * 100, **facts}
    return {"own": RecordFacts(question_chars=counts.pop("question_chars", (9,) * 100), **counts)}


@pytest.mark.parametrize(
    ("facts", "few", "name"),
    [
        ({"num_contradicting": 40, "first_contradiction": (0, 1)}, {"num_contradicting": 2}, "records_contradict"),
        ({"num_broken": 1}, {}, "records_broken"),
        ({"num_null": 10}, {"num_null": 2}, "answers_no_text"),
        ({"num_no_text": 10}, {"num_no_text": 2}, "answers_no_text"),
        ({"num_told": 95}, {"num_told": 60}, "questions_tell_answers"),
        ({"commonest": 95}, {"commonest": 60}, "one_right_answer"),
        ({"num_questions": 4}, {"num_questions": 80}, "records_repeat"),
        ({"answer_chars": (3,) * 60 + (30,) * 40}, {"answer_chars": (3,) * 98 + (30,) * 2}, "answers_have_no_room"),
        (
            {"question_chars": (9,) * 99 + (600,)},
            {"question_chars": tuple(range(60, 160))},  # of many lengths
            "questions_too_long",
        ),
    ],
)
def test_a_fault_of_the_records_is_told_from_a_slip(facts: dict[str, Any], few: dict[str, Any], name: str) -> None:
    found = said(env=JSONL, records=records(**facts))
    assert first(found) == name and found[0].evidence and found[0].fix
    assert said(env=JSONL, records=records(**few)) == []


def test_a_list_is_no_fault_where_a_function_may_read_it() -> None:
    assert said(records=records(num_no_text=90)) == []
    assert first(said(records=records(num_null=90))) == "answers_no_text"


# --- answers beside the right ones -----------------------------------------------------------------------


def answered(
    rewards: Sequence[float], kind: str = "is_right", flags: tuple[bool, ...] = (True, False), nats: float = math.nan
) -> tuple[AnsweredGroup, ...]:
    """Sixteen groups of two answers of these rewards, which are of a kind or not."""
    kinds = ("is_right", "is_nearly_right", "is_of_neighbour", "is_end_of_right")
    of = dict.fromkeys(kinds, (False, False)) | {kind: flags}
    return tuple(
        AnsweredGroup(
            env="own",
            rewards=tuple(rewards),
            is_cut=(False, False),
            num_tokens=(3, 4),
            task_id=number,
            prompt=number,
            texts=(2 * number, 2 * number + 1),
            nats=nats,
            **of,
        )
        for number in range(16)
    )


def test_right_answers_that_are_worth_less_than_wrong_ones_are_told_from_those_that_are_paid() -> None:
    (found, *_) = said(answers=answered((0.0, 0.8)))
    assert found.name == "right_answers_unpaid" and "less for right answers" in found.claim
    assert said(answers=answered((1.0, 0.2))) == []


def test_right_answers_with_blanks_around_them_are_named_where_they_are_not_paid() -> None:
    third = answered((1.0, 0.0))[:12] + answered((0.0, 0.0))[12:]
    assert first(said(answers=third, records=records(num_with_blanks=33))) == "answers_with_blanks"
    assert first(said(answers=third)) == "right_answers_unpaid"
    assert said(answers=answered((1.0, 0.0)), records=records(num_with_blanks=33)) == [], "the reward strips them"


def in_vain(num_put: int = 120) -> dict[str, Any]:
    counts = {"num_put": num_put, "num_with_signal": 0, "num_unscored": 0, "error": ""}
    puts = [put(n, 0.0) for n in range(num_put)]
    return {"status": {"own_since_step": counts}, "events": puts}


def put(number: int, reward: float, at_s: float | None = None) -> GroupPut:
    return GroupPut(
        at_s=701.0 + number if at_s is None else at_s, digest=str(number), producer="a", policy_id="a", oldest_step=0,
        env="own", reward_mean=reward, num_tokens=8, size_bytes=1,
    )  # fmt: skip


def test_answers_that_are_right_but_for_their_form_are_named_where_nothing_is_paid() -> None:
    nearly = answered((0.0, 0.0), "is_nearly_right")
    assert first(said(answers=nearly, **in_vain())) == "right_but_for_the_form"
    assert first(said(answers=answered((0.0, 0.0), flags=(False, False)), **in_vain())) == "all_wrong"
    assert said(answers=nearly) == [], "what is learned from is no fault"
    others = answered((0.0, 0.0), flags=(False, False))
    assert first(said(answers=nearly + 2 * others, **in_vain())) == "right_but_for_the_form", "one of six"
    assert first(said(answers=nearly + 6 * others, **in_vain())) == "all_wrong", "one of fourteen may be by chance"


def test_right_answers_that_are_whole_solutions_are_named_where_the_result_alone_is_worth_nothing() -> None:
    ends = answered((0.0, 0.0), "is_end_of_right")
    assert first(said(answers=ends, **in_vain())) == "right_answers_hold_more"
    assert said(answers=answered((1.0, 0.0), "is_end_of_right")) == [], "the reward takes the result out"
    others, marked = answered((0.0, 0.0), flags=(False, False)), records(num_marked=95)
    assert first(said(answers=others, env=JSONL, records=marked, **in_vain())) == "right_answers_hold_more"
    assert first(said(answers=others, records=marked, **in_vain())) == "all_wrong", "a function may take it out"


def test_of_a_node_that_learns_what_is_odd_is_a_note() -> None:
    paid = answered((1.0, 0.7), flags=(False, False)) * 4
    (found, *others) = everything_said(answers=paid)
    assert (found.name, found.gravity) == ("paid_though_wrong", Gravity.NOTE)
    assert found.claim.startswith("64 of 64 answers") and not [each for each in others if each.gravity]
    names = [each.name for each in everything_said(answers=answered((1.0, 0.7)) * 4)]
    assert "paid_though_wrong" not in names, "they are the right one"
    prefilled = OWN | {"prefill": "Label:"}
    assert "prefill_set_so" in {each.name for each in everything_said(env=prefilled)} and said(env=prefilled) == []


def test_right_answers_that_stand_a_line_too_low_are_told_from_wrong_ones() -> None:
    assert first(said(answers=answered((0.0, 0.3), "is_of_neighbour"))) == "answers_are_shifted"
    assert said(answers=answered((0.0, 0.3), flags=(False, False))) == []


def test_nothing_is_paid_after_a_minute_of_half_as_many_groups() -> None:
    few = in_vain(60)
    assert said(**few) == []
    assert first(said(**{**few, "status": {**few["status"], "last_step_at_s": 900.0}})) == "all_wrong"


# --- rewards ---------------------------------------------------------------------------------------------


def test_a_reward_that_pays_for_one_text_whatever_is_asked_is_told_from_one_that_compares() -> None:
    def groups(paid: Sequence[float]) -> tuple[AnsweredGroup, ...]:
        made = answered((0.0, 0.0), flags=(False, False))
        return tuple(
            AnsweredGroup(
                env="own", rewards=(paid[number % len(paid)], 0.2), is_cut=(False, False), num_tokens=(3, 4),
                task_id=number, prompt=number, texts=(7, 100 + number),
            )
            for number, _ in enumerate(made)
        )  # fmt: skip

    assert first(said(answers=groups((1.0,)))) == "reward_ignores_question"
    assert said(answers=groups((1.0, 0.0))) == [], "a text that is right for some questions"
    assert said(answers=groups((0.1,))) == [], "a wrong answer is worth the same everywhere"


def test_equal_answers_to_one_question_are_compared_across_groups() -> None:
    def again(later: float) -> tuple[AnsweredGroup, ...]:
        return tuple(
            AnsweredGroup(
                env="own", rewards=(reward,), is_cut=(False,), num_tokens=(3,), task_id=n, prompt=n, texts=(n,)
            )
            for n in range(8)
            for reward in (0.8, later)
        )

    assert first(said(answers=again(0.4))) == "reward_is_random"
    assert said(answers=again(0.8)) == []


# --- what is drawn, and what steps show before many of them ----------------------------------------------


def steps(rise: float, count: int = 20, moved: float = 0.03, last_s: float = 1000.0, first: int = 1) -> list[Event]:
    figures = {"log_ratio_std": moved, "age_mean_steps": 1.0, "entropy_nats": 1.0}
    return [
        StepMade(
            at_s=last_s - count + number - first + 1, step=number, draw_step=number, digest=str(number), loss=0.0,
            grad_norm=1.0,
            num_tokens=5, diagnostics={**figures, "reward_mean": 0.2 + rise * number + 0.01 * (number % 3)},
        )
        for number in range(first, first + count)
    ]  # fmt: skip


HOT = {"generator": {"temperature": 5.0}}


def test_a_temperature_shows_in_what_tokens_are_drawn_from_before_any_step() -> None:
    assert [each.key for each in said(HOT, answers=answered((1.0, 0.0), nats=3.6))] == ["generator.temperature"]
    assert said(HOT, answers=answered((1.0, 0.0), nats=1.4)) == []
    assert said(answers=answered((1.0, 0.0), nats=3.6)) == [], "a model that begins at nothing learns from it"


def test_a_model_that_knows_nothing_is_named_where_nothing_is_paid() -> None:
    noise = answered((0.0, 0.0), flags=(False, False), nats=3.6)
    assert first(said(answers=noise, **in_vain())) == "model_knows_nothing"


@pytest.mark.parametrize(
    ("key", "value", "moved"),
    [
        ("learner.warmup_steps", 20_000, 0.002),
        ("learner.learning_rate", 4e-6, 0.004),
        ("learner.max_grad_norm", 1e-9, 0.002),
        ("learner.betas", [0.999999, 0.99], 0.03),
        ("learner.updates_per_step", 64, 0.03),
        ("replay.max_reuse", 64, 0.03),
    ],
)
def test_a_bad_value_is_named_after_twenty_steps_that_bring_nothing(key: str, value: Any, moved: float) -> None:
    section, _, name = key.partition(".")
    config = {"learner": {"learning_rate": 1e-4}}
    config[section] = {**config.get(section, {}), name: value}
    assert key in [each.key for each in said(config, events=steps(0.0, moved=moved))][:1]
    assert said(config, events=steps(0.02)) == [], "rewards rise"
    if moved < 0.01:
        assert said(config, events=steps(0.0, moved=0.03)) == [], "steps are as large as usual"


@pytest.mark.parametrize(("use", "is_named"), [(9, True), (1, False)])
def test_groups_that_are_learned_from_again_and_again_are_named_with_their_key(use: int, is_named: bool) -> None:
    uses = (GroupUse(digest="a", producer="a", policy_id="a", age_steps=1, use=use, is_own_policy=True),) * 4
    draws = [
        GroupsDrawn(at_s=980.0 + number, draw_step=number, groups=uses, max_age_steps=4, max_reuse=64)
        for number in range(20)
    ]
    config = {"replay": {"max_reuse": 64}, "learner": {"learning_rate": 1e-4}}
    found = said(config, events=[*steps(0.02), *draws])
    assert [each.key for each in found if each.key] == ["replay.max_reuse"] * is_named


# --- the pace ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("last_s", "is_named"), [(960.0, True), (980.0, False)])
def test_steps_that_come_no_more_are_told_from_a_pause_that_was_there_before(last_s: float, is_named: bool) -> None:
    learning = steps(0.02, last_s=last_s)
    found = said(events=learning, status={"last_step_at_s": last_s})
    assert [each.name for each in found] == ["halted"] * is_named
    slow = [*steps(0.02, count=9, last_s=850.0), *steps(0.02, count=10, last_s=last_s)]
    assert said(events=slow, status={"last_step_at_s": last_s}) == [], "it took 100 s before"
    asked = PolicyEvaluated(
        at_s=last_s - 25, step=0, env="own", split="all", accuracy=0.1, num_problems=9, majority_baseline=0.1
    )
    first_version = VersionPublished(at_s=last_s - 45, policy_id="a", step=0, digest="0")
    evaluated = [first_version, asked, *learning]
    assert said(events=evaluated, status={"last_step_at_s": last_s}) == [], "an evaluation took 20 s before"


def follower(credit: int, last_s: float) -> dict[str, Any]:
    following = {
        "policy": "bb" * 32, "candidates": [], "trainers_without_weights": [], "served_step": 9, "head_step": 9,
        "is_trainer_connected": True, "credit": credit, "num_applied": 10, "state": "ready", "last_error": "",
    }  # fmt: skip
    puts = [put(number, 0.5, last_s - 20 + number) for number in range(20)]
    versions = [VersionApplied(at_s=last_s - 20 + 2 * n, policy_id="bb", step=n, digest=str(n)) for n in range(10)]
    return {
        "status": {"following": following, "last_step_at_s": last_s, "peers": ["bb" * 32]},
        "events": [*puts, *versions],
    }


def test_a_trainer_that_stands_still_is_named_within_a_minute() -> None:
    generator = {"roles": ["generator"], "directory": {"kind": "dht"}}
    (found, *_) = said(generator, **follower(0, 940.0))
    assert found.name == "no_credit" and "paused" in found.claim and "no newer version for 62 s" in found.claim
    assert said(generator, **follower(0, 990.0)) == [] and first(said(generator, **follower(4, 940.0))) == "halted"


def test_others_that_are_gone_are_told_from_others_that_never_were_there() -> None:
    came = GroupAdmitted(
        at_s=800.0, digest="a", producer="bb", policy_id="bb", env="own", oldest_step=0, size_bytes=1, reward_mean=0.5,
        via="bb", age_s=0.1,
    )  # fmt: skip
    swarm = {"directory": {"kind": "dht"}}
    (found, *_) = said(swarm, events=[came], status={"peers": [], "num_admitted": 5})
    assert found.name == "alone" and "are gone" in found.claim
    assert said(swarm, status={"peers": []}) == [], "the first node of a run waits for others"


def test_a_process_that_a_signal_holds_is_named() -> None:
    (found, *_) = said(stopped_pids=(9,))
    assert found.name == "process_stopped" and found.fix == "kill -CONT 9"


# --- a restless process -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("every_s", "is_named"), [(60.0, True), (600.0, False)])
def test_a_node_that_is_started_every_minute_is_told_from_one_that_is_started_now_and_then(
    every_s: float, is_named: bool
) -> None:
    starts_at = [990.0 - every_s * number for number in range(5)][::-1]
    events: list[Event] = [NodeRestored(at_s=starts_at[0])]
    for number, at_s in enumerate(starts_at):
        events += [NodeStarted(at_s=at_s, node_id="a"), *steps(0.02, count=4, last_s=at_s + 9, first=1 + 4 * number)]
    found = diagnose(Snapshot(now_s=1000.0, status=STATUS, events=tuple(events), config=NodeConfig()))
    assert ("restarts_often" in [each.name for each in found]) is is_named


def test_steps_that_several_restarts_made_again_are_added_up() -> None:
    once = [*steps(0.0, count=12), *steps(0.0, count=12), *steps(0.0, count=12)]
    assert first(said(events=once)) == "steps_made_again"
    assert said(events=[*steps(0.02, count=40), *steps(0.02, count=40)[34:]]) == [], "six steps of a kill"


# --- words ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "name"),
    [
        ("RuntimeError: can't start new thread", "too_many_processes"),
        ("OSError: [Errno 5] Input/output error", "disk_fails"),
        ("LookupError: environment own: q.jsonl: record 2 is not JSON", "file_damaged"),
        ("LocalEntryNotFoundError: outgoing traffic has been disabled", "model_not_found"),
    ],
)
@pytest.mark.parametrize("runs", [False, True], ids=["ended", "about to end"])
def test_words_of_the_system_name_the_cause(error: str, name: str, runs: bool) -> None:
    ended = LoopFailed(at_s=999.0, loop=NODE, error=error)
    assert first(said(events=[ended], runs=runs)) == name


def test_what_shapes_the_prompt_is_named_in_the_fix_where_no_answer_is_right(tmp_path: Path) -> None:
    (found, *_) = said(env={**OWN, "system": "answer in french"}, **in_vain())
    assert found.name == "all_wrong" and "environments.system of own = answer in french" in found.fix
    assert "environments." not in said(**in_vain())[0].fix
