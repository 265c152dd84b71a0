"""Falls of held-out accuracy that the guard notices, and its rate of false alarms."""

import json
import logging
import random

import pytest

from swarm.learn.held_out_effect import HeldOutEffect
from swarm.trust_policy import CALM_EVALUATIONS, LOW_EVALUATIONS, MAX_SOURCES, PRESENT_DRAWS
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
    assert course(0.7, 0.7, 0.7, *[0.1] * LOW_EVALUATIONS).has_fallen
    given_up = course(0.7, 0.7, 0.7, *[0.1] * (LOW_EVALUATIONS + 1))
    assert not given_up.has_fallen and given_up.courses["sort"].best.share == pytest.approx(0.1)


def test_each_environment_has_its_own_course_and_problems_that_are_trained_on_say_nothing() -> None:
    effect = course(0.7, 0.7).after([evaluation(0.7), evaluation(0.9, env="add"), evaluation(0.0, split="all")])
    assert not effect.has_fallen
    assert effect.after([evaluation(0.7), evaluation(0.2, env="add")]).has_fallen


ADA, BELL, CURIE, NEW = (letter * 64 for letter in "abcd")


def after(effect: HeldOutEffect, accuracy: float, *sources: str, makes_own: bool = True) -> HeldOutEffect:
    """One more draw of groups of these sources, and an evaluation."""
    effect = effect.after_draw(effect.newest_draw + 1, sources)
    return effect.after([evaluation(accuracy)], makes_own)


@pytest.mark.parametrize("makes_own", [False, True])
def test_a_fall_sets_aside_who_came_since_the_best_and_then_the_newer_half_of_the_others(makes_own: bool) -> None:
    effect, honest = HeldOutEffect(courses={}), (ADA, BELL, CURIE)
    for _ in range(6):
        effect = after(effect, 0.7, *honest)
    used: list[frozenset[str]] = []
    for accuracy in (0.68, 0.3, 0.3, 0.3, 0.3):
        effect = after(effect, accuracy, NEW, *honest[::-1], makes_own=makes_own)
        used.append(effect.in_use(makes_own))
    fewer = [{ADA}, set(), set()] if makes_own else [{ADA, BELL}, {ADA}, {ADA}]
    assert used == [{*honest, NEW}, set(honest), *fewer]


def test_where_nobody_came_since_the_best_a_fall_sets_the_newer_half_aside() -> None:
    effect = HeldOutEffect(courses={})
    for sources in ((ADA,), (ADA, BELL), (ADA, BELL, CURIE), *[(ADA, BELL, CURIE, NEW)] * 6):
        effect = after(effect, 0.7, *sources)
    assert after(effect, 0.2, ADA, BELL, CURIE, NEW).in_use(True) == {ADA, BELL}


def test_sources_are_used_again_the_oldest_first_and_later_after_each_fall() -> None:
    effect, waits = HeldOutEffect(courses={}), list[int]()
    for _ in range(5):
        effect = after(effect, 0.7, ADA, BELL)
    for _ in range(6):
        effect = after(after(effect, 0.3, ADA, BELL, NEW), 0.3, ADA, BELL, NEW)
        assert effect.num_cuts == 2 and effect.in_use(True) == {ADA}, "the newest goes first each time"
        waits.append(0)
        while effect.num_cuts:
            effect = after(effect, 0.7, ADA, BELL, NEW)
            waits[-1] += 1
            assert effect.in_use(True) == [{ADA, BELL, NEW}, {ADA, BELL}, {ADA}][effect.num_cuts]
    assert waits == [2, 4, 8, 16, 32, 32], "of calm evaluations until all are used"
    for _ in range(CALM_EVALUATIONS):
        effect = after(effect, 0.7, ADA, BELL, NEW)
    assert effect.patience == 0, "earlier falls are forgotten"


def test_a_source_that_left_is_not_the_oldest_and_keys_without_number_are_the_newest() -> None:
    effect = after(HeldOutEffect(courses={}), 0.7, NEW)
    for number in range(PRESENT_DRAWS + 1):
        effect = after(effect, 0.7, ADA, *(f"{MAX_SOURCES * number + key:064x}" for key in range(MAX_SOURCES)))
    assert len(effect.seen) == MAX_SOURCES
    fallen = after(effect, 0.1, ADA, makes_own=False)
    assert ADA in fallen.in_use(False) and NEW not in fallen.in_use(False)


def test_a_fall_that_each_environment_hides_shows_in_all_of_them_together() -> None:
    names, effect = ("sort", "add", "copy", "count"), HeldOutEffect(courses={})
    for accuracy in (*[0.7] * 5, 0.53, 0.53):
        effect = effect.after([evaluation(accuracy, env=name) for name in names])
    assert effect.has_fallen
    assert not course(*[0.7] * 5, 0.53, 0.53).has_fallen, "a single one may be chance"


def test_it_survives_a_checkpoint() -> None:
    effect = after(after(course(0.7, 0.72), 0.7, ADA), 0.2, ADA, BELL)
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
