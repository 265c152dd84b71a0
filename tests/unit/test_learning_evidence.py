"""Evidence of learning: intervals against independent computations, and the verdict that every command shows."""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from logged_events import evaluated

from swarm.events import NodeStarted
from swarm.telemetry import EventLog
from swarm.trained.intervals import Z_95, graded_interval, independent_interval, paired_interval, t_quantile
from swarm.trained.learning_evidence import (
    MAX_KINDS,
    MOST_LINES,
    HeldOutChange,
    Learned,
    LearningEvidence,
    learning_evidence,
    read_learning,
)


def verdict(first: tuple[int, ...], newest: tuple[int, ...], **changes: Any) -> Learned:
    return learning_evidence([evaluated(0, first), evaluated(9, newest, **changes)]).verdict


def test_intervals_are_those_of_published_tables() -> None:
    # Newcombe 1998, table II, method 10: 56/70 - 48/80; 9/10 - 3/10; 0/10 - 0/10
    for right, count, before, num_before, low, high in (
        (56, 70, 48, 80, 0.0524, 0.3339),
        (9, 10, 3, 10, 0.1705, 0.8090),
        (0, 10, 0, 10, -0.2775, 0.2775),
    ):
        found = independent_interval(before / num_before, num_before, right / count, count, Z_95)
        assert found == pytest.approx((low, high), abs=6e-5)
    # Fagerland, Lydersen and Laake 2014: 1 and 7 discordant pairs of 21, Bonett and Price: -.508 to -.013
    found = paired_interval([1.0] + [-1.0] * 7 + [0.0] * 13, Z_95)
    assert found == pytest.approx((-0.508, -0.013), abs=6e-4)


def test_the_paired_interval_covers_the_truth_by_enumeration() -> None:
    """Exact coverage over every outcome of 32 pairs, from the trinomial distribution."""
    count = 32
    for up, down in ((0.01, 0.01), (0.1, 0.02), (0.3, 0.1), (0.5, 0.0), (0.25, 0.25)):
        covered = 0.0
        for b, c in product(range(count + 1), repeat=2):
            if b + c <= count:
                ways = math.comb(count, b) * math.comb(count - b, c)
                chance = ways * up**b * down**c * (1 - up - down) ** (count - b - c)
                low, high = paired_interval([1.0] * b + [-1.0] * c + [0.0] * (count - b - c), Z_95)
                covered += chance * (low <= up - down <= high)
        assert covered > 0.94, (up, down, covered)


def test_learned_is_said_only_where_zero_and_the_commonest_answer_are_left_behind() -> None:
    none, some, most = (0,) * 32, (1,) * 4 + (0,) * 28, (1,) * 24 + (0,) * 8
    assert verdict(none, most) is Learned.YES
    assert verdict(none, none) is verdict(none, some) is Learned.NO
    assert verdict(most, none) is Learned.WORSE
    assert verdict(none, most, majority_baseline=0.8) is Learned.COMMONEST
    assert verdict((0, 0, 1), (1, 1, 1)) is Learned.TOO_FEW
    evidence = learning_evidence([evaluated(0, none), evaluated(0, some)])
    assert evidence.verdict is Learned.UNKNOWN and evidence.words.endswith(
        "held out 0.12 of 32 problems at step 0, and not evaluated since"
    ), "one figure is not shown as before and after"
    words = learning_evidence([evaluated(0, none), evaluated(300, none)]).words
    assert words == (
        "did not learn, as far as 32 problems can show: held out 0.00 -> 0.00 of 32 problems (+0.00, 95 % interval "
        "-0.08 to +0.08; steps 0 to 300; always the commonest answer: 0.10)"
    )
    assert learning_evidence([]).words == "not known whether it learned: not evaluated yet"
    assert "could do nearly all of it" in learning_evidence([evaluated(0, (1,) * 32), evaluated(9, (1,) * 32)]).words


def test_the_same_problems_are_compared_one_by_one_and_others_as_independent() -> None:
    def change(**changes: Any) -> HeldOutChange:
        half = (1, 0) * 16
        whole = learning_evidence([evaluated(0, half), evaluated(9, (1,) * 6 + (1, 0) * 13, **changes)]).whole
        assert whole is not None
        return whole

    paired, unknown = change(), change(num_right=())
    assert paired.is_paired and not unknown.is_paired and paired.before == unknown.before == 0.5
    assert paired.interval[1] - paired.interval[0] < unknown.interval[1] - unknown.interval[0]
    assert change(problems="q").verdict is Learned.UNKNOWN, "other problems since: nothing to compare with"
    unscored = learning_evidence([evaluated(0, (-1, 0, 0)), evaluated(9, (1, -1, 1))]).whole
    assert unscored is not None and (unscored.num_problems, unscored.before, unscored.after) == (1, 0.0, 1.0)
    tries = learning_evidence([evaluated(0, (0, 4), num_tries=8), evaluated(9, (8, 4), num_tries=8)]).whole
    assert tries is not None and (tries.before, tries.after) == (0.25, 0.75)


