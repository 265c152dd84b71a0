"""First optimizer steps that the nodes of a virtual swarm owe: when each had been up, with something to learn from.

Invariant: the node's own events and their virtual times decide, never its fault plan.
"""

from dataclasses import dataclass

from swarm.events import Event, GroupPut, GroupsDrawn, NodeKilled, NodeRestarted
from swarm.types import NodeId


@dataclass
class _Life:
    """A node from one start to the next kill."""

    start_s: float
    has_put: bool = False
    ready_s: float | None = None  # since then it could learn: a group of its own with signal, or a draw


class FirstSteps:
    """Tells a node that should have made a step from one that had no time for it, or nothing to learn from.

    A step is owed by a node that was up for `within_s` without a break after it had something to learn from. A node
    whose own groups were all right or all wrong had nothing; one that never put a group should have, from its start on.

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
        """One event of a node: of a life from second 0 on, unless it was killed."""
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
        """The nodes that owe no step at the end of the run."""
        for node in nodes:
            life = self._lives.get(node, _Life(start_s=0.0))
            if life is not None:
                self._close(end_s, node, life)
        return frozenset(nodes) - self._owing

    def _close(self, at_s: float, node: NodeId, life: _Life) -> None:
        """A life of the node ends, or the run."""
        since_s = life.ready_s if life.has_put or life.ready_s is not None else life.start_s
        if since_s is not None and at_s - since_s >= self._within_s:
            self._owing.add(node)
