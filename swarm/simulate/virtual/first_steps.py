"""Nodes of a virtual swarm that owe a first optimizer step: nodes up for long enough with something to learn from.

Invariant: a node's own events and their virtual times decide, never its fault plan.
"""

from dataclasses import dataclass

from swarm.events import Event, GroupPut, GroupsDrawn, NodeKilled, NodeRestarted
from swarm.types import NodeId


@dataclass
class _Life:
    """The time of a node from a start to the next kill."""

    start_s: float
    has_put: bool = False
    ready_s: float | None = None  # when it first had an own group with signal, or a draw


class FirstSteps:
    """Separates nodes that should have made a step from those that had no time, or nothing to learn from.

    A node owes a step if it was up for `within_s` without a break after its first draw or its first own group with
    reward variance. For a node that never put or drew a group, the time counts from its start.

    Example:
        first = FirstSteps(within_s=16.0)
        first.note(4.0, node_id, event)
        excused = first.excused(24.0, node_ids)
    """

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._lives: dict[NodeId, _Life | None] = {}  # None: it is down
        self._owing: set[NodeId] = set()

    def note(self, at_s: float, node: NodeId, event: Event) -> None:
        """Records an event of a node, which is taken to be up from second 0 unless it was killed."""
        life = self._lives.setdefault(node, _Life(start_s=0.0))
        if isinstance(event, NodeRestarted):
            self._lives[node] = _Life(start_s=at_s)
        elif life is not None and isinstance(event, NodeKilled):
            self._close(at_s, node, life)
            self._lives[node] = None
        elif life is not None and isinstance(event, GroupPut | GroupsDrawn):
            life.has_put |= isinstance(event, GroupPut)
            has_signal = isinstance(event, GroupsDrawn) or 0.0 < event.reward_mean < 1.0
            if has_signal and life.ready_s is None:
                life.ready_s = at_s

    def excused(self, end_s: float, nodes: list[NodeId]) -> frozenset[NodeId]:
        """Returns the nodes that owe no step at the end of the run."""
        for node in nodes:
            life = self._lives.get(node, _Life(start_s=0.0))
            if life is not None:
                self._close(end_s, node, life)
        return frozenset(nodes) - self._owing

    def _close(self, at_s: float, node: NodeId, life: _Life) -> None:
        """Ends a life of the node, at a kill or at the end of the run, and notes whether the node owes a step."""
        since_s = life.ready_s if life.has_put or life.ready_s is not None else life.start_s
        if since_s is not None and at_s - since_s >= self._within_s:
            self._owing.add(node)
