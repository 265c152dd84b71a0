"""Off-policy advisor: advice for all nodes from what learners measured about each source of groups.

Invariant: only reports of established nodes count, each party has one vote, and one vote cannot move a median of three
or more beyond the range of the other votes. Every change is returned as a log entry, and advice only ever tightens what
a node allows itself: local limits win at the node. The advised age bound is at least one step, unless the run's own
bound is 0.

Two remedies for two causes. Data that is *late* (edges whose mean age is at least one step) is cured by a
lower lag bound; data of a policy that has become *different* is cured by drawing less of that source.
"""

import math
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from swarm.config import GuardLimits
from swarm.flow import BoundedTable
from swarm.peers.parties import Parties
from swarm.types import Advice, EdgeReport, NodeId, short

MAX_REPORTERS_PER_SOURCE: Final = 64
MAX_SOURCES: Final = 4096
MAX_WEIGHTS: Final = 64  # in one advice, of about 70 bytes each: every heartbeat is answered with all of them

_LEARNER: Final = GuardLimits()  # the one home of the thresholds that both sides share


@dataclass(frozen=True, kw_only=True, slots=True)
class AdvisorLimits:
    """Thresholds of the advisor, on one ladder with those of a learner's own guard (`GuardLimits`).

    From worst to best: alarm, intervene, tight. A learner's guard acts at `tight` by itself. The advisor lowers the lag
    bound for all nodes only if the median over parties is worse than `intervene`, and raises it again only if the
    median is better than `tight`. In between the bound stays as it is: hysteresis.
    """

    window_s: float = 120.0  # reports older than this no longer count
    hold_s: float = 30.0  # least time between two changes of the lag bound
    alarm_ess: float = _LEARNER.alarm_ess  # median effective sample size share: below, one step at once
    alarm_kl: float = _LEARNER.alarm_kl  # median k3 mismatch, nats per token
    intervene_ess: float = 0.30  # below it late data is cut
    intervene_kl: float = 0.20
    tight_ess: float = _LEARNER.tight_ess  # a source at least this good has weight 1
    tight_kl: float = _LEARNER.tight_kl
    late_age_steps: float = 1.0  # edges younger than this say nothing about lateness
    weight_step: float = 0.10  # smaller changes of a weight are not advised


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeFigures:
    """Medians over the parties that recently reported on one source."""

    source: NodeId
    num_parties: int  # that reported on it
    ess_share: float
    mismatch_kl: float
    age_mean_steps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AdviceChange:
    """One change of the advice."""

    at_s: float
    what: str  # "max_age_steps", "state" or "weight"
    before: str
    after: str
    reason: str

    def sentence(self) -> str:
        """The change as a line of text for people."""
        name = {"max_age_steps": "age bound (steps)", "state": "advice", "weight": "weight"}.get(self.what, self.what)
        return f"{name}: {self.before} -> {self.after} ({self.reason})"


@dataclass(slots=True)
class _Advised:
    max_age_steps: int | None = None
    state: str = "ok"  # ok, tightened, alarm
    changed_s: float = -math.inf
    weights: dict[NodeId, float] = field(default_factory=dict[NodeId, float])


