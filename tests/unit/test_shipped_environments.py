"""Environments that ship: what earns rewards and what does not, equal on every machine, and unmoved by hostile text."""

import gc
import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarm.config import EnvironmentConfig, SandboxConfig
from swarm.environments.calculator import CalculatorEnvironment, number_in, value_of
from swarm.environments.char_tasks import ALPHABET
from swarm.environments.environment import is_held_out
from swarm.environments.grid_world import GridWorldEnvironment
from swarm.environments.load import build_environment
from swarm.environments.look_up import LookUpEnvironment
from swarm.environments.replay import ReplayedEpisode, replay
from swarm.environments.retry import RetryEnvironment
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.environments.tool_calls import parse_action, render_call
from swarm.episode import OUTCOME, Actions, EpisodeOutcome, ToolCall, TurnStatus
from swarm.errors import ConfigError
from swarm.extras.environments.apps import KINDS, AppsEnvironment
from swarm.extras.environments.apps import TOOLS as APP_TOOLS
from swarm.extras.environments.code import CodeEnvironment
from swarm.extras.environments.dialogue import DialogueEnvironment
from swarm.extras.environments.nim import ROLES, NimEnvironment
from swarm.extras.environments.notes import NotesEnvironment
from swarm.interfaces import Environment
from tests.attacks.hostile_actions import hostile_actions

Shipped = (
    CalculatorEnvironment
    | LookUpEnvironment
    | GridWorldEnvironment
    | RetryEnvironment
    | AppsEnvironment
    | DialogueEnvironment
    | CodeEnvironment
    | NimEnvironment
    | NotesEnvironment
)

REVERSE = {"kind": "char", "dataset": "reverse"}
SUMS = {"kind": "reasoning_gym", "dataset": "chain_sum"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "calculator": ("calculator", {}),
    "calculator of six": ("calculator", {"digits": 6, "terms": 6, "operations": "+-*"}),
    "calculator by line": ("calculator", {"call": "line"}),
    "look_up": ("look_up", {}),
    "look_up in characters": ("look_up", {"style": "char"}),
    "grid_world": ("grid_world", {"size": 5, "keys": 1, "max_turns": 20}),
    "grid_world in characters": ("grid_world", {"style": "char"}),
    "apps": ("apps", {}),
    "code": ("code", {}),
    "nim": ("nim", {}),
    "nim in characters": ("nim", {"style": "char", "heaps": 4, "stones": 4}),
    "notes": ("notes", {"parts": 4}),
    "notes in characters": ("notes", {"style": "char"}),
    "dialogue": ("dialogue", {"slots": 6, "missing": 3}),
    "retry of characters": ("retry", {"inner": REVERSE, "hint": "first"}),
    "retry after examples": ("retry", {"inner": SUMS, "hint": "order", "example": "chat"}),
    "retry asked twice": ("retry", {"inner": REVERSE, "ask": "always", "max_turns": 2}),
    "retry of sums": ("retry", {"inner": SUMS, "hint": "order", "discount": 0.5}),
}
TOOLS: Mapping[str, dict[str, tuple[str, ...]]] = {
    "calculator": {"calculator": ("expression",)},
    "look_up": {"search": ("query",)},
    "apps": {name: known for name, (known, _) in APP_TOOLS.items()},
    "dialogue": {"book": ("name", "day", "time", "guests", "place", "food")},
}


def config_of(case: str, **changes: object) -> EnvironmentConfig:
    kind, params = CASES[case]
    data: dict[str, object] = {"name": "shipped", "kind": kind, "params": params, "num_tasks": 500, **changes}
    return EnvironmentConfig.model_validate(data)


def shipped(case: str, **changes: object) -> Shipped:
    made = build_environment(config_of(case, **changes))
    assert isinstance(made, Shipped)
    return made


def made(kind: str, **params: object) -> Shipped:
    built = build_environment(EnvironmentConfig.model_validate({"name": "made", "kind": kind, "params": params}))
    assert isinstance(built, Shipped)
    return built


