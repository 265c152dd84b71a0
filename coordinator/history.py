"""Course of a run as its members report it, for the charts of the status page.

Invariant: at most `MAX_MOMENTS` moments, however long the run: beyond that every second moment is dropped and the
interval doubles. Reward and held-out success are medians over the established live members, or over all live members if
none is established, so that free keys change neither in a run with established members.
"""

from dataclasses import dataclass
from statistics import median
from typing import Final

from coordinator.core import CoordinatorCore

MAX_MOMENTS: Final = 480
FIRST_EVERY_S: Final = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """The state of the run at one time."""

    at_s: float  # wall clock
    num_live: int
    reward: float | None  # median of the members' mean rewards
    held_out: float | None  # median of their mean success on held-out problems
    age_steps: float | None  # median of the mean ages, by source
    ess_share: float | None  # the same of the effective sample size


class History:
    """Moments of a run, oldest first.

    Example:
        history = History()
        history.note(core)
    """

    def __init__(self) -> None:
        self.moments: list[Moment] = []
        self.every_s = FIRST_EVERY_S
        """Seconds between two moments."""

    def note(self, core: CoordinatorCore) -> None:
        """Adds a moment with the present figures; drops every second moment if there are too many."""
        now_s = core.clock.now_s()
        live = core.live_members()
        established = [member for member in live if core.parties.is_established(member.node_id)]
        reports = [member.report for member in established or live]
        held_out = [
            sum(of_splits) / len(of_splits)
            for report in reports
            if (of_splits := [value for name, value in report.evaluations.items() if name.endswith("/held_out")])
        ]
        figures = core.advisor.figures(now_s)
        self.moments.append(
            Moment(
                at_s=now_s,
                num_live=len(live),
                reward=_median([report.reward_mean for report in reports]),
                held_out=_median(held_out),
                age_steps=_median([each.age_mean_steps for each in figures]),
                ess_share=_median([each.ess_share for each in figures]),
            )
        )
        if len(self.moments) > MAX_MOMENTS:  # an odd number, so that the newest stays
            self.moments, self.every_s = self.moments[::2], 2 * self.every_s


def _median(values: list[float]) -> float | None:
    return median(values) if values else None
