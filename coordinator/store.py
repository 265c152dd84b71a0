"""Durable state of the coordinator: its interface, and an implementation in memory for virtual swarms.

Invariant: a version is stored before it is acknowledged; a report may be acknowledged before it is stored.
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
    """Stored state that a restarted coordinator loads; every list but `members` is in the order of storing."""

    members: list[Member]
    versions: list[LedgerEntry]
    edges: list[tuple[float, NodeId, EdgeReport]]
    evaluations: list[StoredEvaluation]
    advice: list[AdviceChange]


class CoordinatorStore(Protocol):
    """Durable state of the coordinator: the last record of each member, and the newest rows of everything else."""

    async def load(self) -> Remembered:
        """Returns the stored state. Raises ConfigError if it cannot be read."""
        ...

    async def add_versions(self, entries: list[LedgerEntry]) -> None:
        """Appends ledger entries, all or none; they are durable when this call returns. Raises StorageFull."""
        ...

    async def put_member(
        self, member: Member, edges: tuple[EdgeReport, ...], evaluations: list[StoredEvaluation]
    ) -> None:
        """Stores one heartbeat: replaces the member's record, appends edges and evaluations. Raises StorageFull."""
        ...

    async def add_advice(self, changes: list[AdviceChange]) -> None:
        """Appends changes of the advice. Raises StorageFull."""
        ...

    async def forget_members(self, node_ids: list[NodeId]) -> None:
        """Deletes the records of these members; ignores unknown ids. Raises StorageFull."""
        ...

    async def trim(self) -> None:
        """Deletes the oldest versions, edges, evaluations and changes of advice beyond their bounds (`MAX_..._ROWS`).

        Raises StorageFull.
        """
        ...

    async def close(self) -> None:
        """Releases the store; no other call follows."""
        ...


class MemoryCoordinatorStore:
    """Implements `CoordinatorStore` in memory: the state survives a restart of the core, but not of the process."""

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
        """Does nothing: the deques are bounded already."""

    async def close(self) -> None:
        """Does nothing: there is nothing to release."""
