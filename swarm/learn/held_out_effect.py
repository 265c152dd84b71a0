"""Effect of a run's steps on held-out accuracy; a fall sets sources aside, newest first, even established sources.

Invariant: pure functions of plain numbers that are kept with the checkpoint. No claim of another node enters: held-out
problems are never trained on, answered greedily by our own policy and scored here; a source is as old as its first
group in a draw of this node.

The numbers of the policy stand in `swarm.trust_policy`. A fall sets aside, at once, all groups that count as newcomers'
(those without log-probs among them) and the sources that came since accuracy was best; the newest half of all sources
if none came since. Each further low evaluation halves the sources in use again: a learner that generates is left with
its own groups, any other learner with its oldest source. Once accuracy is back, each halving is taken back after
`patience` calm evaluations, the oldest sources first; each fall doubles `patience`, up to CALM_EVALUATIONS.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from typing import Any, Final

from swarm.trust_policy import CALM_EVALUATIONS, LOW_EVALUATIONS, MAX_SOURCES, PRESENT_DRAWS
from swarm.types import Evaluation, NodeId, short

logger = logging.getLogger(__name__)

MAX_SHOWN: Final = 16  # sources in a log line

FALL_SIGMAS: Final = 3.0  # this far below the best twice in a row: accuracy has fallen
PLUNGE_SIGMAS: Final = 5.0  # this far below the best once: accuracy has fallen
CALM_SIGMAS: Final = 1.0  # less than this below the best: accuracy is back
POOLED: Final = 4  # evaluations pooled into one figure: the best of many single ones is mostly luck
_ALL: Final = ""  # the course of all environments together, which shows a smaller fall than each alone
_ADVICE: Final = (
    "groups of other nodes are set aside, the newest sources first, until it comes back; look at learn/source_* for "
    "who came last, put keys on the deny list, or start again from an older checkpoint"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """Number of right answers to a number of problems."""

    num_right: float = 0.0
    num_problems: int = 0

    @property
    def share(self) -> float:
        """Share of right answers; 0 without problems."""
        return self.num_right / max(1, self.num_problems)

    def sigmas_below(self, best: "Accuracy") -> float:
        """Distance below another accuracy, in standard deviations of the difference of two binomials."""
        total = self.num_problems + best.num_problems
        pooled = (self.num_right + best.num_right) / max(1, total)
        variance = pooled * (1 - pooled) * (1 / max(1, self.num_problems) + 1 / max(1, best.num_problems))
        return (best.share - self.share) / math.sqrt(variance) if variance > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Course:
    """Course of held-out accuracy in one environment, or in all together."""

    best: Accuracy = Accuracy()
    best_draw: int = 0  # newest draw when the best was measured
    recent: tuple[Accuracy, ...] = ()  # at most POOLED
    num_held: int = 0  # evaluations since accuracy fell; 0: it has not fallen
    is_low: bool = False  # the newest evaluation was FALL_SIGMAS or more below the best

    def after(self, now: Accuracy, draw: int = 0) -> "Course":
        """The course after one more evaluation; `draw`: number of the newest draw."""
        sigmas = now.sigmas_below(self.best) if self.best.num_problems else 0.0
        if self.num_held:
            if sigmas < CALM_SIGMAS:
                return replace(self, num_held=0, recent=(now,))
            if self.num_held < LOW_EVALUATIONS:
                return replace(self, num_held=self.num_held + 1)
            return Course(best=now, best_draw=draw, recent=(now,))
        if sigmas >= PLUNGE_SIGMAS or (sigmas >= FALL_SIGMAS and self.is_low):
            return replace(self, num_held=1, is_low=False)
        if sigmas >= FALL_SIGMAS:
            return replace(self, is_low=True)
        recent = (*self.recent, now)[-POOLED:]
        pooled = Accuracy(
            num_right=sum(each.num_right for each in recent), num_problems=sum(each.num_problems for each in recent)
        )
        is_best = pooled.share >= self.best.share and len(recent) == POOLED
        is_early = self.best.num_problems < pooled.num_problems  # no best of a whole window is known
        if is_best or is_early:
            return Course(best=pooled, best_draw=draw, recent=recent)
        return Course(best=self.best, best_draw=self.best_draw, recent=recent)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutEffect:
    """Courses of held-out accuracy, and the sources set aside since accuracy fell; part of the checkpoint."""

    courses: Mapping[str, Course]  # by environment, and of all together
    num_cuts: int = 0  # halvings of the sources in use; 0: all are used
    since_draw: int = 0  # sources that came later are set aside by the first cut
    patience: int = 0  # calm evaluations that take back one cut; 0 without a recent fall
    num_calm: int = 0  # in a row since the newest fall, or cut taken back
    num_idle: int = 0  # draws in a row since a fall that nothing was learned from
    newest_draw: int = 0
    seen: Mapping[NodeId, tuple[int, int]] = field(default_factory=dict[NodeId, tuple[int, int]])
    """First and newest draw of each source of established groups, the oldest source first."""

    @property
    def has_fallen(self) -> bool:
        """True from a fall until accuracy is back, LOW_EVALUATIONS passed, or idle draws took back the last cut."""
        return any(course.num_held for course in self.courses.values())

    def in_use(self, makes_own: bool) -> frozenset[NodeId]:
        """Sources whose groups are used. `makes_own`: True if the learner's node generates groups, too."""
        if not self.num_cuts:
            return frozenset(self.seen)
        present = [source for source, (_, newest) in self.seen.items() if newest > self.newest_draw - PRESENT_DRAWS]
        before = [source for source in present if self.seen[source][0] <= self.since_draw]
        cuts = self.num_cuts - (0 < len(before) < len(present))  # the first one takes those that came since
        ranked = before or present
        return frozenset(ranked[: len(ranked) >> cuts if makes_own else -(-len(ranked) >> cuts)])

    def after(self, evaluations: Sequence[Evaluation], makes_own: bool = True) -> "HeldOutEffect":
        """The effect after the held-out evaluations of one step; a fall is logged with advice."""
        before, found = dict(self.courses), dict[str, Accuracy]()
        for each in evaluations:
            if each.split == "held_out":
                found[each.env] = Accuracy(num_right=each.accuracy * each.num_problems, num_problems=each.num_problems)
        if len(found) > 1 and before.keys() - {_ALL} <= found.keys():
            if not found.keys() <= before.keys():
                before.pop(_ALL, None)  # of fewer environments
            found[_ALL] = Accuracy(
                num_right=sum(each.num_right for each in found.values()),
                num_problems=sum(each.num_problems for each in found.values()),
            )
        now = {env: before.get(env, Course()).after(each, self.newest_draw) for env, each in found.items()}
        return replace(self, courses={**before, **now})._decided(self, makes_own)

    def _decided(self, before: "HeldOutEffect", makes_own: bool) -> "HeldOutEffect":
        """This effect with the cut that its courses lead to."""
        if not self.has_fallen:
            num_calm = self.num_calm + 1
            if self.num_cuts and num_calm >= self.patience:
                logger.warning("sources that were set aside are used again", extra={"cuts_left": self.num_cuts - 1})
                return replace(self, num_cuts=self.num_cuts - 1, num_calm=0)
            is_over = not self.num_cuts and num_calm >= CALM_EVALUATIONS
            return replace(self, num_calm=num_calm, patience=0 if is_over else self.patience)
        after = replace(self, num_calm=0)
        if not before.has_fallen:
            fallen = {env: course for env, course in self.courses.items() if course.num_held}
            since = self.since_draw if self.patience else min(course.best_draw for course in fallen.values())
            after = replace(after, since_draw=since, patience=min(max(1, 2 * self.patience), CALM_EVALUATIONS))
        if not self.num_cuts or len(self.in_use(makes_own)) > (not makes_own):
            after = replace(after, num_cuts=self.num_cuts + 1)
        if after.num_cuts > self.num_cuts or not before.has_fallen:
            in_use = after.in_use(makes_own)
            extra = {
                "best": {env or "all": course.best.share for env, course in self.courses.items() if course.num_held},
                "set_aside": [short(source) for source in self.seen if source not in in_use][-MAX_SHOWN:],
                "advice": _ADVICE,
            }
            logger.error("held-out accuracy fell", extra=extra)
        return after

    def after_draw(self, draw: int, sources: Iterable[NodeId]) -> "HeldOutEffect":
        """The effect once a draw is here. `sources`: other nodes with a group in it that counts as established."""
        seen = dict(self.seen)
        for source in sources:
            seen[source] = (seen[source][0] if source in seen else draw, draw)
        newest = max(self.newest_draw, draw)
        if len(seen) > MAX_SOURCES:
            seen = {source: draws for source, draws in seen.items() if draws[1] > newest - PRESENT_DRAWS}
        return replace(self, seen=dict(islice(seen.items(), MAX_SOURCES)), newest_draw=newest)

    def after_step(self, *, is_idle: bool) -> "HeldOutEffect":
        """The effect after a draw was used; `is_idle` if every group was left out because accuracy fell.

        LOW_EVALUATIONS idle draws in a row take back a cut; with the last cut, the courses that fell begin anew. An
        idle draw makes no version, so another evaluation would give the same accuracy.
        """
        if not self.num_cuts:
            return self
        num_idle = self.num_idle + 1 if is_idle else 0
        if num_idle < LOW_EVALUATIONS:
            return replace(self, num_idle=num_idle)
        logger.warning("sources that were set aside are used again: nothing else came to learn from")
        courses = self.courses
        if self.num_cuts == 1:
            courses = {env: Course() if course.num_held else course for env, course in courses.items()}
        return replace(self, courses=courses, num_cuts=self.num_cuts - 1, num_idle=0, num_calm=0)

    def to_json(self) -> dict[str, Any]:
        """Plain data for `from_json`."""
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "HeldOutEffect":
        """The inverse of `to_json`, also after a JSON round trip; an empty mapping gives the effect at the start."""
        if "courses" not in data:  # of release 0.1.0: the courses alone
            data = {"courses": data}
        numbers = ("num_cuts", "since_draw", "patience", "num_calm", "num_idle", "newest_draw")
        return HeldOutEffect(
            courses={env: _course(course) for env, course in data["courses"].items()},
            seen={source: (int(first), int(newest)) for source, (first, newest) in data.get("seen", {}).items()},
            **{name: int(data.get(name, 0)) for name in numbers},
        )


def _course(data: Mapping[str, Any]) -> Course:
    return Course(
        best=Accuracy(**data["best"]),
        best_draw=int(data.get("best_draw", 0)),
        recent=tuple(Accuracy(**each) for each in data["recent"]),
        num_held=int(data["num_held"]),
        is_low=bool(data["is_low"]),
    )