def said(environment: Environment, task_id: int, actions: Actions) -> list[str]:
    return [message.content for each in replay(environment, task_id, actions).transitions for message in each.messages]


@pytest.mark.parametrize("case", CASES)
def test_the_demonstration_earns_every_reward(case: str) -> None:
    environment = shipped(case)
    for task_id in range(60):
        outcome = replay(environment, task_id, environment.demonstration(task_id))
        # of a game one role wins
        earned = {value for name, value in outcome.rewards.items() if name not in ROLES}
        assert outcome.is_ended and outcome.reward == 1.0 and earned == {1.0}
        assert all(each.status is TurnStatus.OK for each in outcome.transitions)
        assert -0.1 <= sum(each.reward for each in outcome.transitions) <= 1 + 1e-9


@pytest.mark.parametrize("case", CASES)
def test_a_task_says_how_many_turns_its_episodes_may_have(case: str) -> None:
    environment = shipped(case)
    assert environment.task(3).max_turns == environment.max_turns > 1


@pytest.mark.parametrize("case", CASES)
def test_equal_configurations_play_equal_episodes_in_any_order_and_share_nothing(case: str) -> None:
    one, other = shipped(case), shipped(case)
    actions = [("1", "up", "no"), one.demonstration(7), ("left", "?abc", "2", "right")]
    forward = [replay(one, task_id, each) for task_id in range(20) for each in actions]
    backward = [replay(other, task_id, each) for task_id in reversed(range(20)) for each in reversed(actions)]
    assert forward == backward[::-1]
    assert [one.task(i) for i in range(20)] == [other.task(i) for i in range(20)]
    assert one.verifier == other.verifier != shipped(case, seed=5).verifier


@pytest.mark.parametrize("case", CASES)
def test_about_a_quarter_of_the_problems_is_held_out_and_most_questions_differ(case: str) -> None:
    tasks = [shipped(case).task(task_id) for task_id in range(400)]
    assert 60 <= sum(task.is_held_out for task in tasks) <= 140
    assert len({task.messages for task in tasks}) >= 190


