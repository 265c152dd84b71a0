"""Samplers: determinism, order and proportions."""

from collections import Counter

import numpy as np
import pytest

from swarm.exchange.external_sampler import Candidate, SamplerName, sample


def candidate(number: int, source: str = "a", age_steps: int = 0, first_seen_s: float = 0.0) -> Candidate:
    return Candidate(digest=number.to_bytes(32, "big"), source=source, age_steps=age_steps, first_seen_s=first_seen_s)


@pytest.mark.parametrize("sampler", ["uniform", "fresh", "effective"])
def test_the_order_of_arrival_never_matters(sampler: SamplerName) -> None:
    candidates = [candidate(i, source="ab"[i % 2], age_steps=i % 3) for i in range(20)]
    shuffled = [candidates[i] for i in np.random.default_rng(0).permutation(20)]
    weights = {"a": 0.5, "b": 0.25}
    first = sample(sampler, candidates, 7, seed=1, step=2, source_weights=weights)
    assert first == sample(sampler, shuffled, 7, seed=1, step=2, source_weights=weights)
    assert len(set(first)) == 7


def test_another_step_or_seed_draws_others() -> None:
    candidates = [candidate(i) for i in range(50)]
    base = sample("uniform", candidates, 10, seed=1, step=2, source_weights={})
    assert base != sample("uniform", candidates, 10, seed=1, step=3, source_weights={})
    assert base != sample("uniform", candidates, 10, seed=2, step=2, source_weights={})


def test_fresh_takes_the_lowest_age_then_the_latest_seen() -> None:
    candidates = [
        candidate(1, age_steps=2, first_seen_s=9.0),
        candidate(2, age_steps=0, first_seen_s=1.0),
        candidate(3, age_steps=0, first_seen_s=5.0),
    ]
    chosen = sample("fresh", candidates, 2, seed=0, step=0, source_weights={})
    assert [c.digest[-1] for c in chosen] == [3, 2]


def test_effective_draws_in_proportion_to_the_weight_and_never_from_weight_zero() -> None:
    candidates = [candidate(0, "good"), candidate(1, "poor"), candidate(2, "banned"), candidate(3, "broken")]
    weights = {"good": 0.8, "poor": 0.2, "banned": 0.0, "broken": float("nan")}
    counts = Counter(
        sample("effective", candidates, 1, seed=0, step=step, source_weights=weights)[0].source for step in range(4000)
    )
    assert set(counts) == {"good", "poor"}
    assert abs(counts["good"] / 4000 - 0.8) < 0.03  # 4.7 standard errors


def test_effective_gives_fewer_rather_than_a_banned_source() -> None:
    candidates = [candidate(0, "good"), candidate(1, "banned")]
    assert len(sample("effective", candidates, 2, seed=0, step=0, source_weights={"banned": 0.0})) == 1
