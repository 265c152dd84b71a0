"""Evidence of learning: held-out success before and after, with a 95 % interval, and the verdict that follows from it.

Invariant: every command, page and card takes its verdict from here. `learned` is said only where the interval lies
above zero and success above what the commonest answer alone would score.

Where the outcomes of the same problems are known before and after, the interval is that of paired differences, else
that of two independent shares. Over several environments all intervals hold at once (Bonferroni).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import NormalDist, fmean
from typing import Final

from swarm.events import Event, PolicyEvaluated, WarmedUp, events_of
from swarm.telemetry import EventTail
from swarm.trained.intervals import Interval, graded_interval, independent_interval, paired_interval
from swarm.types import MAX_OUTCOMES

ALL: Final = ""  # name of the change over all environments
FEWEST: Final = 8  # problems, of fewer nothing is concluded
LEAST_GAIN: Final = 0.05  # of a graded reward, at the lower end of its interval, where success did not rise
KNOWN: Final = 0.95  # success before, from which on nothing is left to learn
MOST_LINES: Final = 12  # of environments
MOST_NAMED: Final = 8  # environments in a line
MAX_KINDS: Final = 4096  # environments and sets of problems in one log


class Learned(StrEnum):
    """Verdict on a training by its held-out success; of several environments the first of these counts."""

    YES = "learned"
    BY_REWARD = "learned, by its reward"
    COMMONEST = "rose no higher than the commonest answer"
    WORSE = "got worse"
    NO = "did not learn"
    TOO_FEW = "too few problems to say"
    UNKNOWN = "not evaluated"


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutChange:
    """Held-out success at the first and the newest evaluation of one environment, or of all together (ALL)."""

    env: str
    first_step: int
    newest_step: int  # the first one where nothing was evaluated since
    before: float
    after: float
    num_problems: int
    interval: Interval  # of after - before
    is_paired: bool  # the same problems before and after, one by one
    baseline: float  # success of always giving the commonest right answer
    reward: tuple[float, float, Interval] | None = None  # before, after, interval of the gain; None: as the success

    @property
    def is_change(self) -> bool:
        """False where it was evaluated at one step alone."""
        return self.newest_step > self.first_step

    @property
    def verdict(self) -> Learned:
        """Conclusion from this change alone."""
        low, high = self.interval
        if not self.is_change:
            return Learned.UNKNOWN
        if self.num_problems < FEWEST:
            return Learned.TOO_FEW
        if low > 0:
            return Learned.YES if self.after > self.baseline else Learned.COMMONEST
        if high < 0:
            return Learned.WORSE
        return Learned.BY_REWARD if self.reward is not None and self.reward[2][0] >= LEAST_GAIN else Learned.NO

    @property
    def course(self) -> str:
        """Success before and after with n, such as `0.36 -> 0.85 of 64 problems`."""
        return f"{self.before:.2f} -> {self.after:.2f} of {self.num_problems} problems"

    @property
    def gain(self) -> str:
        """Gain with its interval, such as `+0.49, 95 % interval +0.36 to +0.62`."""
        low, high = self.interval
        return f"{self.after - self.before:+.2f}, 95 % interval {low:+.2f} to {high:+.2f}"

    @property
    def words(self) -> str:
        """The change in a line, without its verdict."""
        if not self.is_change:
            since = f"{self.before:.2f} of {self.num_problems} problems at step {self.first_step}"
            return f"held out {since}, and not evaluated since"
        steps = f"steps {self.first_step} to {self.newest_step}"
        commonest = f"; always the commonest answer: {self.baseline:.2f}" if self.baseline else ""  # 0: none is known
        return f"held out {self.course} ({self.gain}; {steps}{commonest}){self._reward_words}"

    @property
    def _reward_words(self) -> str:
        if self.reward is None:
            return ""
        before, after, (low, high) = self.reward
        return f"; its reward {before:.2f} -> {after:.2f} ({after - before:+.2f}, {low:+.2f} to {high:+.2f})"


@dataclass(frozen=True, kw_only=True, slots=True)
class LearningEvidence:
    """Changes of all environments that a node was evaluated on, and the verdict on its training.

    Example:
        evidence = learning_evidence(events_of(PolicyEvaluated, read_events(path)))
        print(evidence.words)
    """

    changes: tuple[HeldOutChange, ...] = ()  # by environment
    whole: HeldOutChange | None = None  # over all environments; None without any

    @property
    def verdict(self) -> Learned:
        """Verdict over all environments: one that learned is enough, as all intervals hold at once."""
        if self.whole is None:
            return Learned.UNKNOWN
        verdicts = {each.verdict for each in (self.whole, *self.changes)}
        return next(each for each in Learned if each in verdicts)

    @property
    def is_shown(self) -> bool:
        """True if held-out success shows that it learned: all else is no evidence of health."""
        return self.verdict is Learned.YES

    @property
    def words(self) -> str:
        """Verdict and figures in a line."""
        whole, verdict = self.whole, self.verdict
        if whole is None:
            return "not known whether it learned: not evaluated yet"
        claim = {
            Learned.NO: f"did not learn, as far as {whole.num_problems} problems can show",
            Learned.UNKNOWN: "not known whether it learned",
        }.get(verdict, str(verdict))
        if verdict is Learned.NO and whole.before >= KNOWN:
            claim = "did not learn: it could do nearly all of it before"
        shown = next(each for each in (whole, *self.changes) if each.verdict is verdict)
        return f"{claim}: {f'{shown.env}, ' if shown is not whole else ''}{shown.words}"

    @property
    def lines(self) -> tuple[str, ...]:
        """`words`, and a line for each environment where there are several, at most MOST_LINES."""
        several = self.changes if len(self.changes) > 1 else ()
        shown = [f"{each.env}: {each.verdict}; {each.words}" for each in several[:MOST_LINES]]
        more = [f"{len(several) - MOST_LINES} more environments"] if len(several) > MOST_LINES else []
        return (self.words, *shown, *more)


class EvidenceTally:
    """First and newest held-out evaluation of each environment, problems and tries: all that evidence needs.

    Example:
        tally = EvidenceTally()
        for event in events_of(PolicyEvaluated, events):
            tally.add(event)
        print(tally.evidence.words)
    """

    def __init__(self, up_to_step: float = math.inf) -> None:
        self._up_to_step = up_to_step
        self._ends: dict[tuple[str, str], tuple[PolicyEvaluated, PolicyEvaluated]] = {}

    def add(self, event: PolicyEvaluated) -> None:
        """Takes an evaluation, in the order of the log; of one step the newest counts. Others than held out do not."""
        if event.split != "held_out" or not _is_sound(event) or event.step > self._up_to_step:
            return
        key = event.env, event.problems
        first, _ = self._ends.get(key, (event, event))
        if key not in self._ends and len(self._ends) >= MAX_KINDS:
            return
        self._ends.pop(key, None)
        self._ends[key] = (event if event.step <= first.step else first, event)  # the newest kind stands last

    @property
    def evidence(self) -> LearningEvidence:
        """Evidence as of the newest evaluation.

        An environment whose problems, scoring or tries were changed is compared with its first evaluation since then;
        evaluations of an older release, which do not name their problems, are compared with all others.
        """
        pairs: dict[str, tuple[PolicyEvaluated, PolicyEvaluated]] = {}
        for (env, problems), (first, newest) in self._ends.items():
            before, _ = pairs.get(env, (first, newest))
            is_comparable = not problems or not before.problems or before.problems == problems
            pairs[env] = (before if is_comparable and before.step < first.step else first, newest)
        return _evidence(pairs)


def learning_evidence(evaluations: Iterable[PolicyEvaluated], up_to_step: float = math.inf) -> LearningEvidence:
    """Evidence from the evaluations of one node, in the order of its log, up to a step."""
    tally = EvidenceTally(up_to_step)
    for each in evaluations:
        tally.add(each)
    return tally.evidence


def learning_difference(one: Iterable[PolicyEvaluated], other: Iterable[PolicyEvaluated]) -> LearningEvidence:
    """Success of `other` minus that of `one` on each environment, at the newest step at which both were evaluated.

    `before` is that of `one`, `after` that of `other`; the verdict and its words are of no use here.
    """
    at_step = [
        {(each.env, each.step): each for each in evaluations if each.split == "held_out" and _is_sound(each)}
        for evaluations in (one, other)
    ]
    shared = dict(sorted(at_step[0].keys() & at_step[1].keys()))  # of each environment the newest step
    return _evidence({env: (at_step[0][env, step], at_step[1][env, step]) for env, step in shared.items()})


def pooled(evaluations: Sequence[PolicyEvaluated]) -> PolicyEvaluated:
    """One evaluation of several nodes or seeds on the same problems at one step: tries at a problem add up.

    The outcomes of problems are left out where they are not of the same problems, or of some evaluation not known.
    """
    first, tries = evaluations[0], sum(each.num_tries for each in evaluations)
    is_same = all(_is_paired(first, each) for each in evaluations)
    columns = zip(*(each.num_right for each in evaluations), strict=True) if is_same else ()
    return replace(
        first,
        accuracy=fmean(each.accuracy for each in evaluations),
        num_problems=min(each.num_problems for each in evaluations),
        num_right=tuple(-1 if min(rights) < 0 else sum(rights) for rights in columns),
        num_tries=tries,
        rewards=(),
        problems=f"{first.problems}, {tries} tries" if is_same else "",
    )


def _evidence(pairs: Mapping[str, tuple[PolicyEvaluated, PolicyEvaluated]]) -> LearningEvidence:
    """Changes from the first to the second evaluation of each environment, with intervals that hold at once."""
    if not pairs:
        return LearningEvidence()
    z = NormalDist().inv_cdf(1 - 0.025 / (len(pairs) + (len(pairs) > 1)))
    changes = tuple(_change(env, [pair], z) for env, pair in sorted(pairs.items()))
    return LearningEvidence(
        changes=changes, whole=changes[0] if len(pairs) == 1 else _change(ALL, list(pairs.values()), z)
    )


def warm_up_words(events: Iterable[Event]) -> str:
    """Held-out success before the newest warm-up, which no evidence contains; "" where there was none."""
    reports = [event.report for event in events_of(WarmedUp, events)]
    if not reports or not reports[-1].num_steps:
        return ""
    found = list(reports[-1].accuracy.items())[:MOST_NAMED]
    shown = ", ".join(f"{env[:40]} {accuracy:.2f}" for env, accuracy in found)
    of = f"{reports[-1].num_steps} updates on {reports[-1].num_answers} right answers"
    return f"held out without the warm-up ({of}): {shown}; changes count from step 0, after it"


def read_learning(directory: Path) -> LearningEvidence:
    """Evidence from the event log in a node's directory (blocking); lines of other events are not parsed."""
    events = EventTail(directory / "events.jsonl").stream(lambda line: line.startswith(b'{"kind":"evaluation"'))
    return learning_evidence(events_of(PolicyEvaluated, events))