class OffPolicyAdvisor:
    """Collects edge reports and keeps the advice that follows from them.

    Example:
        advisor = OffPolicyAdvisor(base_max_age_steps=4)
        advisor.report(reporter, edges, now_s)
        changes = advisor.decide(now_s)
        advice = advisor.advice(reporter, lease_s=30.0)
    """

    def __init__(
        self,
        base_max_age_steps: int,
        limits: AdvisorLimits | None = None,
        parties: Parties | None = None,
    ) -> None:
        """Starts without advice.

        Args:
            base_max_age_steps: lag bound of the run, which the advice never exceeds.
            limits: thresholds; None for the defaults.
            parties: decides which nodes are established and which keys are one party; with None every node is
                established and is its own party.
        """
        self._base = base_max_age_steps
        self._parties = parties or Parties()
        self._limits = limits or AdvisorLimits()
        self._edges: dict[NodeId, BoundedTable[NodeId, tuple[float, EdgeReport]]] = {}  # source -> reporter -> newest
        self._sources_of: dict[NodeId, list[NodeId]] = {}  # of each reporter's newest report
        self._advised = _Advised()

    @property
    def state(self) -> str:
        """State of the advice: ok, tightened or alarm."""
        return self._advised.state

    @property
    def max_age_steps(self) -> int | None:
        """The advised lag bound in steps; None if there is no opinion."""
        return self._advised.max_age_steps

    def report(self, reporter: NodeId, edges: tuple[EdgeReport, ...], now_s: float) -> None:
        """Replaces the edges of one learner with those of its newest report.

        Ignores every edge of a reporter that is not established, edges whose source is the reporter itself, edges
        without groups, figures out of range (`is_usable`), and new sources beyond `MAX_SOURCES`.
        """
        self.forget(reporter)
        if not self._parties.is_established(reporter):
            return
        for edge in edges:
            if edge.source == reporter or edge.num_groups <= 0 or not is_usable(edge):
                continue
            if edge.source not in self._edges and len(self._edges) >= MAX_SOURCES:
                continue
            reporters = self._edges.setdefault(edge.source, BoundedTable(MAX_REPORTERS_PER_SOURCE))
            reporters[reporter] = (now_s, edge)
            self._sources_of.setdefault(reporter, []).append(edge.source)

    def forget(self, node_id: NodeId) -> None:
        """Drops the edges that a node reported."""
        for source in self._sources_of.pop(node_id, ()):
            reporters = self._edges.get(source, {})
            if reporters.pop(node_id, None) is not None and not reporters:
                del self._edges[source]

    def figures(self, now_s: float) -> list[EdgeFigures]:
        """Medians of each source over the established parties that reported within the window, sorted by source."""
        self._drop_old(now_s)
        figures = [self._figures_of(source) for source in sorted(self._edges)]
        return [figure for figure in figures if figure is not None]

    def edges(self, now_s: float) -> list[tuple[NodeId, float, EdgeReport]]:
        """Every edge within the window, as (reporter, wall clock of the report, edge)."""
        self._drop_old(now_s)
        return [(reporter, at_s, edge) for by in self._edges.values() for reporter, (at_s, edge) in by.items()]

    def decide(self, now_s: float) -> list[AdviceChange]:
        """Recomputes the advice and returns the changes; the lag bound changes at most once in `hold_s`."""
        figures = self.figures(now_s)
        return self._decide_lag(now_s) + self._decide_weights(figures, now_s)

    def advice(self, node_id: NodeId, lease_s: float) -> Advice:
        """The present advice for one node, without the weight of the node itself."""
        weights = {source: weight for source, weight in self._advised.weights.items() if source != node_id}
        return Advice(
            max_age_steps=self._advised.max_age_steps,
            source_weights=weights,
            state=self._advised.state,
            lease_s=lease_s,
        )

    def _figures_of(self, source: NodeId) -> EdgeFigures | None:
        parties = self._by_party([(reporter, edge) for reporter, (_, edge) in self._edges[source].items()])
        if not parties:
            return None
        ages = [median([edge.age_mean_steps for edge in edges]) for edges in parties]
        return EdgeFigures(
            source=source,
            num_parties=len(parties),
            ess_share=min(1.0, max(0.0, median(map(_ess, parties)))),
            mismatch_kl=max(0.0, median(map(_kl, parties))),
            age_mean_steps=max(0.0, median(ages)),
        )

    def _late_figures(self) -> list[tuple[float, float]]:
        """(ess, kl) of each party: medians over its late edges, so that many sources or keys have one vote."""
        late = [
            (reporter, edge)
            for reporters in self._edges.values()
            for reporter, (_, edge) in reporters.items()
            if edge.age_mean_steps >= self._limits.late_age_steps
        ]
        return [(_ess(edges), _kl(edges)) for edges in self._by_party(late)]

    def _by_party(self, edges: list[tuple[NodeId, EdgeReport]]) -> list[list[EdgeReport]]:
        by_party: dict[str, list[EdgeReport]] = {}
        for reporter, edge in edges:
            if self._parties.is_established(reporter):  # it was when it reported, and may be no longer
                by_party.setdefault(self._parties.party_of(reporter), []).append(edge)
        return list(by_party.values())

    def _decide_lag(self, now_s: float) -> list[AdviceChange]:
        advised, limits = self._advised, self._limits
        late = self._late_figures()
        if now_s - advised.changed_s < limits.hold_s or (not late and advised.max_age_steps is None):
            return []
        ess = median([ess for ess, _ in late]) if late else 1.0
        kl = median([kl for _, kl in late]) if late else 0.0
        bound, state = self._next_bound(ess, kl)
        reason = f"median over {len(late)} parties with late data: ess {ess:.3f}, mismatch {kl:.3f} nats"
        changes = [
            AdviceChange(at_s=now_s, what=what, before=before, after=after, reason=reason)
            for what, before, after in (
                ("max_age_steps", _text(advised.max_age_steps), _text(bound)),
                ("state", advised.state, state),
            )
            if before != after
        ]
        if changes:
            advised.max_age_steps, advised.state, advised.changed_s = bound, state, now_s
        return changes

    def _next_bound(self, ess: float, kl: float) -> tuple[int | None, str]:
        """The next lag bound and state.

        Beyond `alarm` the bound is one step; beyond `intervene` it is halved, to no less than one step; better than
        `tight` it rises by one step, and ends (None) when it reaches the base; else it stays. It never exceeds the
        base.
        """
        advised, limits = self._advised, self._limits
        now = self._base if advised.max_age_steps is None else advised.max_age_steps
        if ess < limits.alarm_ess or kl > limits.alarm_kl:
            return min(1, self._base), "alarm"
        if ess < limits.intervene_ess or kl > limits.intervene_kl:
            bound = min(now, max(1, now // 2), self._base)
            return bound, "tightened"
        if ess > limits.tight_ess and kl < limits.tight_kl and advised.max_age_steps is not None:
            return (None, "ok") if now + 1 >= self._base else (now + 1, "tightened")
        return advised.max_age_steps, advised.state

    def _decide_weights(self, figures: list[EdgeFigures], now_s: float) -> list[AdviceChange]:
        advised, limits, changes = self._advised, self._limits, list[AdviceChange]()
        by_votes = sorted(figures, key=lambda figure: (-figure.num_parties, self._weight(figure), figure.source))
        low = [figure for figure in by_votes if self._weight(figure) < 1.0][:MAX_WEIGHTS]
        wanted = {figure.source: self._weight(figure) for figure in low}
        for source in sorted({*wanted, *advised.weights}):
            before, after = advised.weights.get(source, 1.0), wanted.get(source, 1.0)
            is_end = after in (0.0, 1.0) and before != after
            if abs(after - before) < limits.weight_step and not is_end:
                continue
            advised.weights.pop(source, None)
            if after < 1.0:
                advised.weights[source] = after
            if before != after:
                reason = f"source {short(source)}: {self._explain(source, figures)}"
                changes.append(
                    AdviceChange(at_s=now_s, what="weight", before=f"{before:.2f}", after=f"{after:.2f}", reason=reason)
                )
        return changes

    def _weight(self, figure: EdgeFigures) -> float:
        """Weight of a source: 1 if both figures are within `tight`, else in proportion; rounded to two decimals."""
        by_ess = min(1.0, figure.ess_share / self._limits.tight_ess)
        by_kl = min(1.0, self._limits.tight_kl / max(figure.mismatch_kl, 1e-12))
        return round(by_ess * by_kl, 2)

    def _explain(self, source: NodeId, figures: list[EdgeFigures]) -> str:
        figure = next((figure for figure in figures if figure.source == source), None)
        if figure is None:
            return "no recent report"
        return f"ess {figure.ess_share:.3f}, mismatch {figure.mismatch_kl:.3f} nats, {figure.num_parties} parties"

    def _drop_old(self, now_s: float) -> None:
        for source, reporters in list(self._edges.items()):
            for reporter in [r for r, (at_s, _) in reporters.items() if now_s - at_s > self._limits.window_s]:
                del reporters[reporter]
                self._sources_of.pop(reporter, None)  # all of a report is of one age
            if not reporters:
                del self._edges[source]


def is_usable(edge: EdgeReport) -> bool:
    """True if all figures are finite, and share and mismatch are within their ranges, give or take 1e-3."""
    numbers = (edge.age_mean_steps, edge.ess_share, edge.mismatch_kl, edge.reward_mean)
    return all(map(math.isfinite, numbers)) and -1e-3 <= edge.ess_share <= 1.001 and edge.mismatch_kl >= -1e-3


def _ess(edges: list[EdgeReport]) -> float:
    return median([edge.ess_share for edge in edges])


def _kl(edges: list[EdgeReport]) -> float:
    return median([edge.mismatch_kl for edge in edges])


def _text(bound: int | None) -> str:
    return "no opinion" if bound is None else str(bound)
