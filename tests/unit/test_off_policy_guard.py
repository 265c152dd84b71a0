"""The guard against simulated swarms whose off-policyness follows a known law, and against liars."""

import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.config import GuardLimits
from swarm.learn.diagnostics import AGE_BUCKETS, LikelihoodStats, OffPolicyStats
from swarm.learn.off_policy_guard import GuardLevel, GuardState, decide

LIMITS = GuardLimits()
MAX_AGE = 16
Step = Callable[[GuardState], list[OffPolicyStats]]


def tokens(kl: float, source: str = "own", first_age: int | None = None, num_tokens: int = 500) -> OffPolicyStats:
    """Log-ratios that are normal with that KL: second moment 2 KL, effective share exp(-2 KL).

    `own` is this node; names in upper case follow it.
    """
    return OffPolicyStats(
        source=source,
        is_made_here=source == "own",
        first_age=first_age,
        num_tokens=num_tokens,
        ess_share=math.exp(-2 * kl),
        mismatch_kl=kl,
        log_ratio_m2=2 * kl,
        is_follower=source.isupper(),
    )


def swarm_of(law: Callable[[int], float], sources: tuple[str, ...] = ("own",)) -> Step:
    """Steps whose sources have groups of every age up to the bound, off policy by `law` of their age."""

    def step(state: GuardState) -> list[OffPolicyStats]:
        ages = range(state.max_age_steps + 1)
        seen: list[OffPolicyStats] = []
        for source in sources:
            seen.append(tokens(sum(map(law, ages)) / len(ages), source))
            for first, following in itertools.pairwise((*AGE_BUCKETS, 10**6)):
                if values := [law(age) for age in ages if first <= age < following]:
                    seen.append(tokens(sum(values) / len(values), source, first))
        return seen

    return step


def play(step: Step, num_steps: int, state: GuardState | None = None) -> Iterator[GuardState]:
    state = state or GuardState(max_age_steps=MAX_AGE)
    for _ in range(num_steps):
        state = decide(state, step(state), LIMITS, MAX_AGE)
        yield state


def constant(*seen: OffPolicyStats) -> Step:
    return lambda state: list(seen)


def test_fresh_data_never_tightens_anything() -> None:
    assert {(state.level, state.max_age_steps) for state in play(constant(tokens(0.01)), 50)} == {(0, MAX_AGE)}


@pytest.mark.parametrize("sources", [("own",), ("own", "a", "b"), ("a", "b")])
def test_old_data_is_cut_at_the_youngest_bad_age_and_only_there(sources: tuple[str, ...]) -> None:
    states = list(play(swarm_of(lambda age: 0.01 if age < 4 else 0.2, sources), 3))
    assert states[0].max_age_steps == 3 and states[-1].level <= GuardLevel.CAPPED


def test_the_bound_probes_ever_more_rarely_while_old_data_stays_bad() -> None:
    states = list(play(swarm_of(lambda age: 0.01 if age < 4 else 0.2), 300))
    tightened = [i for i in range(1, 300) if states[i].max_age_steps < states[i - 1].max_age_steps]
    gaps = [b - a for a, b in itertools.pairwise(tightened)]
    assert gaps == sorted(gaps) and gaps[-1] > 2 * gaps[0]
    assert sum(state.max_age_steps == 3 for state in states) > 250


def test_own_groups_that_are_off_policy_go_through_every_level_and_back() -> None:
    bad = list(play(constant(tokens(0.2)), 3))
    assert [state.level for state in bad] == [GuardLevel.CAPPED, GuardLevel.SAFE, GuardLevel.SAFE]
    levels = [state.level for state in play(constant(tokens(0.01)), 200, bad[-1])]
    assert levels == sorted(levels, reverse=True) and levels[-1] is GuardLevel.OPEN
    assert levels.index(GuardLevel.CAPPED) >= LIMITS.hold_steps - 1


def test_an_alarm_freezes_for_a_bounded_time_and_then_tries_the_safe_recipe() -> None:
    levels = [state.level for state in play(constant(tokens(3.0)), 12)]
    assert levels[: LIMITS.freeze_steps] == [GuardLevel.FROZEN] * LIMITS.freeze_steps
    assert levels[LIMITS.freeze_steps] is GuardLevel.SAFE
    assert levels.count(GuardLevel.SAFE) >= 2, "an endless alarm still lets updates through now and then"


