"""JSONL and function environments, and the plug-in loader they use."""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from swarm.config import EnvironmentConfig
from swarm.environments.jsonl import MAX_LINE_BYTES, is_same_answer
from swarm.environments.load import build_environment, signals_of
from swarm.environments.replay import answer_reward, replay
from swarm.errors import ConfigError
from swarm.interfaces import Environment
from swarm.plugins import load_object

RECORDS = [{"question": "2+2?", "answer": "4"}, {"question": "Capital of France?", "answer": "Paris"}]


@pytest.fixture
def problems(tmp_path: Path) -> Path:
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in RECORDS) + "\n\n", encoding="utf-8")
    return path


def config(path: Path, **changes: object) -> EnvironmentConfig:
    return EnvironmentConfig.model_validate({"name": "p", "kind": "jsonl", "dataset": str(path), **changes})


def test_records_are_numbered_by_line_and_matched_up_to_white_space(problems: Path) -> None:
    env = build_environment(config(problems))
    assert env.num_tasks == 2
    assert env.task(1).messages[0].content == "Capital of France?"
    assert answer_reward(env, 1, " Paris\n") == 1.0 and answer_reward(env, 1, "paris") == 0.0
    assert answer_reward(env, 0, "4.0") == 1.0 and answer_reward(env, 0, "5") == 0.0
    with pytest.raises(LookupError):
        env.task(2)


def test_a_file_with_another_digest_is_refused_and_the_right_one_accepted(problems: Path) -> None:
    digest = hashlib.sha256(problems.read_bytes()).hexdigest()
    assert build_environment(config(problems, digest=digest)).num_tasks == 2
    with pytest.raises(ConfigError, match=digest):
        build_environment(config(problems, digest="0" * 64))


def test_a_version_names_what_is_in_the_file_and_not_where_it_is(problems: Path, tmp_path: Path) -> None:
    copy, other = tmp_path / "copy.jsonl", tmp_path / "other.jsonl"
    copy.write_bytes(problems.read_bytes())
    other.write_bytes(problems.read_bytes().replace(b"2+2", b"3+1"))
    one, same, another = (build_environment(config(path)).verifier for path in (problems, copy, other))
    assert one == same != another


def test_an_overlong_line_is_refused_before_it_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_bytes(b'{"question": "' + b"x" * (MAX_LINE_BYTES + 10) + b'"}\n')
    with pytest.raises(ConfigError, match="record 0 is longer"):
        build_environment(config(path))


def test_missing_file_empty_file_and_missing_field_are_named(tmp_path: Path, problems: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.jsonl"):
        build_environment(config(tmp_path / "absent.jsonl"))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(ConfigError, match="no records"):
        build_environment(config(tmp_path / "empty.jsonl"))
    with pytest.raises(LookupError, match="no field 'prompt'"):
        build_environment(config(problems, params={"question": "prompt"})).task(0)


@pytest.mark.parametrize(
    ("answer", "reference", "same"),
    [
        *(("1,000", "1000", True), ("0.50", ".5", True), ("a  b", "a b", True), ("nan", "NaN", False)),
        *(("inf", "Infinity", False), ("1_0", "10", False), ("", "0", False), ("\u0661", "1", False)),
    ],
)
def test_same_answer(answer: str, reference: str, same: bool) -> None:
    assert is_same_answer(answer, reference) is same


def judged(folder: Path, problems: Path, code: str, **changes: Any) -> Environment:
    """An environment whose answers the function `score` of this code judges."""
    rule = folder / f"rule_{len(list(folder.iterdir()))}.py"  # a file is imported once
    rule.write_text(code)
    section = {"kind": "function", "dataset": f"{rule}:score", "params": {"path": str(problems)}}
    return build_environment(config(problems, **section, **changes))


def test_a_function_judges_and_its_code_names_the_verifier(problems: Path, tmp_path: Path) -> None:
    rule = tmp_path / "rule.py"
    rule.write_text("def score(question, answer, reference):\n    return len(answer) / len(reference)\n")
    named = config(problems, kind="function", dataset=f"{rule}:score", params={"path": str(problems)})
    env = build_environment(named)
    assert answer_reward(env, 1, "Par") == pytest.approx(0.6)
    with pytest.raises(ValueError, match=r"score returned 3\.2, outside of reward_range \[0, 1\]: set reward_range"):
        answer_reward(env, 1, "Paris, of course")
    copy, other = tmp_path / "copy.py", tmp_path / "other.py"
    copy.write_bytes(rule.read_bytes())
    other.write_bytes(rule.read_bytes() + b"# changed\n")
    verifiers = [
        build_environment(named.model_copy(update={"dataset": f"{path}:score"})).verifier for path in (copy, other)
    ]
    assert verifiers[0] == env.verifier != verifiers[1]


def test_rewards_of_a_declared_range_are_rescaled_and_no_others_pass(problems: Path, tmp_path: Path) -> None:
    code = "def score(question, answer, reference):\n    return float(answer)\n"
    env = judged(tmp_path, problems, code, reward_range=(-1.0, 2.0))
    assert [answer_reward(env, 0, text) for text in ("-1", "0.5", "2")] == [0.0, 0.5, 1.0]
    for text in ("nan", "inf", "-1.1", "2.1"):
        with pytest.raises(ValueError, match=r"outside of reward_range \[-1, 2\]"):
            answer_reward(env, 0, text)
    assert env.verifier != judged(tmp_path, problems, code).verifier  # nodes that differ refuse
    for wrong, says in (((1.0, 1.0), "1 is not below 1"), ((0.0, float("inf")), "finite")):
        with pytest.raises(ValueError, match=says):
            judged(tmp_path, problems, code, reward_range=wrong)
    with pytest.raises(ValueError, match=r"kind jsonl has rewards in \[0, 1\]"):
        config(problems, reward_range=(-1.0, 1.0))


@pytest.mark.parametrize(
    ("fourth", "value", "expected"),
    [
        ("record", "record['worth']", 0.25),
        ("record=None", "1.0 if record else 0.0", 1.0),
        ("*, record=None", "1.0 if record else 0.0", 0.0),  # nothing is passed by name
        ("strict=None", "1.0 if strict else 0.0", 0.0),  # the function's own
        ("*more", "1.0 if more else 0.0", 0.0),
    ],
)
def test_a_function_may_take_the_whole_record_as_record_alone(
    tmp_path: Path, fourth: str, value: str, expected: float
) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"question": "2+2?", "answer": "4", "worth": 0.25}) + "\n")
    env = judged(tmp_path, path, f"def score(question, answer, reference, {fourth}):\n    return {value}\n")
    assert answer_reward(env, 0, "4") == expected


