"""Char tasks, against solutions written a second time in another way."""

from collections import Counter

import pytest

from swarm.config import EnvironmentConfig
from swarm.environments.char_tasks import ALPHABET, KINDS, CharTask
from swarm.environments.load import build_environment
from swarm.environments.replay import answer_reward
from swarm.errors import ConfigError

NEXT = dict(zip("abcdefghijklmnopqrstuvwxyz", "bcdefghijklmnopqrstuvwxyza", strict=True))


def solve_again(question: str) -> str:
    prefix, _, rest = question.partition(":")
    argument = rest.removesuffix("=")
    assert rest.endswith("=")
    match prefix:
        case "rev":
            return "".join(reversed(argument))
        case "sort":
            return "".join(digit * argument.count(digit) for digit in "0123456789")
        case "bin":
            value, digits = int(argument), ""
            while value:
                value, digits = value // 2, str(value % 2) + digits
            return digits or "0"
        case "cnt":
            letter, word = argument.split(">")
            return str(len(word.split(letter)) - 1)
        case "next":
            return "".join(NEXT[letter] for letter in argument)
        case "uniq":
            return "".join(c for i, c in enumerate(argument) if c not in argument[:i])
        case "max":
            return next(digit for digit in "9876543210" if digit in argument)
        case "dbl":
            return "".join(argument[i // 2] for i in range(2 * len(argument)))
        case _:
            raise AssertionError(question)


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_equals_that_of_an_independent_solution(kind: str) -> None:
    for task_id in range(1500):
        question, answer = CharTask(kind, seed=3).sample(task_id)
        assert answer == solve_again(question), question


@pytest.mark.parametrize("kind", KINDS)
def test_prompts_and_answers_fit_the_tiny_model(kind: str) -> None:
    samples = [CharTask(kind).sample(task_id) for task_id in range(4000)]
    assert all(len(question) <= 14 and 1 <= len(answer) <= 8 for question, answer in samples)
    assert {c for question, answer in samples for c in question + answer} <= set(ALPHABET)


@pytest.mark.parametrize("kind", KINDS)
def test_no_constant_answer_pays_and_questions_differ(kind: str) -> None:
    samples = [CharTask(kind).sample(task_id) for task_id in range(4000)]
    commonest = Counter(answer for _, answer in samples).most_common(1)[0][1]
    assert commonest / len(samples) < 0.25
    assert len({question for question, _ in samples}) >= (250 if kind == "binary" else 2500)


def test_only_the_exact_answer_is_rewarded() -> None:
    env = build_environment(EnvironmentConfig(name="r", kind="char", dataset="reverse"))
    right = env.reference(5)
    rewards = {text: answer_reward(env, 5, text) for text in (right, f" {right}\n", right + "x", right[:-1], "")}
    assert list(rewards.values()) == [1.0, 1.0, 0.0, 0.0, 0.0]


def test_an_unknown_char_task_is_named_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'reversed'.*reverse, sort"):
        build_environment(EnvironmentConfig(name="r", kind="char", dataset="reversed"))