@given(st.floats(0.11, 1e9), st.integers(0, 64), st.integers(1, 3))
def test_one_liar_is_set_aside_and_changes_nothing_else(lie: float, age: int, num_honest: int) -> None:
    first = max(first for first in AGE_BUCKETS if first <= age)
    honest = [tokens(0.01, source, at) for source in ["own", "a", "b"][:num_honest] for at in (None, first)]
    states = list(play(constant(*honest, tokens(lie, "liar"), tokens(lie, "liar", first)), 60))
    assert {(state.level, state.max_age_steps) for state in states} == {(GuardLevel.OPEN, MAX_AGE)}
    assert all(state.is_held("liar") for state in states)
    assert not any(state.is_held(source) for state in states for source in ("own", "a", "b"))


def test_a_source_that_lies_again_waits_longer() -> None:
    state = decide(GuardState(max_age_steps=MAX_AGE), [tokens(9.0, "a")], LIMITS, MAX_AGE)
    waits: list[int] = []
    for _ in range(2):
        wait = 0
        while state.is_held("a"):
            state = decide(state, [tokens(0.01)], LIMITS, MAX_AGE)
            wait += 1
        waits.append(wait)
        state = decide(state, [tokens(0.01), tokens(9.0, "a")], LIMITS, MAX_AGE)
    assert waits == [LIMITS.hold_steps, 2 * LIMITS.hold_steps]


def test_of_sources_set_aside_the_established_half_that_deviates_least_is_spared() -> None:
    new = [dataclasses.replace(tokens(0.11, f"new {i}"), is_newcomer=True) for i in range(5)]
    seen = [tokens(0.3, "a"), tokens(9.0, "liar"), tokens(0.2, "b"), *new]
    (state,) = play(constant(*seen), 1)
    assert len(state.held) == 8 and state.spared() == {"a", "b"}
    (state,) = play(constant(*new), 1)
    assert len(state.spared()) == 3, "nobody is established"
    (state,) = play(constant(tokens(math.nan, "broken")), 1)
    assert state.is_held("broken") and not state.spared(), "figures that are not finite"


