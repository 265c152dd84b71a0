"""Effect of a run's steps on held-out accuracy; a fall sets the groups of other nodes aside.

Invariant: pure functions of plain numbers that are kept with the checkpoint. No claim of another node enters: held-out
problems are never trained on, answered greedily by our own policy and scored here.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from swarm.types import Evaluation

logger = logging.getLogger(__name__)

FALL_SIGMAS: Final = 3.0  # below the best twice in a row: accuracy has fallen
PLUNGE_SIGMAS: Final = 5.0  # below the best once
CALM_SIGMAS: Final = 1.0  # below the best, up to which it has come back
POOLED: Final = 4  # evaluations that are one figure: the best of many single ones is mostly luck
MAX_HELD: Final = 8  # evaluations without others' groups after which these are not the cause
_ADVICE: Final = (
    "groups of other nodes are set aside until it comes back; look at learn/source_* for who came last, "
    "put keys on the deny list, or start again from an older checkpoint"
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
    """Held-out accuracy of one environment."""

    best: Accuracy = Accuracy()
    recent: tuple[Accuracy, ...] = ()  # at most POOLED
    num_held: int = 0  # evaluations since it fell; 0: it has not
    is_low: bool = False  # the newest was below FALL_SIGMAS
    num_idle: int = 0  # draws in a row since it fell that nothing was learned from

    def after(self, now: Accuracy) -> "Course":
        """The course after one more evaluation."""
        sigmas = now.sigmas_below(self.best) if self.best.num_problems else 0.0
        if self.num_held:
            if sigmas < CALM_SIGMAS:
                return replace(self, num_held=0, num_idle=0, recent=(now,))
            if self.num_held < MAX_HELD:
                return replace(self, num_held=self.num_held + 1, num_idle=0)
            return Course(best=now, recent=(now,))
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
        return Course(best=pooled if is_best or is_early else self.best, recent=recent)

    def after_draw(self, *, is_idle: bool) -> "Course":
        """The course after one more draw. MAX_HELD idle draws in a row reset a course that fell, as evaluations do: an
        idle draw makes no version, so another evaluation would give the same accuracy."""
        if not self.num_held:
            return self
        num_idle = self.num_idle + 1 if is_idle else 0
        return Course() if num_idle >= MAX_HELD else replace(self, num_idle=num_idle)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutEffect:
    """Courses of held-out accuracy by environment; part of the checkpoint."""

    courses: Mapping[str, Course]

    @property
    def has_fallen(self) -> bool:
        """True from a fall in any environment until accuracy is back, or MAX_HELD evaluations or idle draws passed."""
        return any(course.num_held for course in self.courses.values())

    def after(self, evaluations: Sequence[Evaluation]) -> "HeldOutEffect":
        """The effect after the held-out evaluations of one step; a fall is logged with advice."""
        courses = dict(self.courses)
        for each in evaluations:
            if each.split != "held_out":
                continue
            before = courses.get(each.env, Course())
            now = Accuracy(num_right=each.accuracy * each.num_problems, num_problems=each.num_problems)
            courses[each.env] = course = before.after(now)
            fields = {"env": each.env, "step": each.step, "accuracy": each.accuracy, "best": before.best.share}
            if course.num_held == 1:
                logger.error("held-out accuracy fell", extra={**fields, "advice": _ADVICE})
            elif before.num_held and not course.num_held:
                logger.warning("groups of other nodes are used again", extra=fields)
        return HeldOutEffect(courses=courses)

    def after_draw(self, *, is_idle: bool) -> "HeldOutEffect":
        """The effect after one more draw; `is_idle` if every group was left out because accuracy fell."""
        after = HeldOutEffect(courses={env: each.after_draw(is_idle=is_idle) for env, each in self.courses.items()})
        if self.has_fallen and not after.has_fallen:
            logger.warning("groups of other nodes are used again: nothing else came to learn from")
        return after

    def to_json(self) -> dict[str, Any]:
        """Plain data for `from_json`."""
        return {env: asdict(course) for env, course in self.courses.items()}

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> "HeldOutEffect":
        """The inverse of `to_json`, also after a JSON round trip; an empty mapping gives the effect at the start."""
        return HeldOutEffect(
            courses={
                env: Course(
                    best=Accuracy(**course["best"]),
                    recent=tuple(Accuracy(**each) for each in course["recent"]),
                    num_held=int(course["num_held"]),
                    is_low=bool(course["is_low"]),
                    num_idle=int(course.get("num_idle", 0)),
                )
                for env, course in data.items()
            }
        )