def _is_sound(event: PolicyEvaluated) -> bool:
    """False for figures of the right types that no evaluation has, as in a log that somebody else wrote."""
    return (
        len(event.num_right) <= MAX_OUTCOMES
        and all(-1 <= each <= event.num_tries for each in event.num_right)
        and min(event.step, event.num_problems - 1, event.num_tries - 1) >= 0
        and len(event.rewards) in (0, len(event.num_right))
        and all(0 <= each <= 1 for each in (event.accuracy, event.majority_baseline, *event.rewards))  # no NaN
    )


def _change(env: str, pairs: Sequence[tuple[PolicyEvaluated, PolicyEvaluated]], z: float) -> HeldOutChange:
    """Change over evaluations (first, newest) of one or more environments, each problem with equal weight."""
    shares = [share for pair in pairs for share in _shares(*pair)]
    rewards = [reward for pair in pairs for reward in _shares(*pair, is_graded=True)]
    num_first, num_newest = (sum(pair[place].num_problems for pair in pairs) for place in (0, 1))
    is_paired = all(_is_paired(*pair) for pair in pairs) and bool(shares)
    if is_paired:
        before, after, num_problems = fmean(a for a, _ in shares), fmean(b for _, b in shares), len(shares)
        interval = paired_interval([b - a for a, b in shares], z)
    else:
        before = math.fsum(first.accuracy * first.num_problems for first, _ in pairs) / max(1, num_first)
        after = math.fsum(newest.accuracy * newest.num_problems for _, newest in pairs) / max(1, num_newest)
        num_problems = min(num_first, num_newest)
        interval = independent_interval(before, num_first, after, num_newest, z)
    first_step, newest_step = min(first.step for first, _ in pairs), max(newest.step for _, newest in pairs)
    return HeldOutChange(
        env=env,
        first_step=first_step,
        newest_step=newest_step,
        before=before,
        after=after,
        num_problems=num_problems,
        interval=interval,
        is_paired=is_paired,
        baseline=math.fsum(newest.majority_baseline * newest.num_problems for _, newest in pairs) / max(1, num_newest),
        reward=_reward_change(rewards, z) if any(first.rewards or newest.rewards for first, newest in pairs) else None,
    )


