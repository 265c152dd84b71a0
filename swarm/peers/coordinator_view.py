"""What passes between a node and the coordinator: figures and versions to hand in, advice to follow.

Invariant: a node goes on without any of it. Advice ends with its lease and can only lower what is measured here.
"""

from collections.abc import Iterable

from swarm.clock import Clock
from swarm.flow import BoundedTable
from swarm.types import Advice, EdgeReport, NodeId, PolicyVersion
from swarm.wire.reports import MAX_EDGES

MAX_PENDING_VERSIONS = 10_000  # kept for a coordinator that is away


class CoordinatorView:
    """A node's side of the control plane.

    Example:
        coordination.take_advice(await coordinator.heartbeat(agent.node_report(rate)))
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._advice, self._advice_ends_s = Advice(), 0.0
        self.pending_versions: list[PolicyVersion] = []  # not yet in the ledger, oldest first
        self.edges = BoundedTable[NodeId, EdgeReport](MAX_EDGES)  # newest of each source; a report carries all
        self.evaluations: dict[str, float] = {}  # env/split -> newest accuracy

    @property
    def advice(self) -> Advice:
        """The coordinator's newest advice; no opinion once its lease ran out."""
        return self._advice if self._clock.monotonic_s() < self._advice_ends_s else Advice()

    def take_advice(self, advice: Advice) -> None:
        """A heartbeat was answered."""
        self._advice, self._advice_ends_s = advice, self._clock.monotonic_s() + advice.lease_s

    def note_version(self, version: PolicyVersion) -> None:
        """A version of ours for the ledger."""
        if len(self.pending_versions) < MAX_PENDING_VERSIONS:
            self.pending_versions.append(version)

    def note_edges(self, edges: Iterable[EdgeReport]) -> None:
        """How off-policy each source was in a step."""
        for edge in edges:
            self.edges[edge.source] = edge

    def source_weights(self) -> dict[NodeId, float]:
        """Own measured effective sample size per source; the coordinator's advice can only lower it."""
        weights = {source: edge.ess_share for source, edge in self.edges.items()}
        for source, weight in self.advice.source_weights.items():
            weights[source] = min(weights.get(source, 1.0), weight)
        return weights
