"""The reasoning-gym adapter."""

import re
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.config import EnvironmentConfig
from swarm.environments.environment import AnswerEnvironment
from swarm.environments.formulas import is_formula
from swarm.environments.load import build_environment, build_environments
from swarm.environments.reasoning_gym import is_literal
from swarm.environments.replay import answer_reward
from swarm.errors import ConfigError

DATASETS = [
    *("chain_sum", "products", "gcd", "letter_counting", "base_conversion", "binary_matrix", "spell_backward"),
    *("number_sorting", "leg_counting", "basic_arithmetic", "propositional_logic", "countdown", "simple_integration"),
    *("n_queens", "intermediate_integration"),
]


def build(dataset: str, **changes: object) -> AnswerEnvironment:
    section = {"name": dataset, "kind": "reasoning_gym", "dataset": dataset, **changes}
    env = build_environment(EnvironmentConfig.model_validate(section))
    assert isinstance(env, AnswerEnvironment)
    return env


@pytest.mark.parametrize("dataset", DATASETS)
def test_the_reference_is_worth_1_and_nonsense_0(dataset: str) -> None:
    env = build(dataset)
    for task_id in (0, 17, 123_456):
        if reference := env.reference(task_id):
            assert answer_reward(env, task_id, f" {reference}\n") == 1.0
        assert answer_reward(env, task_id, "zzz ???") == 0.0
        assert answer_reward(env, task_id, "") == 0.0


def test_partial_credit_is_passed_on_only_when_asked_for() -> None:
    exact, partial = build("chain_sum"), build("chain_sum", params={"exact": False})
    verbose = exact.reference(3) + " is it"
    assert answer_reward(exact, 3, verbose) == 0.0
    assert 0.0 < answer_reward(partial, 3, verbose) < 1.0
    assert exact.verifier != partial.verifier


def test_prompt_template_and_prefill_make_the_messages() -> None:
    env = build("products", prompt="Q: {question} {x}", prefill="Answer:", params={"max_digits": 1})
    messages = env.task(2).messages
    assert [m.role for m in messages] == ["user", "assistant"]
    assert messages[0].content == f"Q: {env.problem(2).question} {{x}}" and messages[1].content == "Answer:"


@pytest.mark.parametrize("task_id", [-1, 50, 10**12])
def test_a_task_outside_the_range_is_a_lookup_error(task_id: int) -> None:
    with pytest.raises(LookupError, match=r"outside 0\.\.49"):
        build("gcd", num_tasks=50).task(task_id)


@pytest.mark.parametrize(
    ("dataset", "params", "says"),
    [
        ("chainsum", {}, "chainsum"),
        ("chain_sum", {"digits": 3}, "digits"),
        ("chain_sum", {"seed": 3}, "set seed as"),
        ("codeio", {}, "whole programs"),
        ("word_ladder", {}, "hash seed"),
        ("composite", {}, "several environments"),
    ],
)
def test_what_cannot_work_is_a_config_error_that_says_why(dataset: str, params: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(dataset, params=params)


def test_two_environments_of_one_name_are_refused() -> None:
    config = EnvironmentConfig(name="a", kind="char", dataset="max")
    with pytest.raises(ConfigError, match="'a' is used twice"):
        build_environments([config, config])


@pytest.mark.parametrize(
    "text",
    [
        *("__import__('os').system('x')", "[1 for _ in ().__class__.__bases__]", "[1]*10**9", "1<<99999999999"),
        *("9**9**9", "lambda: 1", "(" * 5000, "f'{open}'"),
    ],
)
def test_code_is_no_literal(text: str) -> None:
    assert not is_literal(text)


@pytest.mark.parametrize("text", ["[[0, 1], [1, 2]]", "0 1 2\n1 0 1", "['a', 'b']", "ABCD", "Q _ _\n_ _ Q"])
def test_lists_and_plain_rows_are_literals(text: str) -> None:
    assert is_literal(text)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "exit()",
        "9**9**9",
        "9**999",
        "9**(9*9)",
        "x.y",
        "open",
        "x**-2",
        "1e9999999",
        "2**2.5",
        "a=1",
    ],
)
def test_names_attributes_and_big_powers_are_no_formula(text: str) -> None:
    assert not is_formula(text)


@pytest.mark.parametrize("text", ["3*x**2 + sin(x) + C", "(4 + 5) * 6 - 2/3", "x ** 12", "2*(4*x + 2)**(3/2)/3"])
def test_ordinary_formulas_pass(text: str) -> None:
    assert is_formula(text)


@pytest.mark.parametrize("text", ["a" * 60 + "!", "sin" * 60 + "!", "1" * 20_000 + "!", " " * 20_000, "(" * 20_000])
def test_a_long_answer_is_judged_in_linear_time(text: str) -> None:
    began_s = time.process_time()
    assert not is_formula(text)
    assert time.process_time() - began_s < 5.0, "of CPU: it takes milliseconds"


BEFORE = re.compile(r"(?:[0-9]{1,12}(?:\.[0-9]{1,12})?|[A-Za-z]{1,4}|\*\*|[-+*/() ]){1,200}")


@given(st.lists(st.sampled_from([*"1 .x*(/!e", "sin", "**", "**2", "12345678901234", "log"]), max_size=9).map("".join))
def test_what_passes_is_made_of_numbers_short_words_and_signs(text: str) -> None:
    if is_formula(text):
        assert BEFORE.fullmatch(text)
        assert {word for word in re.findall("[A-Za-z]+", text) if len(word) > 1} <= {"sin", "log"}


def test_every_process_builds_the_same_problems() -> None:
    code = (
        "from swarm.config import EnvironmentConfig as C\n"
        "from swarm.environments.load import build_environment as b\n"
        "for k, d in (('reasoning_gym', 'spell_backward'), ('reasoning_gym', 'leg_counting'), ('char', 'count')):\n"
        "    e = b(C(name='e', kind=k, dataset=d, seed=5))\n"
        "    print([(e.task(i), e.reference(i)) for i in (0, 9, 99999)])\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code], env={"PYTHONHASHSEED": seed}, capture_output=True, check=True, text=True
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and len(outputs.pop()) > 500
