"""History of the calls to a coordinator: arguments, answers and times.

Invariant: invocations and answers have one order, since one process records them; a call without an answer may have
been carried out or not. `tests/worlds/one_ledger.py` judges a history.
"""

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from swarm.clock import Clock
from swarm.errors import Unavailable
from swarm.types import Advice, NodeId, PolicyVersion

LEASE_S: Final = 30.0  # as `CoordinatorCore` grants
NEVER: Final = 2**62


@dataclass(kw_only=True)
class Call:
    """One call: times of its invocation and answer, and their places in the order of all invocations and answers."""

    invoked: int
    invoked_s: float  # wall clock, as `answered_s`
    answered: int = NEVER  # never: the outcome is unknown
    answered_s: float = math.inf

    @property
    def is_answered(self) -> bool:
        return self.answered < NEVER


@dataclass(kw_only=True)
class RecordCall(Call):
    """A call that records versions of an owner in the ledger."""

    versions: tuple[PolicyVersion, ...]
    accepted: tuple[bool, ...] = ()  # of each version; empty: not known


@dataclass(kw_only=True)
class HeadCall(Call):
    """A call that reads the head of a lineage."""

    head: PolicyVersion | None = None


@dataclass(kw_only=True)
class BeatCall(Call):
    """A heartbeat of a node, and the advice that the coordinator answered."""

    node_id: NodeId
    advice: Advice | None = None


@dataclass(kw_only=True)
class MembersCall(Call):
    """A call that reads the members, each with True if it was live."""

    members: dict[NodeId, bool] = field(default_factory=dict[NodeId, bool])


@dataclass(kw_only=True)
class ManifestCall(Call):
    """A call that reads the serial number of the run's manifest."""

    serial: int = 0


@dataclass(kw_only=True)
class Watch(Call):
    """A watch on the heads of a lineage; `answered` is the end of the watch."""

    history: "CoordinatorHistory"
    heads: list[tuple[int, PolicyVersion]] = field(default_factory=list[tuple[int, PolicyVersion]])  # place, head
    is_waiting: bool = True  # for the next head; False while its reader does something else

    @contextmanager
    def seeing(self, head: PolicyVersion) -> Generator[None]:
        """Records a head that arrived; the watch is not waiting during the block, in which its reader uses the head."""
        self.heads.append((self.history.tick(), head))
        self.is_waiting = False
        yield
        self.is_waiting = True


class CoordinatorHistory:
    """Record of calls by kind, each from its invocation to its answer.

    Example:
        with history.record(owner, versions) as call:
            call.accepted = ...  # an exception leaves the outcome unknown
    """

    def __init__(self, clock: Clock, lease_s: float = LEASE_S, is_prompt: bool = False) -> None:
        """Creates an empty history. `is_prompt`: messages arrive before time advances, as on virtual time."""
        self.clock = clock
        self.is_prompt = is_prompt
        self.lease_s = lease_s
        self._order = itertools.count(1)
        self.records: dict[str, list[RecordCall]] = defaultdict(list)  # by lineage, as the rest
        self.heads: dict[str, list[HeadCall]] = defaultdict(list)
        self.watches: dict[str, list[Watch]] = defaultdict(list)
        self.beats: dict[NodeId, list[BeatCall]] = defaultdict(list)
        self.leaves: dict[NodeId, list[Call]] = defaultdict(list)
        self.members: list[MembersCall] = []
        self.manifests: list[ManifestCall] = []
        self.num_calls = 0

    def tick(self) -> int:
        """Returns the next place in the order of all invocations and answers."""
        return next(self._order)

    @contextmanager
    def record(self, owner: NodeId, versions: Sequence[PolicyVersion]) -> Generator[RecordCall]:
        """Records the block as a call that records versions; after an exception the outcome is unknown."""
        call = RecordCall(invoked=self.tick(), invoked_s=self.clock.now_s(), versions=tuple(versions))
        self.records[owner].append(call)
        with self._answering(call):
            yield call

    @contextmanager
    def read_head(self, policy_id: str) -> Generator[HeadCall]:
        """Records the block as a read of a lineage's head; a read that raises is left out."""
        call = HeadCall(invoked=self.tick(), invoked_s=self.clock.now_s())
        with self._answering(call):
            yield call
        self.heads[policy_id].append(call)

    @contextmanager
    def heartbeat(self, node_id: NodeId) -> Generator[BeatCall]:
        """Records the block as a heartbeat of a node; after an exception the outcome is unknown."""
        call = BeatCall(invoked=self.tick(), invoked_s=self.clock.now_s(), node_id=node_id)
        self.beats[node_id].append(call)
        with self._answering(call):
            yield call

    @contextmanager
    def leave(self, node_id: NodeId) -> Generator[Call]:
        """Records the block as a call that ends a node's lease; after an exception the outcome is unknown."""
        call = Call(invoked=self.tick(), invoked_s=self.clock.now_s())
        self.leaves[node_id].append(call)
        with self._answering(call):
            yield call

    @contextmanager
    def list_members(self) -> Generator[MembersCall]:
        """Records the block as a read of the members; a read that raises is left out."""
        call = MembersCall(invoked=self.tick(), invoked_s=self.clock.now_s())
        with self._answering(call):
            yield call
        self.members.append(call)

    @contextmanager
    def read_manifest(self) -> Generator[ManifestCall]:
        """Records the block as a read of the manifest; a read that raises is left out."""
        call = ManifestCall(invoked=self.tick(), invoked_s=self.clock.now_s())
        with self._answering(call):
            yield call
        self.manifests.append(call)

    @contextmanager
    def watch(self, policy_id: str) -> Generator[Watch]:
        """Records the block as a watch on a lineage."""
        watch = Watch(invoked=self.tick(), invoked_s=self.clock.now_s(), history=self)
        self.watches[policy_id].append(watch)
        try:
            yield watch
        except Unavailable:
            watch.is_waiting = False  # the coordinator ended the watch, maybe before its last head was read
            raise
        finally:
            watch.answered, watch.answered_s = self.tick(), self.clock.now_s()

    @contextmanager
    def _answering(self, call: Call) -> Generator[None]:
        self.num_calls += 1
        yield
        call.answered, call.answered_s = self.tick(), self.clock.now_s()


class UnrulyOwner:
    """An owner's versions in any order: new, repeated and earlier ones, and others of a known step."""

    def __init__(self, policy_id: str, rng: random.Random) -> None:
        self._policy_id = policy_id
        self._rng = rng
        self._known: list[PolicyVersion] = []

    def versions(self) -> list[PolicyVersion]:
        """The next batch, of one, two or four versions."""
        return [self._version() for _ in range(self._rng.choice([1, 1, 1, 2, 4]))]

    def _version(self) -> PolicyVersion:
        known, kind = self._rng.choice(self._known[-6:] or [None]), self._rng.random()
        if known is not None and kind < 0.3:
            return known  # a retry, or a rewind
        step = 0 if known is None else known.step if kind < 0.45 else self._known[-1].step + self._rng.choice([1, 1, 2])
        self._known.append(PolicyVersion(policy_id=self._policy_id, step=step, digest=self._rng.randbytes(32)))
        return self._known[-1]