@pytest.mark.parametrize("case", [case for case, (_, params) in CASES.items() if "char" in str(params)])
def test_texts_of_style_char_are_letters_of_the_tiny_model_and_fit_its_context(case: str) -> None:
    environment = shipped(case)
    for task_id in range(200):
        prompt = environment.task(task_id).messages[-1].content
        wrong = replay(environment, task_id, ("?zzz", "x", "?", *"urdlurdl")).transitions
        right = replay(environment, task_id, environment.demonstration(task_id)).transitions
        heard = [message.content for each in (*wrong, *right) for message in each.messages]
        assert not set(prompt + "".join(heard)) - set(ALPHABET)
        longest = max(map(len, heard), default=0) + max(map(len, environment.demonstration(task_id))) + 1
        num_conversations = len({each.conversation for each in right})  # which share the turns
        assert len(prompt) + -(-environment.max_turns // num_conversations) * longest <= 128


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Time is that of the code under test, not of a collection of all that other tests have left."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("case", CASES)
def test_hostile_actions_raise_nothing_earn_nothing_and_take_bounded_time(case: str) -> None:
    environment, kind = shipped(case), CASES[case][0]
    others = [environment.reference(task_id) for task_id in range(1, 40)]
    worst_s = 0.0
    for task_id in range(2):
        question, right = environment.task(task_id).messages[-1].content, environment.reference(task_id)
        others_only = [each for each in others if each != right]
        texts = hostile_actions(TOOLS.get(kind, {}), question, right, others_only, seed=task_id, count=200)
        for text in texts:
            for before in ((), environment.demonstration(task_id)[:-1]):
                episode = ReplayedEpisode(environment, task_id)
                for action in before:
                    episode.step(action)
                began_s = time.process_time()
                transition = episode.step(text)
                worst_s = max(worst_s, time.process_time() - began_s)
                is_paid = transition.is_end and episode.outcome().reward > 0
                # a mutated program that passes all tests is right, too
                wanted = environment.demonstration(task_id)[-1] if kind in ("nim", "apps") else right
                assert not is_paid or kind == "code" or is_plainly_right(text, wanted), (text[:200], wanted)
    assert worst_s < 0.05


def is_plainly_right(text: str, right: str) -> bool:
    """The right answer and nothing else, in a form that the question allows."""
    asked, wanted = parse_action(text.lower()).calls, parse_action(right.lower()).calls
    if len(asked) == 1 and asked == wanted:
        return True
    plain = text.strip().lower().removeprefix("answer:").strip().removesuffix(".")
    return plain in (right.lower(), "+" + right) or (plain.isdigit() and int(plain) == int(right))


@pytest.mark.skipif(sys.platform != "linux", reason="confinement is Linux only")
async def test_the_confined_process_replays_them_all_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = {"question": "two?", "answer": "2"}
    (tmp_path / "records.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    records = {"name": "records", "kind": "retry", "params": {"inner": {"kind": "jsonl", "dataset": "records.jsonl"}}}
    configs = [config_of(case, name=f"case{index}") for index, case in enumerate(CASES)]
    configs.append(EnvironmentConfig.model_validate(records))
    async with SandboxVerifier(tuple(configs), SandboxConfig()) as verifier:
        for config in configs:
            environment = build_environment(config)
            assert isinstance(environment, Shipped)
            episodes = [environment.demonstration(0), ("1", "up", "search x"), ("x" * 100_000,)]
            verdict = await verifier.verify(config.name, 0, episodes)
            assert verdict.outcomes == tuple(replay(environment, 0, each) for each in episodes), config.name
            assert verdict.rewards.tolist() == [1.0, 0.0, 0.0] and verdict.verifier == environment.verifier


@pytest.mark.parametrize("case", CASES)
def test_a_parameter_that_does_not_exist_or_fit_is_refused_by_name(case: str) -> None:
    params = CASES[case][1]
    with pytest.raises(ConfigError, match=r"unknown param 'digts'; known: \['"):
        shipped(case, params={**params, "digts": 3})
    for wrong in (0, 1000, 2.5, True, "2", None):
        with pytest.raises(ConfigError, match=r"params\.max_turns must be a whole number"):
            shipped(case, params={**params, "max_turns": wrong})
    with pytest.raises(ConfigError, match="takes no dataset"):
        shipped(case, dataset="x")


# --- calculator ----------------------------------------------------------------------------------


def call(expression: object, name: str = "calculator") -> str:
    return render_call(ToolCall(name=name, arguments={"expression": expression}))


def test_the_calculator_is_exact_and_reads_nothing_but_short_arithmetic() -> None:
    assert value_of("12 + 34*2") == "80" and value_of("(1 - 3) * 4") == "-8" and value_of("7/2") == "7/2"
    for text in (
        "1/0",
        "9**9",
        "1.5",
        "x",
        "1+" * 100 + "1",
        "",
        "1 2",
        "sin(1)",
        "9" * 12 + "*999999999999" * 5,
    ):
        assert value_of(text) is None
    assert [number_in(text) for text in ("46", "Answer: 46.", "answer:-7", "+5")] == ["46", "46", "-7", "5"]
    assert {number_in(text) for text in ("46 47", "46\n47", "It is 46", "\u0661", "4e1", "4.0", "9" * 41, "")} == {None}


def test_the_part_called_needs_the_right_value_of_an_operation() -> None:
    environment = made("calculator")
    right = environment.reference(0)

    def parts(*actions: str) -> EpisodeOutcome:
        return replay(environment, 0, (*actions, right))

    (asked, _) = environment.demonstration(0)
    assert parts(asked).rewards == {"outcome": 1.0, "called": 1.0}
    for tried in ((), (call("1 + 1"),), (call(right),), (call(f"-(-{right})"),), (asked * 2,), (call("x"),)):
        assert parts(*tried).rewards == {"outcome": 1.0, "called": 0.0}, tried


def test_a_call_in_a_line_is_read_where_it_is_asked_for_only() -> None:
    line, json_ = made("calculator", call="line"), made("calculator")
    (asked, answer) = line.demonstration(0)
    assert asked.startswith("CALC(") and replay(json_, 0, (asked,)).transitions[0].is_end
    transition = replay(line, 0, (asked,)).transitions[0]
    assert [(each.role, each.content) for each in transition.messages] == [("user", line.reference(0))]
    for text in ("CALC(1)\nCALC(2)", f"{asked} {asked}", f"so {asked}", "CALC()", f"{asked}\n{answer}"):
        first = replay(line, 0, (text, answer)).transitions[0]
        assert first.is_end or first.status is TurnStatus.TOOL_ERROR, text


def test_calls_that_the_calculator_refuses_say_why() -> None:
    environment = made("calculator", max_turns=6)
    tried = (call("2 +"), call(7), call("1+1", "adder"), call("1+1") * 2, "<tool_call>{")
    outcome = replay(environment, 0, tried)
    statuses = [each.status for each in outcome.transitions]
    assert statuses == [TurnStatus.TOOL_ERROR] * 4 + [TurnStatus.MALFORMED]
    assert all(each.messages[0].content.startswith("error: ") for each in outcome.transitions)


# --- retry ---------------------------------------------------------------------------------------


def test_a_retry_is_judged_held_out_and_numbered_as_its_inner_task() -> None:
    retry = made("retry", inner=REVERSE)
    inner = build_environment(EnvironmentConfig.model_validate({**REVERSE, "name": "made"}))
    assert [retry.task(i) for i in range(30)] == [replace(inner.task(i), max_turns=3) for i in range(30)]
    assert retry.task(0).is_held_out == is_held_out(retry.task(0).messages[-1].content)
    outcome = replay(retry, 3, ("x", "y", inner.reference(3)))
    assert outcome.rewards == {"outcome": 1.0, "first_try": 0.0, "attempts": 3.0}
    assert replay(retry, 3, ("x", "y", "z")).rewards == {"outcome": 0.0, "first_try": 0.0, "attempts": 3.0}


@pytest.mark.parametrize(
    ("params", "is_refused"),
    [
        ({"max_turns": 2}, True),
        ({"max_turns": 1}, False),
        ({"max_turns": 2, "discount": 0.99}, True),
        ({"discount": 0.5}, False),
        ({"max_turns": 2, "ask": "always"}, False),
    ],
)
def test_tries_at_a_question_with_two_answers_are_refused_where_guessing_pays(
    tmp_path: Path, params: dict[str, Any], is_refused: bool
) -> None:
    records = [json.dumps({"question": f"is {i} even?", "answer": "yes" if i % 2 == 0 else "no"}) for i in range(40)]
    (tmp_path / "records.jsonl").write_text("\n".join(records))
    inner = {"kind": "jsonl", "dataset": str(tmp_path / "records.jsonl")}
    if is_refused:
        with pytest.raises(
            ConfigError,
            match=r"2 tries at questions with 2 different answers pay a guesser (1.00|0.99)",
        ):
            made("retry", inner=inner, **params)
    else:
        assert made("retry", inner=inner, **params).max_turns == params.get("max_turns", 3)


def test_a_retry_around_equal_records_is_one_version_wherever_the_file_is(tmp_path: Path) -> None:
    found: list[str] = []
    for name, answer in (("here", "1"), ("there", "1"), ("other", "2")):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({"question": "a?", "answer": answer}) + "\n")
        inner = {"kind": "jsonl", "dataset": str(path)}
        found.append(build_environment(EnvironmentConfig(name="r", kind="retry", params={"inner": inner})).verifier)
    assert found[0] == found[1] != found[2]


def test_hints_tell_what_they_say_and_no_more() -> None:
    right = made("retry", inner=REVERSE).reference(4)
    assert said(made("retry", inner=REVERSE), 4, ("x",)) == ["no="]
    assert said(made("retry", inner=REVERSE, hint="length"), 4, ("x",)) == [f"no{len(right)}="]
    assert said(made("retry", inner=REVERSE, hint="first"), 4, ("x",)) == [f"no:{right[0]}="]
    sums = made("retry", inner=SUMS, hint="order", max_turns=9)
    value = int(sums.reference(4))
    told = said(sums, 4, (str(value - 1), str(value + 1), "nan", "9" * 400, "\u0661"))
    assert ["higher" in each for each in told] == [True, False, False, False, False]
    assert ["lower" in each for each in told] == [False, True, False, False, False]


def test_a_worked_chat_comes_before_the_question_and_never_asks_it() -> None:
    retry = made("retry", inner=SUMS, hint="order", example="chat")
    inner = build_environment(EnvironmentConfig.model_validate({**SUMS, "name": "made"}))
    questions = [inner.task(number).messages[0].content for number in range(40)]
    for number in range(40):
        opening = [(message.role, message.content) for message in retry.task(number).messages]
        *worked, (_, question) = opening
        assert [role for role, _ in opening] == ["user", "assistant", "user", "assistant", "user", "assistant", "user"]
        asked, wrong, told, right, also_asked, also_right = (content for _, content in worked)
        assert question == questions[number] and question not in (asked, also_asked)
        assert retry.reference(questions.index(asked)) == right != wrong
        assert retry.reference(questions.index(also_asked)) == also_right
        word = "higher" if int(right) > int(wrong) else "lower"
        assert told == f"No, that is wrong. The answer is {word}. Try again."


def test_later_tries_are_worth_less_where_they_are_discounted() -> None:
    retry = made("retry", inner=SUMS, discount=0.5)
    right = retry.reference(1)
    assert [replay(retry, 1, ("x",) * wrong + (right,)).reward for wrong in range(3)] == [1.0, 0.5, 0.25]


def test_where_all_are_asked_again_nothing_says_whether_an_answer_was_right() -> None:
    retry = made("retry", inner=REVERSE, ask="always", max_turns=2)
    right = retry.reference(4)
    told = {retry.episode(4).step(parse_action(text)).messages for text in (right, "zzz", "")}
    assert len(told) == 1
    for first, second in ((right, "zzz"), ("zzz", right), (right, right)):
        episode = retry.episode(4)
        assert not episode.step(parse_action(first)).is_end
        ended = episode.step(parse_action(second))
        assert ended.is_end
        assert ended.rewards[OUTCOME] == float(second == right) and ended.rewards["first_try"] == float(first == right)
    with pytest.raises(ConfigError, match="ask"):
        made("retry", inner=REVERSE, ask="always", hint="first")


@pytest.mark.parametrize(
    ("params", "words"),
    [
        ({}, "params.inner must be"),
        ({"inner": 3}, "params.inner must be"),
        ({"inner": {"kind": "retry", "params": {"inner": REVERSE}}}, "retry again"),
        ({"inner": {"kind": "no_such"}}, "kind"),
        ({"inner": {"kind": "look_up"}}, "single answers"),
        ({"inner": REVERSE, "example": "chat"}, "no style char"),
        ({"inner": {**SUMS, "prefill": "Answer:"}, "example": "chat"}, "no prefill"),
        ({"inner": {**SUMS, "num_tasks": 2}, "example": "chat"}, "needs 3 different answers"),
        ({"inner": SUMS, "example": True}, "none, chat"),
    ],
)
def test_a_retry_around_nothing_that_answers_is_refused(params: dict[str, object], words: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=words):
        made("retry", **params)


# --- look-up -------------------------------------------------------------------------------------


def test_only_the_right_thing_pays_and_only_hops_of_the_question_count() -> None:
    environment = made("look_up")
    table = environment.problem(2).entry if isinstance(environment, LookUpEnvironment) else None
    assert table is not None
    person, place, thing = table.chain
    other = next(name for name in table.where if name != person)
    outcome = replay(environment, 2, (f"search {other}", f"SEARCH: {person}", f"search {person}", f"Answer: {thing}"))
    assert [each.reward for each in outcome.transitions] == [0.0, 0.5, 0.0, 0.0]
    assert outcome.rewards == {"outcome": 1.0, "found": 0.5}
    every = " ".join(table.what.values())
    for answer in (every, f"{thing} {thing}", place, f"search {thing}", "", f"Answer: {every}"):
        assert replay(environment, 2, (answer,)).reward == 0.0
    as_call = render_call(ToolCall(name="search", arguments={"query": person}))
    assert said(environment, 2, (as_call,)) == [f"{person} lives in {place}."]
    assert replay(environment, 2, (as_call * 2,)).transitions[0].status is TurnStatus.TOOL_ERROR


def test_equal_findings_have_equal_keys_in_any_order() -> None:
    environment = made("look_up", style="char")
    ask, then, _ = environment.demonstration(0)
    keys = [
        replay(environment, 0, order).transitions[-1].state_key
        for order in ((ask, then), (then, ask), (then, ask, ask))
    ]
    assert len(set(keys)) == 1 and replay(environment, 0, (ask,)).transitions[0].state_key != keys[0]


# --- grid world ----------------------------------------------------------------------------------


def test_walking_in_circles_earns_nothing_and_comes_back_to_the_same_state() -> None:
    environment = made("grid_world", walls=0.0, size=3)
    circle = ("right", "down", "left", "up")
    outcomes = [replay(environment, task_id, circle) for task_id in range(40)]
    closed = [
        each for each in outcomes if not each.is_ended and all(t.status is TurnStatus.OK for t in each.transitions)
    ]
    assert closed
    for outcome in closed:
        assert sum(each.reward for each in outcome.transitions) == pytest.approx(0.0)
        again = (*circle, *circle)
        keys = [each.state_key for each in replay(environment, outcomes.index(outcome), again).transitions]
        assert keys[:4] == keys[4:8] and len(set(keys[:4])) == 4


def test_walls_and_words_that_are_no_step_leave_the_state_as_it_is() -> None:
    environment = made("grid_world", walls=0.0, size=3)
    outcome = replay(environment, 0, ("up",) * 3 + ("up up", "up down left right", ""))
    statuses = [each.status for each in outcome.transitions]
    assert statuses[2:] == [TurnStatus.TOOL_ERROR] + [TurnStatus.MALFORMED] * 3 or outcome.is_ended
    assert len({each.state_key for each in outcome.transitions[2:]}) == 1


def test_a_locked_goal_counts_with_the_key_only() -> None:
    environment = made("grid_world", walls=0.0, keys=1, size=3, max_turns=10)
    assert isinstance(environment, GridWorldEnvironment)
    ended = [replay(environment, task_id, environment.demonstration(task_id)) for task_id in range(50)]
    assert all(each.reward == 1.0 for each in ended)
    passed = 0
    for task_id in range(50):
        grid = environment.problem(task_id).entry
        (row, column), _ = grid.start
        steps = ("down",) * (grid.goal[0] - row) + ("up",) * (row - grid.goal[0])
        steps += ("right",) * (grid.goal[1] - column) + ("left",) * (column - grid.goal[1])
        outcome = replay(environment, task_id, steps)
        has_met_key = any(each.state_key.endswith(",1") for each in outcome.transitions)
        passed += not has_met_key and not outcome.is_ended
    assert passed > 5


# --- apps ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("errand", KINDS)
def test_every_errand_takes_two_to_four_calls_and_a_part_of_it_earns_a_part(errand: str) -> None:
    environment = made("apps", errand=errand)
    for task_id in range(20):
        *calls, done = environment.demonstration(task_id)
        assert 2 <= len(calls) <= 4
        worth = [replay(environment, task_id, (*calls[:count], done)).reward for count in range(len(calls) + 1)]
        assert worth[0] == 0.0 and worth == sorted(worth) and worth[-1] == 1.0
        at_once = replay(environment, task_id, ("".join(calls), done))
        assert at_once.reward == 1.0 and len(at_once.transitions[0].messages) == len(calls)


def test_other_changes_cost_what_required_ones_earn() -> None:
    environment = made("apps", errand="tell")
    *calls, done = environment.demonstration(0)
    spam = render_call(ToolCall(name="mail_send", arguments={"to": "Ada", "text": "hello"}))
    outcome = replay(environment, 0, (*calls, spam, done))
    assert outcome.rewards == {"outcome": 0.0, "effects": 1.0, "tidy": 0.0}
    assert [each.reward for each in outcome.transitions] == [0.0, 1.0, -1.0, 0.0]
    every_time = [
        render_call(ToolCall(name="mail_send", arguments={"to": "Ada", "text": f"{h}:00"})) for h in range(8, 22)
    ]
    turns = ["".join(every_time[at : at + 4]) for at in range(0, 14, 4)]
    assert replay(environment, 0, (*turns, done)).reward == 0.0
    assert replay(environment, 0, (*calls, calls[-1], done)).reward == 0.0, "the same mail twice"


@pytest.mark.parametrize(("word", "ends"), [("done", True), (" Done.", True), ("I am done", False), ("", False)])
def test_an_errand_ends_with_one_word_and_no_other_text(word: str, ends: bool) -> None:
    environment = made("apps")
    *calls, _ = environment.demonstration(0)
    outcome = replay(environment, 0, (*calls, word))
    assert outcome.is_ended is ends and (outcome.reward == 1.0) is ends
    assert ends or outcome.transitions[-1].status is TurnStatus.MALFORMED


def test_what_was_undone_is_the_state_that_was() -> None:
    environment = made("apps", errand="save")
    write = render_call(ToolCall(name="file_write", arguments={"name": "x", "text": "y"}))
    delete = render_call(ToolCall(name="file_delete", arguments={"name": "x"}))
    listing = render_call(ToolCall(name="file_list", arguments={}))
    keys = [each.state_key for each in replay(environment, 0, (listing, write, delete, listing)).transitions]
    assert keys[0] == keys[2] == keys[3] != keys[1]


# --- dialogue ------------------------------------------------------------------------------------


def test_the_guest_says_one_thing_for_each_question() -> None:
    environment = made("dialogue", slots=6, missing=6)
    everything = "What is the name, day, time, guests, place and food?"
    outcome = replay(environment, 0, (everything, everything, "And the day?", "Tell me all.", "name day" * 200))
    keys = [each.state_key for each in outcome.transitions]
    assert keys == ["name", "name", "day name", "day name", "day name"]
    assert all(each.reward == pytest.approx(-0.02) for each in outcome.transitions)


def test_only_the_whole_form_is_right_and_it_ends_the_episode() -> None:
    environment = made("dialogue")
    *asked, form = environment.demonstration(3)
    assert replay(environment, 3, (form,)).rewards == {"outcome": 1.0, "slots": 1.0, "brief": 1.0}
    wasted = replay(environment, 3, (*asked, *asked, form)).rewards
    assert wasted == {"outcome": 1.0, "slots": 1.0, "brief": 0.5}
    wrong = render_call(ToolCall(name="book", arguments=dict.fromkeys(("name", "day", "time", "guests"), "5")))
    assert replay(environment, 3, (wrong, form)).reward == 0.0
    partial = replay(environment, 3, (render_call(ToolCall(name="book", arguments={"name": "x"})),))
    assert not partial.is_ended and partial.transitions[0].status is TurnStatus.TOOL_ERROR
