"""Choice of the next questions and of their number of answers: against simple models and by enumeration."""

import itertools
import math
import random
from typing import Any

import pytest

from swarm.objectives.methods.fg_expo import GaussianAccuracy
from swarm.objectives.methods.reinforce_ada import SuccessiveElimination
from swarm.objectives.methods.rollout_gdro import RobustCounts, best_counts
from swarm.objectives.part import Memory, PromptPart
from swarm.objectives.parts.prompts import Bins, bin_of, pass_at

LARGEST = 64


def taught(part: PromptPart, groups: list[tuple[str, float, int]]) -> Memory:
    """Groups as (key, mean reward, responses)."""
    memory = part.initial()
    for key, reward, num_responses in groups:
        memory = part.seen(memory, key, [reward] * num_responses)
    return memory


def test_the_gaussian_curriculum_follows_its_running_mean() -> None:
    part = GaussianAccuracy()
    memory = taught(part, [("easy", 1.0, 8)] * 20 + [("hard", 0.0, 8)] * 20 + [("half", 0.5, 8)] * 20)
    easy = 0.5
    for _ in range(20):
        easy = 0.9 * easy + 0.1
    expected = math.exp(-((easy - 0.5) ** 2) / (2 * 0.35**2))
    assert part.odds(memory, ["easy", "hard", "half", "new"]) == pytest.approx([expected, expected, 1.0, 1.0])


@pytest.mark.parametrize(
    ("part", "least"),
    [
        (GaussianAccuracy(), 0.55),  # the published .35 and .1: an even draw gives .505, this one .585
        (GaussianAccuracy(width=0.1, pace=0.3), 0.8),
    ],
    ids=["published", "narrow"],
)
def test_prompts_around_half_accuracy_are_drawn_most(part: GaussianAccuracy, least: float) -> None:
    """Hundred prompts of known success rates, answered and drawn for a while."""
    rng = random.Random(0)
    rates = {f"sums/{number}": number / 99 for number in range(100)}
    drawn = list[float]()
    memory = part.initial()
    for step in range(4000):
        keys = rng.sample(sorted(rates), 16)
        (key,) = rng.choices(keys, part.odds(memory, keys))
        memory = part.seen(memory, key, [float(rng.random() < rates[key]) for _ in range(8)])
        if step >= 2000:
            drawn.append(rates[key])
    centre = sum(0.25 <= rate <= 0.75 for rate in drawn) / len(drawn)
    assert centre > least, centre
    assert sum(drawn) / len(drawn) == pytest.approx(0.5, abs=0.05)


def test_forgotten_prompts_start_anew() -> None:
    part = GaussianAccuracy(remembers=2)
    memory = taught(part, [("a", 1.0, 8), ("b", 1.0, 8), ("c", 1.0, 8)])
    assert list(memory["accuracy"]) == ["b", "c"]
    assert part.odds(memory, ["a"]) == [1.0]


def test_a_prompt_is_answered_again_until_its_answers_are_mixed() -> None:
    part = SuccessiveElimination(rounds=3, keep=4)
    assert part.missing([0.0] * 8, 8, LARGEST) == 8
    assert part.missing([0.0] * 7 + [1.0], 8, LARGEST) == 8
    assert part.missing([0.0] * 6 + [1.0] * 2, 8, LARGEST) == 0
    assert part.missing([1.0] * 7 + [0.0], 8, LARGEST) == 8
    assert part.missing([1.0] * 24, 8, LARGEST) == 0, "three rounds were drawn"
    assert part.missing([1.0] * 8, 8, 12) == 4 and part.missing([1.0] * 12, 8, 12) == 0
    positive = SuccessiveElimination(rule="positive")
    assert positive.missing([1.0] * 8, 8, LARGEST) == 0 and positive.missing([0.5] * 8, 8, LARGEST) == 8


def test_elimination_leaves_fewer_silent_groups_at_the_same_mean_of_responses() -> None:
    """Against a fixed count of responses on prompts of known success rates, by simulation."""
    rng = random.Random(1)
    part, group_size = SuccessiveElimination(rounds=4, keep=4), 4
    rates = [0.05, 0.1, 0.3, 0.5, 0.7, 0.9, 0.95] * 60
    zero_variance, used = 0, 0
    for rate in rates:
        rewards = [float(rng.random() < rate) for _ in range(group_size)]
        while more := part.missing(rewards, group_size, LARGEST):
            rewards += [float(rng.random() < rate) for _ in range(more)]
        zero_variance += max(rewards) == min(rewards)
        used += len(rewards)
    fixed = round(used / len(rates))
    expected = sum(rate**fixed + (1 - rate) ** fixed for rate in rates)
    assert zero_variance < 0.8 * expected, (zero_variance, expected, fixed)