def test_a_function_that_cannot_be_called_or_returns_nothing_is_refused_with_the_fix(
    problems: Path, tmp_path: Path
) -> None:
    says = r"score\(prompts, completions\) cannot be called; write it as score\(question"
    with pytest.raises(ConfigError, match=says):
        judged(tmp_path, problems, "def score(prompts, completions):\n    return 1.0\n")
    env = judged(tmp_path, problems, "def score(question, answer, reference):\n    answer == reference\n")
    with pytest.raises(TypeError, match="score returned nothing: end it with `return` and a number"):
        answer_reward(env, 0, "4")


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("async def score(question, answer, reference):\n    return 1.0\n", "a coroutine: write `def`"),
        ("def score(question, answer, reference):\n    yield 1.0\n", "a generator: end it with `return`"),
        ("def score(question, answer, reference):\n    return b'1'\n", "the bytes b'1', where a number belongs"),
    ],
)
def test_what_is_no_number_is_named_as_what_it_is(problems: Path, tmp_path: Path, code: str, problem: str) -> None:
    with pytest.raises(TypeError, match=problem):
        answer_reward(judged(tmp_path, problems, code), 0, "4")


@pytest.mark.parametrize("value", [None, [], {"a": 1}])
@pytest.mark.parametrize("key", ["question", "answer"])
def test_a_question_or_answer_that_is_no_text_and_no_number_is_named(tmp_path: Path, key: str, value: object) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"question": "2+2?", "answer": "4", key: value}) + "\n")
    with pytest.raises(LookupError, match=f"record 0 has .* as '{key}', where a text or a number belongs"):
        build_environment(config(path)).task(0)


