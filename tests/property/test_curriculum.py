"""Held-out split, mixture and evaluation sets."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.config import EnvironmentConfig
from swarm.environments.char_tasks import KINDS, CharEnvironment
from swarm.environments.curriculum import SPACING, TaskMixture, evaluation_tasks
from swarm.environments.environment import is_held_out
from swarm.environments.load import build_environment
from swarm.errors import ConfigError
from swarm.types import Task

ENVIRONMENTS = {
    kind: CharEnvironment(EnvironmentConfig(name=kind, kind="char", dataset=kind, num_tasks=5000)) for kind in KINDS
}
ENVIRONMENTS_FEW = CharEnvironment(EnvironmentConfig(name="few", kind="char", dataset="binary", num_tasks=20))


@given(st.text())
def test_any_question_has_one_side_for_ever(question: str) -> None:
    assert is_held_out(question) is is_held_out(question)


def test_the_split_is_the_published_one() -> None:
    # first bytes of sha256sum: "a" ca, "b" 3e, "c" 2e, "" e3
    assert [is_held_out(text) for text in ("a", "b", "c", "")] == [False, True, True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_about_a_quarter_of_the_distinct_questions_is_held_out(kind: str) -> None:
    env = ENVIRONMENTS[kind]
    questions = {env.problem(task_id).question for task_id in range(4000)}
    share = sum(map(is_held_out, questions)) / len(questions)
    assert abs(share - 0.25) < (0.09 if kind == "binary" else 0.03)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**63), weights=st.dictionaries(st.sampled_from(list(KINDS)), st.floats(0.1, 9), min_size=1))
def test_training_never_sees_a_held_out_question_nor_an_environment_without_weight(
    seed: int, weights: dict[str, float]
) -> None:
    mixture = TaskMixture(ENVIRONMENTS, weights, seed)
    tasks = [mixture.next_task() for _ in range(60)]
    assert not any(task.is_held_out or is_held_out(task.messages[0].content) for task in tasks)
    assert {task.env for task in tasks} <= set(weights)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), first=st.integers(0, 1000), start=st.integers(0, 1000))
def test_the_question_of_a_number_does_not_depend_on_where_one_began_to_ask(seed: int, first: int, start: int) -> None:
    expected = [TaskMixture(ENVIRONMENTS, {}, seed).task(number) for number in range(first, first + 10)]
    other = TaskMixture(ENVIRONMENTS, {}, seed)
    other.tasks(start, 3)
    assert other.tasks(first, 10) == expected


def test_next_task_walks_the_numbers() -> None:
    mixture = TaskMixture(ENVIRONMENTS, {}, 3)
    assert [mixture.next_task() for _ in range(300)] == TaskMixture(ENVIRONMENTS, {}, 3).tasks(0, 300)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32), kind=st.sampled_from(["reverse", "binary"]))
def test_no_question_comes_twice_within_the_spacing(seed: int, kind: str) -> None:
    tasks = TaskMixture(ENVIRONMENTS, {kind: 1.0}, seed).tasks(0, 10 * SPACING)
    assert shortest_distance(tasks) >= SPACING


def shortest_distance(tasks: list[Task]) -> int:
    """Between two appearances of one question."""
    last: dict[tuple[object, ...], int] = {}
    distances = [len(tasks)]
    for number, task in enumerate(tasks):
        key = (task.env, task.messages)
        distances.append(number - last.get(key, -len(tasks)))
        last[key] = number
    return min(distances)


def test_with_fewer_questions_than_the_spacing_each_comes_about_equally_often() -> None:
    config = EnvironmentConfig(name="few", kind="char", dataset="binary", num_tasks=20)
    mixture = TaskMixture({"few": CharEnvironment(config)}, {}, 0)
    tasks = mixture.tasks(0, 400)
    counts = Counter(task.messages for task in tasks)
    num_questions = len({q for i in range(20) if not is_held_out(q := ENVIRONMENTS_FEW.problem(i).question)})
    assert len(counts) == num_questions < SPACING
    assert min(counts.values()) > 0.7 * 400 / num_questions
    assert shortest_distance(tasks) >= num_questions // 2


def test_a_long_sequence_asks_nearly_every_training_question() -> None:
    asked = {task.messages[0].content for task in TaskMixture(ENVIRONMENTS, {"binary": 1.0}, 1).tasks(0, 2000)}
    training = {q for i in range(5000) if not is_held_out(q := ENVIRONMENTS["binary"].problem(i).question)}
    assert asked <= training
    assert len(asked) >= 0.99 * len(training)


def test_weights_are_followed() -> None:
    mixture = TaskMixture(ENVIRONMENTS, {"max": 3.0, "sort": 1.0}, 0)
    names = [mixture.next_task().env for _ in range(2000)]
    assert abs(names.count("max") / 2000 - 0.75) < 0.05


def test_wrong_weights_are_config_errors() -> None:
    with pytest.raises(ConfigError, match="unknown environment 'x'"):
        TaskMixture(ENVIRONMENTS, {"x": 1.0}, 0)
    with pytest.raises(ConfigError, match="positive sum"):
        TaskMixture(ENVIRONMENTS, {"max": 0.0}, 0)


@settings(max_examples=10, deadline=None)
@given(kind=st.sampled_from(list(KINDS)), seed=st.integers(0, 1000), num=st.integers(1, 30))
def test_evaluation_sets_repeat_differ_within_and_respect_the_split(kind: str, seed: int, num: int) -> None:
    config = EnvironmentConfig(name=kind, kind="char", dataset=kind, num_tasks=5000)
    tasks = evaluation_tasks(ENVIRONMENTS[kind], "held_out", num, seed)
    assert tasks == evaluation_tasks(CharEnvironment(config), "held_out", num, seed)
    assert len(tasks) == num == len({task.messages for task in tasks})
    assert all(task.is_held_out for task in tasks)
    assert len(evaluation_tasks(ENVIRONMENTS[kind], "all", num, seed)) == num


def test_a_small_environment_gives_each_of_its_held_out_questions_once() -> None:
    env = CharEnvironment(EnvironmentConfig(name="b", kind="char", dataset="binary", num_tasks=300))
    found = {task.messages[0].content for task in evaluation_tasks(env, "held_out", 10_000, 0)}
    assert found == {q for i in range(300) if is_held_out(q := env.problem(i).question)}


def test_problems_of_one_question_are_told_apart_by_what_their_numbers_draw() -> None:
    config = EnvironmentConfig(name="asks", kind="dialogue", num_tasks=300, params={"slots": 2, "missing": 2})
    tasks = evaluation_tasks(build_environment(config), "held_out", 40, 0)
    assert len(tasks) == len({task.drawn for task in tasks}) > 2 * len({task.messages for task in tasks})