def _reward_change(rewards: Sequence[tuple[float, float]], z: float) -> tuple[float, float, Interval] | None:
    """Mean reward before and after, and the interval of the gain; None for fewer than FEWEST problems in pairs."""
    if len(rewards) < FEWEST:
        return None
    before, after = fmean(a for a, _ in rewards), fmean(b for _, b in rewards)
    return before, after, graded_interval([b - a for a, b in rewards], z)


def _is_paired(first: PolicyEvaluated, newest: PolicyEvaluated) -> bool:
    is_same = bool(newest.problems) and first.problems == newest.problems
    return is_same and len(first.num_right) == len(newest.num_right) > 0


def _shares(first: PolicyEvaluated, newest: PolicyEvaluated, *, is_graded: bool = False) -> list[tuple[float, float]]:
    """Share of right tries at each problem before and after, or (`is_graded`) the mean reward.

    Problems that were scored once are left out; where rewards were not graded, they are the success.
    """
    if not _is_paired(first, newest):
        return []
    ends = [
        each.rewards if is_graded and each.rewards else [right / each.num_tries for right in each.num_right]
        for each in (first, newest)
    ]
    is_scored = [min(rights) >= 0 for rights in zip(first.num_right, newest.num_right, strict=True)]
    return [pair for pair, scored in zip(zip(*ends, strict=True), is_scored, strict=True) if scored]