def test_counts_approach_the_square_root_rule() -> None:
    variances = [0.01, 0.04, 0.09, 0.25]
    counts = best_counts(variances, total=1100, least=1, most=1000)
    scale = 1100 / sum(math.sqrt(variance) for variance in variances)
    assert counts == pytest.approx([scale * math.sqrt(variance) for variance in variances], abs=1.0)


def test_prompts_whose_answers_differ_get_more_responses() -> None:
    part = RobustCounts(k=1, least=2, most=16, pace=0.5, pool=4)
    memory = taught(part, [(key, rate, 8) for _ in range(6) for key, rate in (("solved", 1.0), ("half", 0.25))])
    counts = part.counts(memory, ["solved", "half", "half", "new"], 8, LARGEST)
    assert sum(counts) == 32
    assert counts[0] == 2 and min(counts[1:]) > 8 and counts[1] == pytest.approx(counts[2], abs=1)


@pytest.mark.parametrize("round_size", [1, 2, 4, 8])
def test_rounds_of_any_size_keep_the_mean_and_favour_uncertain_prompts(round_size: int) -> None:
    rng = random.Random(2)
    rates = {"never": 0.0, "rarely": 0.1, "half": 0.5, "mostly": 0.9, "always": 1.0}
    part = RobustCounts(k=1, least=2, most=16, pace=0.1, pool=8)
    memory, sizes = part.initial(), {key: list[int]() for key in rates}
    for number in range(1200 // round_size):
        keys = [rng.choice(sorted(rates)) for _ in range(round_size)]
        for key, size in zip(keys, part.counts(memory, keys, 8, LARGEST), strict=True):
            memory = part.seen(memory, key, [float(rng.random() < rates[key]) for _ in range(size)])
            if number * round_size >= 600:
                sizes[key].append(size)
    mean = {key: sum(found) / len(found) for key, found in sizes.items()}
    assert abs(8 * memory["asked"][0] - memory["asked"][1]) <= 8 * part.pool
    assert mean["half"] > mean["rarely"] > mean["never"] + 1 and mean["half"] > mean["mostly"] > mean["always"] + 1


def test_a_group_size_outside_the_bounds_widens_them() -> None:
    part = RobustCounts(least=4, most=6)
    assert part.counts(part.initial(), ["a", "b"], 2, LARGEST) == [2, 2]
    assert part.counts(part.initial(), ["a", "b"], 9, LARGEST) == [9, 9]
    assert RobustCounts().counts(part.initial(), ["a", "b"], 8, 8) == [8, 8]


def test_pass_at_k_counts_subsets() -> None:
    for num_right, num_responses, k in itertools.product(range(5), range(1, 5), range(1, 6)):
        if num_right > num_responses:
            continue
        answers = [place < num_right for place in range(num_responses)]
        subsets = list(itertools.combinations(answers, min(k, num_responses)))
        expected = sum(any(subset) for subset in subsets) / len(subsets)
        assert pass_at(num_right, num_responses, k) == pytest.approx(expected)


def test_a_prompt_changes_its_bin_only_well_beyond_the_border() -> None:
    assert bin_of(0.55, 10, None, 0.02) == 5 and bin_of(1.0, 10, None, 0.02) == 9
    assert bin_of(0.61, 10, 5, 0.02) == 5 and bin_of(0.63, 10, 5, 0.02) == 6
    assert bin_of(0.49, 10, 5, 0.02) == 5 and bin_of(0.47, 10, 5, 0.02) == 4
    assert bin_of(0.05, 10, 5, 0.02) == 0


def test_a_window_forgets_what_a_prompt_once_was() -> None:
    bins = Bins(num_bins=10, k=2, window=2, margin=0.0, limit=10)
    table: Any = {}
    for reward in (0.0, 0.0, 1.0, 1.0):
        table = bins.with_group(table, "a", reward, 4)
    assert table == {"a": {"bin": 9, "groups": [[1.0, 4], [1.0, 4]]}}
