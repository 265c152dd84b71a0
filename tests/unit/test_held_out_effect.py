"""Falls of held-out accuracy that the guard notices, and its rate of false alarms."""

import json
import logging
import random

import pytest

from swarm.learn.held_out_effect import MAX_HELD, HeldOutEffect
from swarm.types import Evaluation

SIZE = 64  # problems of an evaluation, as configured by default


def evaluation(accuracy: float, step: int = 0, env: str = "sort", split: str = "held_out") -> Evaluation:
    return Evaluation(
        step=step, env=env, split=split, accuracy=accuracy, num_problems=SIZE, majority_baseline=0.1, at_s=0.0
    )


def course(*accuracies: float) -> HeldOutEffect:
    effect = HeldOutEffect(courses={})
    for step, accuracy in enumerate(accuracies):
        effect = effect.after([evaluation(accuracy, step)])
    return effect


def test_the_fall_of_the_attack_by_followers_is_noticed_at_the_first_evaluation(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.ERROR):
        assert not course(0.7, 0.73, 0.72, 0.725).has_fallen and not caplog.records
        assert course(0.7, 0.73, 0.72, 0.725, 0.269).has_fallen  # 0.725 -> 0.269 -> 0.084 -> 0.031
    assert [record.message for record in caplog.records] == ["held-out accuracy fell"]
    assert "deny list" in vars(caplog.records[0])["advice"]


def test_a_slow_fall_is_noticed_against_the_best_not_against_the_last() -> None:
    falling = [0.8, 0.8, 0.78, 0.76, 0.74, 0.72, 0.7, 0.68, 0.66, 0.64, 0.62, 0.6, 0.58, 0.56]
    assert course(*falling).has_fallen


def test_others_are_used_again_once_accuracy_is_back_and_when_they_are_not_the_cause() -> None:
    assert not course(0.7, 0.7, 0.7, 0.1, 0.3, 0.69).has_fallen
    assert course(0.7, 0.7, 0.7, *[0.1] * MAX_HELD).has_fallen
    given_up = course(0.7, 0.7, 0.7, *[0.1] * (MAX_HELD + 1))
    assert not given_up.has_fallen and given_up.courses["sort"].best.share == pytest.approx(0.1)


def test_each_environment_has_its_own_course_and_problems_that_are_trained_on_say_nothing() -> None:
    effect = course(0.7, 0.7).after([evaluation(0.7), evaluation(0.9, env="add"), evaluation(0.0, split="all")])
    assert not effect.has_fallen
    assert effect.after([evaluation(0.7), evaluation(0.2, env="add")]).has_fallen


def test_it_survives_a_checkpoint() -> None:
    effect = course(0.7, 0.72, 0.2)
    assert HeldOutEffect.from_json(json.loads(json.dumps(effect.to_json()))) == effect


@pytest.mark.parametrize("accuracy", [0.05, 0.3, 0.5, 0.7, 0.95])
def test_an_even_course_of_50_evaluations_is_hardly_ever_taken_for_a_fall(accuracy: float) -> None:
    rng, num_falls = random.Random(1), 0
    for _ in range(200):
        found = [sum(rng.random() < accuracy for _ in range(SIZE)) / SIZE for _ in range(50)]
        effect = HeldOutEffect(courses={})
        for each in found:
            effect = effect.after([evaluation(each)])
            if effect.has_fallen:
                num_falls += 1
                break
    assert num_falls <= 12, f"{num_falls} of 200 courses"