def test_a_source_is_said_to_be_set_aside_once_per_hold(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        states = list(play(constant(tokens(9.0, "a")), 60))
    assert [record.message for record in caplog.records] == ["source set aside"]
    assert all(state.is_held("a") for state in states)


def test_a_million_liars_are_remembered_in_bounded_space() -> None:
    states = list(play(lambda state: [tokens(9.0, f"{state.step}/{i}") for i in range(50)], 30))
    assert max(len(state.held) for state in states) <= 256


def test_between_the_thresholds_nothing_changes() -> None:
    middle = 0.5 * (LIMITS.loose_kl + LIMITS.tight_kl)
    state = GuardState(level=GuardLevel.CAPPED, max_age_steps=7, calm_steps=3)
    for _ in range(20):
        state = decide(state, [tokens(middle)], LIMITS, MAX_AGE)
    assert (state.level, state.max_age_steps, state.calm_steps) == (GuardLevel.CAPPED, 7, 0)


@pytest.mark.parametrize("seen", [[], [tokens(9.0, num_tokens=LIMITS.min_tokens - 1)]], ids=["none", "few"])
def test_few_tokens_and_missing_figures_say_nothing(seen: list[OffPolicyStats]) -> None:
    careful = GuardState(level=GuardLevel.SAFE, max_age_steps=0)
    for before in (GuardState(max_age_steps=MAX_AGE), careful):
        states = list(play(constant(*seen), 30, before))
        assert {(state.level, state.max_age_steps) for state in states} == {(before.level, before.max_age_steps)}


@pytest.mark.parametrize("name", ["ess_share", "mismatch_kl"])
def test_a_figure_of_ours_that_is_not_finite_is_an_alarm(name: str) -> None:
    broken = dataclasses.replace(tokens(0.01), **{name: math.nan})
    assert decide(GuardState(max_age_steps=MAX_AGE), [broken], LIMITS, MAX_AGE).level is GuardLevel.FROZEN


@given(st.lists(st.floats(0, 4), min_size=1, max_size=80), st.integers(0, 64))
def test_it_is_pure_bounded_and_survives_json(kls: list[float], configured: int) -> None:
    state = GuardState(max_age_steps=configured)
    for kl in kls:
        seen = [tokens(kl), tokens(kl / 2, "own", 0), tokens(kl, "own", 4), tokens(2 * kl, "a")]
        again = decide(state, seen, LIMITS, configured)
        assert again == decide(state, seen, LIMITS, configured)
        assert 0 <= again.max_age_steps <= configured and 0 <= again.frozen_steps <= LIMITS.freeze_steps
        assert 1 <= again.patience <= 16
        assert GuardState.from_json(json.loads(json.dumps(dataclasses.asdict(again))), configured) == again
        state = again


def test_every_change_is_logged_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        decide(GuardState(max_age_steps=MAX_AGE), [tokens(0.2)], LIMITS, MAX_AGE)
    (record,) = caplog.records
    assert record.__dict__["level"] == "capped" and "mismatch_kl 0.2 above 0.1" in record.__dict__["reason"]


def test_one_bad_follower_of_three_is_set_aside_and_moves_nothing_else() -> None:
    seen = constant(tokens(0.01, "A"), tokens(5.0, "B"), tokens(0.02, "C"))
    state = next(iter(play(seen, 1)))
    assert state.level is GuardLevel.OPEN and state.max_age_steps == MAX_AGE and set(state.held) == {"B"}


def test_where_most_followers_are_off_policy_the_level_rises_and_none_is_set_aside() -> None:
    seen = constant(tokens(0.2, "A"), tokens(0.3, "B"), tokens(0.01, "C"))
    state = next(iter(play(seen, 1)))
    assert state.level is GuardLevel.CAPPED and not state.held
    (state,) = play(constant(tokens(0.2, "A"), tokens(0.01, "C")), 1)
    assert state.level is GuardLevel.OPEN, "half is not most"


def test_what_was_made_here_outweighs_any_number_of_followers() -> None:
    seen = constant(tokens(0.01), tokens(5.0, "A"), tokens(5.0, "B"))
    state = next(iter(play(seen, 1)))
    assert state.level is GuardLevel.OPEN and set(state.held) == {"A", "B"}


def test_the_lag_bound_falls_where_most_followers_are_off_policy_at_an_age() -> None:
    bad = (tokens(0.01, "A"), tokens(0.2, "A", first_age=4))
    assert next(iter(play(constant(*bad), 1))).max_age_steps == 3
    good = (tokens(0.01, "B"), tokens(0.01, "B", first_age=4))
    assert next(iter(play(constant(*bad, *good), 1))).max_age_steps == MAX_AGE


# --- what no claim is needed for ---------------------------------------------------------------


def likely(nll: float, source: str = "own", num_tokens: int = 500, is_newcomer: bool = False) -> LikelihoodStats:
    return LikelihoodStats(
        source=source, is_made_here=source == "own", is_newcomer=is_newcomer, num_tokens=num_tokens, nll=nll
    )


def held_after(*steps: list[LikelihoodStats]) -> set[str]:
    state = GuardState(max_age_steps=MAX_AGE)
    for seen in steps:
        state = decide(state, [], LIMITS, MAX_AGE, seen)
    return set(state.held)


def test_a_source_without_log_probs_whose_tokens_we_would_hardly_draw_is_set_aside() -> None:
    assert held_after([likely(1.0), likely(1.8, "honest"), likely(3.6, "trained end of sequence")]) == {
        "trained end of sequence"
    }
    assert held_after([likely(5.0), likely(6.0, "as unsure as we are")]) == set()
    assert held_after([likely(1.0), likely(9.0, "few", num_tokens=LIMITS.min_tokens - 1)]) == set()


def test_steps_without_own_groups_compare_with_the_last_that_had_some() -> None:
    assert held_after([likely(1.0)], [likely(4.0, "a"), likely(4.0, "b")]) == set()  # both established: the new middle
    assert held_after([likely(1.0)], [likely(4.0, "a", is_newcomer=True)]) == {"a"}
    assert held_after([likely(4.0, "a", is_newcomer=True)]) == set(), "nothing is known yet"


def test_newcomers_who_follow_move_no_level_where_somebody_is_established() -> None:
    fine, bad = (
        tokens(0.01, "A"),
        [dataclasses.replace(tokens(3.0, name), is_newcomer=True) for name in ("B", "C", "D")],
    )
    assert [state.level for state in play(constant(fine, *bad), 3)] == [GuardLevel.OPEN] * 3
    alone = list(play(constant(*bad), 1))
    assert alone[0].level is GuardLevel.FROZEN, "nobody else is there to measure by"