def test_a_graded_reward_shows_learning_where_no_answer_is_ever_fully_right() -> None:
    def evidence(before: float, after: float, right: int = 0) -> LearningEvidence:
        rights = (1,) * right + (0,) * (32 - right)
        rewards = [tuple(level + 0.01 * (number % 5) for number in range(32)) for level in (before, after)]
        return learning_evidence(
            [evaluated(0, (0,) * 32, rewards=rewards[0]), evaluated(9, rights, rewards=rewards[1])]
        )

    assert evidence(0.3, 0.5).verdict is Learned.BY_REWARD
    assert evidence(0.3, 0.5).words.endswith("; its reward 0.32 -> 0.52 (+0.20, +0.20 to +0.20)")
    assert evidence(0.02, 0.06).verdict is Learned.NO, "a little, and no answer right"
    assert evidence(0.3, 0.5, right=20).verdict is Learned.YES
    started = learning_evidence([evaluated(0, (0,) * 32), evaluated(9, (0,) * 32, rewards=(0.4,) * 32)])
    assert started.verdict is Learned.BY_REWARD, "at first no answer earned a part"
    values = [0.1, 0.3] * 4  # t of 7 degrees of freedom: 2.3646 (tables); of 40 and 120: 2.021 and 1.980
    half = (graded_interval(values)[1] - 0.2) / (stdev(values) / math.sqrt(8))
    assert half == pytest.approx(2.3646, abs=1e-3)
    assert t_quantile(40) == pytest.approx(2.021, abs=1e-3) and t_quantile(120) == pytest.approx(1.980, abs=1e-3)
    assert t_quantile(7, Z_95 + 1e-9) == pytest.approx(2.3646, rel=0.005), "the expansion, as several intervals need it"


def test_several_environments_have_wider_intervals_which_hold_at_once() -> None:
    none, five = (0,) * 32, (1,) * 5 + (0,) * 27
    alone = learning_evidence([evaluated(0, none), evaluated(9, five)])
    both = [evaluated(step, right, env) for env in ("a", "b") for step, right in ((0, none), (9, none))]
    beside = learning_evidence([*both, evaluated(0, none, "c"), evaluated(9, five, "c")])
    assert alone.verdict is Learned.YES and beside.verdict is Learned.NO, "one of many rises by chance"
    sure = learning_evidence([*both, evaluated(0, none, "c"), evaluated(9, (1,) * 32, "c")])
    assert sure.verdict is Learned.YES and len(sure.lines) == 4
    assert learning_evidence([*both, evaluated(9, (0,) * 32, split="all")]).verdict is Learned.NO


def test_a_strangers_log_is_no_evidence_where_its_figures_are_none(tmp_path: Path) -> None:
    sound = evaluated(0, (0,) * 32)
    odd: list[dict[str, Any]] = [
        {"num_right": (2,) * 32}, {"num_right": (0,) * 5000}, {"accuracy": math.nan}, {"accuracy": 7.0},
        {"num_problems": 0}, {"num_tries": 0}, {"step": -1}, {"rewards": (2.0,) * 32}, {"rewards": (0.5,)},
        {"majority_baseline": math.inf},
    ]  # fmt: skip
    events = [sound, *(replace(evaluated(9, (1,) * 32), **changes) for changes in odd)]
    assert learning_evidence(events).verdict is Learned.UNKNOWN
    many = [evaluated(step, (0,) * 32, f"env{step}") for step in range(2 * MAX_KINDS)]
    assert len(learning_evidence(many).changes) == MAX_KINDS
    assert learning_evidence(many).lines[-1] == f"{MAX_KINDS - MOST_LINES} more environments"
    log = EventLog(tmp_path / "events.jsonl")
    for event in (sound, NodeStarted(node_id="a"), evaluated(9, (1,) * 32)):
        log.write(event)
    log.close()
    assert read_learning(tmp_path).verdict is Learned.YES


def test_of_one_step_the_newest_evaluation_counts() -> None:
    """A warm-up before the first step is no gain of the training."""
    evidence = learning_evidence([evaluated(0, (0,) * 32), evaluated(0, (1,) * 32), evaluated(9, (1,) * 32)])
    assert evidence.whole is not None and evidence.whole.before == 1.0
    older = learning_evidence([evaluated(0, (0,) * 32, problems="", num_right=()), evaluated(9, (1,) * 32)])
    assert older.verdict is Learned.YES and older.whole is not None and not older.whole.is_paired
    changed = [evaluated(0, (0,) * 32), evaluated(5, (0,) * 32, problems="q"), evaluated(9, (1,) * 32, problems="q")]
    assert learning_evidence(changed).words.count("steps 5 to 9") == 1