def test_a_null_in_the_place_of_an_answer_that_nobody_needs_is_none(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(json.dumps({"question": "2+2?", "answer": None}) + "\n")
    env = judged(tmp_path, path, "def score(question, answer, reference):\n    return float(reference == '')\n")
    assert answer_reward(env, 0, "4") == 1.0


@pytest.mark.parametrize("content", [[{"type": "text", "text": "2+2?"}], None])
def test_a_message_that_is_no_text_is_not_asked_as_its_python_form(tmp_path: Path, content: object) -> None:
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": content}], "answer": "4"}) + "\n")
    with pytest.raises(LookupError, match=r"record 0, messages\[0\]: expected role and content, both text, got"):
        build_environment(config(path)).task(0)


def test_a_record_with_messages_is_asked_as_it_stands(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}]
    rows = [
        {"messages": chat, "answer": "4"},
        {"messages": [*chat, {"role": "assistant", "content": "4"}], "answer": "4"},
        {"question": "3+3?", "answer": "6"},
        {"messages": [*talk, chat[1]], "answer": "4"},
        {"question": chat, "answer": "4"},  # a column of TRL's form, named with --question
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    env = build_environment(config(path, system="Be kind.", prefill="It is "))
    asked = [[(each.role, each.content) for each in env.task(number).messages] for number in range(5)]
    assert asked[4] == asked[0]
    assert asked[3][:2] == [("system", "Be kind."), ("user", "hi")] and asked[3][2:] == [
        ("assistant", "yes?"),
        *asked[0][1:],
    ]
    assert asked[0] == [("system", "Be brief."), ("user", "2+2?"), ("assistant", "It is ")]
    assert asked[1] == asked[0]  # what follows the question is not shown
    assert asked[2] == [("system", "Be kind."), ("user", "3+3?"), ("assistant", "It is ")]
    assert answer_reward(env, 0, "4") == 1.0
    with pytest.raises(LookupError, match=r"has no field 'answer', it has: messages; name yours with params\.question"):
        path.write_text(json.dumps({"messages": chat}) + "\n")
        build_environment(config(path)).task(0)


def test_a_plugin_file_cannot_shadow_a_module_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "json.py"
    path.write_text("loads = 'mine'\n")
    assert load_object(f"{path}:loads") == "mine"
    assert sys.modules["json"] is json


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        *(("json", "expected package.module:name"), ("no_such_pkg.x:y", "no module 'no_such_pkg'")),
        *(
            ("json:load_s", "has no 'load_s'"),
            ("absent_file.py:x", "no file"),
            (":x", "expected"),
            ("json:", "expected"),
        ),
    ],
)
def test_a_wrong_spec_is_a_config_error_with_the_fix(spec: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        load_object(spec)


def test_a_module_object_is_found_by_dotted_name() -> None:
    assert load_object("json:JSONDecoder.decode") is json.JSONDecoder.decode


@pytest.mark.parametrize(
    ("code", "problem"),
    [("1 / 0\n", "ZeroDivisionError"), ("raise SystemExit(2)\n", r"ends the program \(exit code 2\)")],
)
def test_a_plugin_file_that_fails_leaves_nothing_behind(tmp_path: Path, code: str, problem: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(code)
    before = set(sys.modules)
    with pytest.raises(ConfigError, match=problem):
        load_object(f"{path}:x")
    assert set(sys.modules) == before


NAMED = "return {'right': float(answer == reference), 'short': 1.0 if len(answer) < 3 else 0.0, 'length': len(answer)}"


def named_environment(tmp_path: Path, body: str, **changes: Any) -> Environment:
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"question": "1+1", "answer": "2"}) + "\n", encoding="utf-8")
    (tmp_path / "named.py").write_text(f"def score(question, answer, reference):\n    {body}\n")
    section = {"name": "own", "kind": "function", "dataset": f"{tmp_path / 'named.py'}:score"}
    return build_environment(
        EnvironmentConfig.model_validate({**section, "params": {"path": str(problems)}, **changes})
    )


def test_named_rewards_of_a_function_add_up_by_their_weights_and_stay_apart(tmp_path: Path) -> None:
    environment = named_environment(tmp_path, NAMED, reward_weights={"right": 0.7, "short": 0.3})
    assert replay(environment, 0, ("2",)).rewards == {"right": 1.0, "short": 1.0, "length": 1.0, "outcome": 1.0}
    assert answer_reward(environment, 0, "3") == pytest.approx(0.3)
    assert answer_reward(environment, 0, "333") == 0.0
    assert "reward_parts" in signals_of(environment)
    unweighted = named_environment(tmp_path, "return 1.0")
    assert environment.verifier != unweighted.verifier and "reward_parts" not in signals_of(unweighted)


def test_a_weighted_sum_that_rounding_takes_from_the_end_is_success(tmp_path: Path) -> None:
    body = "return {'a': 1.0, 'b': 1.0, 'c': 1.0}"
    for weights in ({"a": 0.7, "b": 0.2, "c": 0.1}, {"a": 0.1, "b": 0.7, "c": 0.2000000000000003}):
        assert answer_reward(named_environment(tmp_path, body, reward_weights=weights), 0, "") == 1.0


@pytest.mark.parametrize(
    ("body", "changes", "message"),
    [
        (NAMED, {}, "say what each counts with reward_weights of the environment"),
        (
            NAMED,
            {"reward_weights": {"brief": 1.0}},
            r"returned no 'brief', .* names; it returned length, right, short",
        ),
        ("return 1.0", {"reward_weights": {"right": 1.0}}, "returned 1.0, where reward_weights needs right"),
        (
            NAMED,
            {"reward_weights": {"right": 1.0, "length": 1.0}},
            r"the weighted sum 1 right 1 \+ 1 length 1 = 2, outside of .* the sum may be",
        ),
        ("return {'right': 'yes'}", {"reward_weights": {"right": 1.0}}, "returned 'right': the text 'yes'"),
    ],
)
def test_named_rewards_that_cannot_be_added_up_say_why(
    tmp_path: Path, body: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        answer_reward(named_environment(tmp_path, body, **changes), 0, "2")
