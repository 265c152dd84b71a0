"""The guard against simulated swarms whose off-policyness follows a known law."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.config import GuardConfig
from swarm.learn.diagnostics import AGE_BUCKETS, age_suffix
from swarm.learn.guard import GuardState, Level, decide, from_plain, opened

CONFIG = GuardConfig()
MAX_AGE = 16


def figures(kl: float, by_age: dict[int, float] | None = None) -> dict[str, float]:
    """A step whose log-ratios are normal with that KL: second moment 2 KL, effective share exp(-2 KL)."""

    def of(value: float, suffix: str) -> dict[str, float]:
        found = {"num_tokens": 500.0, "ess_share": math.exp(-2 * value), "mismatch_kl_k3": value}
        return {f"{name}{suffix}": figure for name, figure in (found | {"log_ratio_m2": 2 * value}).items()}

    found = of(kl, "")
    for age, value in (by_age or {}).items():
        found |= of(value, age_suffix(age))
    return found


def swarm_of(law: Callable[[int], float]) -> Callable[[int], dict[str, float]]:
    """Figures of a step whose groups have every age up to a bound, off policy by `law` of their age."""

    def step(bound: int) -> dict[str, float]:
        ages = range(bound + 1)
        buckets = {
            first: [law(age) for age in ages if first <= age < following]
            for first, following in zip(AGE_BUCKETS, (*AGE_BUCKETS[1:], 10**6), strict=True)
        }
        return figures(sum(map(law, ages)) / len(ages), {first: sum(v) / len(v) for first, v in buckets.items() if v})

    return step


def play(
    step: Callable[[int], dict[str, float]], num_steps: int, state: GuardState | None = None
) -> Iterator[GuardState]:
    state = state or opened(MAX_AGE)
    for _ in range(num_steps):
        state = decide(state, step(state.max_age_steps), CONFIG, MAX_AGE)
        yield state


def test_fresh_data_never_tightens_anything() -> None:
    assert {(state.level, state.max_age_steps) for state in play(lambda bound: figures(0.01), 50)} == {(0, MAX_AGE)}


def test_old_data_is_cut_at_the_youngest_bad_age_and_only_there() -> None:
    states = list(play(swarm_of(lambda age: 0.01 if age < 4 else 0.2), 3))
    assert states[0].max_age_steps == 3 and states[-1].level <= Level.CAPPED
    assert "age 4 and above" in states[0].reason


def test_the_bound_probes_ever_more_rarely_while_old_data_stays_bad() -> None:
    states = list(play(swarm_of(lambda age: 0.01 if age < 4 else 0.2), 300))
    tightened = [i for i in range(1, 300) if states[i].max_age_steps < states[i - 1].max_age_steps]
    gaps = [b - a for a, b in itertools.pairwise(tightened)]
    assert gaps == sorted(gaps) and gaps[-1] > 2 * gaps[0]
    assert sum(state.max_age_steps == 3 for state in states) > 250


def test_a_step_that_is_off_policy_as_a_whole_goes_through_every_level_and_back() -> None:
    bad = list(play(lambda bound: figures(0.2), 3))
    assert [state.level for state in bad] == [Level.CAPPED, Level.SAFE, Level.SAFE]
    good = list(play(lambda bound: figures(0.01), 200, bad[-1]))
    levels = [state.level for state in good]
    assert levels == sorted(levels, reverse=True) and levels[-1] is Level.OPEN
    assert levels.index(Level.CAPPED) >= CONFIG.hold_steps


def test_an_alarm_freezes_for_a_bounded_time_and_then_tries_the_safe_recipe() -> None:
    states = list(play(lambda bound: figures(3.0), 12))
    levels = [state.level for state in states]
    assert levels[: CONFIG.freeze_steps] == [Level.FROZEN] * CONFIG.freeze_steps
    assert levels[CONFIG.freeze_steps] is Level.SAFE
    assert levels.count(Level.SAFE) >= 2, "an endless alarm still lets updates through now and then"


def test_between_the_thresholds_nothing_changes() -> None:
    middle = 0.5 * (CONFIG.loose_kl + CONFIG.tight_kl)
    state = GuardState(level=Level.CAPPED, max_age_steps=7, calm_steps=3)
    for _ in range(20):
        state = decide(state, figures(middle), CONFIG, MAX_AGE)
    assert (state.level, state.max_age_steps) == (Level.CAPPED, 7)


def test_few_tokens_and_missing_figures_say_nothing() -> None:
    few = figures(0.2) | {"num_tokens": CONFIG.min_tokens - 1.0}
    assert decide(opened(MAX_AGE), few, CONFIG, MAX_AGE).level is Level.OPEN
    assert decide(opened(MAX_AGE), {}, CONFIG, MAX_AGE).level is Level.OPEN


def test_switched_off_it_is_always_open() -> None:
    state = GuardState(level=Level.SAFE, max_age_steps=1)
    assert decide(state, figures(5.0), CONFIG.model_copy(update={"enabled": False}), MAX_AGE) == opened(MAX_AGE)


@pytest.mark.parametrize("name", ["ess_share", "mismatch_kl_k3"])
def test_a_figure_that_is_not_finite_is_an_alarm(name: str) -> None:
    assert decide(opened(MAX_AGE), figures(0.01) | {name: math.nan}, CONFIG, MAX_AGE).level is Level.FROZEN


@given(st.lists(st.floats(0, 4), min_size=1, max_size=80), st.integers(0, 64))
def test_it_is_pure_bounded_and_survives_json(kls: list[float], configured: int) -> None:
    state = opened(configured)
    for kl in kls:
        again = decide(state, figures(kl, {0: kl / 2, 4: kl}), CONFIG, configured)
        assert again == decide(state, figures(kl, {0: kl / 2, 4: kl}), CONFIG, configured)
        assert 0 <= again.max_age_steps <= configured and 0 <= again.frozen_steps <= CONFIG.freeze_steps
        assert 1 <= again.patience <= 16 and again.level - state.level <= 3
        assert from_plain(json.loads(json.dumps(dataclasses.asdict(again))), configured) == again
        state = again


def test_every_change_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        decide(opened(MAX_AGE), figures(0.2), CONFIG, MAX_AGE)
    (record,) = caplog.records
    assert record.__dict__["level"] == "capped" and "mismatch_kl_k3 0.2 above 0.1" in record.__dict__["reason"]
