"""Durable state of the coordinator: its interface, and an implementation in memory for virtual swarms.

Invariant: a version is stored before it is acknowledged; everything else is at most one heartbeat behind.
"""

from collections import deque
from dataclasses import dataclass
from typing import Final, Protocol

from coordinator.advice import AdviceChange
from coordinator.ledger import LedgerEntry
from coordinator.membership import Member
from swarm.types import EdgeReport, NodeId

MAX_VERSION_ROWS: Final = 2_000_000  # newest lines of the ledger, about 250 MB: no node fills the disk with its own
MAX_EDGE_ROWS: Final = 20_000
MAX_EVALUATION_ROWS: Final = 50_000
MAX_ADVICE_ROWS: Final = 5_000


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredEvaluation:
    """One accuracy that a node reported."""

    at_s: float  # wall clock of the coordinator
    node_id: NodeId
    step: int
    name: str  # env/split
    accuracy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Remembered:
    """Everything that a restart takes over, oldest first."""

    members: list[Member]
    versions: list[LedgerEntry]
    edges: list[tuple[float, NodeId, EdgeReport]]
    evaluations: list[StoredEvaluation]
    advice: list[AdviceChange]


class CoordinatorStore(Protocol):
    """Durable state of the coordinator."""

    async def load(self) -> Remembered:
        """Everything that was stored, for a restart."""
        ...

    async def add_versions(self, entries: list[LedgerEntry]) -> None:
        """Makes lines of the ledger durable before it returns: all or none. Raises StorageFull."""
        ...

    async def put_member(
        self, member: Member, edges: tuple[EdgeReport, ...], evaluations: list[StoredEvaluation]
    ) -> None:
        """Stores one heartbeat: the member and what it reported. Raises StorageFull."""
        ...

    async def add_advice(self, changes: list[AdviceChange]) -> None:
        """Appends to the log of what the advisor changed. Raises StorageFull."""
        ...

    async def forget_members(self, node_ids: list[NodeId]) -> None:
        """Deletes members that are long gone."""
        ...

    async def trim(self) -> None:
        """Cuts the rings of versions and reports back to their bounds."""
        ...

    async def close(self) -> None:
        """Flushes to disk and closes the store."""
        ...


class MemoryCoordinatorStore:
    """Implements `CoordinatorStore` in memory; survives a restart of the core within one process."""

    def __init__(self) -> None:
        self._members: dict[NodeId, Member] = {}
        self._versions: deque[LedgerEntry] = deque(maxlen=MAX_VERSION_ROWS)
        self._edges: deque[tuple[float, NodeId, EdgeReport]] = deque(maxlen=MAX_EDGE_ROWS)
        self._evaluations: deque[StoredEvaluation] = deque(maxlen=MAX_EVALUATION_ROWS)
        self._advice: deque[AdviceChange] = deque(maxlen=MAX_ADVICE_ROWS)

    async def load(self) -> Remembered:
        return Remembered(
            members=list(self._members.values()),
            versions=list(self._versions),
            edges=list(self._edges),
            evaluations=list(self._evaluations),
            advice=list(self._advice),
        )

    async def add_versions(self, entries: list[LedgerEntry]) -> None:
        self._versions.extend(entries)

    async def put_member(
        self, member: Member, edges: tuple[EdgeReport, ...], evaluations: list[StoredEvaluation]
    ) -> None:
        self._members[member.node_id] = member
        self._edges.extend((member.last_seen_s, member.node_id, edge) for edge in edges)
        self._evaluations.extend(evaluations)

    async def add_advice(self, changes: list[AdviceChange]) -> None:
        self._advice.extend(changes)

    async def forget_members(self, node_ids: list[NodeId]) -> None:
        for node_id in node_ids:
            self._members.pop(node_id, None)

    async def trim(self) -> None:
        """The deques are bounded by themselves."""

    async def close(self) -> None:
        """Nothing to close."""
