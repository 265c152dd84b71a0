"""Core of the coordinator without its network: membership, ledger, head watches and advisor over a store.

Invariant: the core handles figures and digests, never a rollout or a weight; it refuses a report or a version in the
name of another node.
"""

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from coordinator.advice import AdviceChange, OffPolicyAdvisor
from coordinator.head_watches import HeadWatches
from coordinator.ledger import Ledger, LedgerAnswer
from coordinator.membership import Member, Membership
from coordinator.store import CoordinatorStore, MemoryCoordinatorStore, StoredEvaluation
from swarm.clock import Clock
from swarm.errors import Unauthenticated
from swarm.peers.parties import Parties
from swarm.types import Advice, NodeId, NodeReport, PolicyVersion, short

logger = logging.getLogger(__name__)

KEEP_GONE_S: Final = 24 * 3600.0  # a gone member stays visible for a day
MAX_SHOWN_ADVICE: Final = 200
DECIDE_EVERY_S: Final = 0.5  # least time between two decisions
DECIDE_SHARE: Final = 0.1  # of the time at most is spent on decisions: their cost grows with the number of edges


@dataclass(frozen=True, kw_only=True, slots=True)
class TakenReport:
    """A report that the membership and the advisor have, and the store does not have yet."""

    member: Member
    evaluations: list[StoredEvaluation]
    changes: list[AdviceChange]  # of the advice, caused by this report


class CoordinatorCore:
    """State of the coordinator, and the calls that read and change it.

    Example:
        core = CoordinatorCore(clock, store=await SqliteCoordinatorStore.open(path))
        await core.restore()
        advice = await core.heartbeat(node_id, report)
    """

    def __init__(
        self,
        clock: Clock,
        store: CoordinatorStore | None = None,
        lease_s: float = 30.0,
        base_max_age_steps: int = 4,
        parties: Parties | None = None,
    ) -> None:
        self.clock = clock
        self.store: CoordinatorStore = store or MemoryCoordinatorStore()
        self.membership = Membership(lease_s)
        self.ledger = Ledger()
        self.watches = HeadWatches()
        self.parties = parties or Parties()
        self.advisor = OffPolicyAdvisor(base_max_age_steps, parties=self.parties)
        self.advice_log: deque[AdviceChange] = deque(maxlen=MAX_SHOWN_ADVICE)
        self.num_heartbeats = 0
        self.num_versions = 0  # ever recorded, abandoned branches included
        self.num_refused_versions = 0
        self._decided_s = -math.inf
        self._next_after_s = DECIDE_EVERY_S  # from that decision to the next one
        self._evaluated: dict[NodeId, dict[str, float]] = {}
        self._writing = asyncio.Lock()

    async def restore(self) -> None:
        """Loads the stored state. Leases keep their expiry times; the advice is computed anew from the stored edges.

        Raises:
            ConfigError: the store cannot be read.
        """
        remembered = await self.store.load()
        self.membership.restore(remembered.members)
        self.ledger.restore(remembered.versions)
        self.num_versions = sum(not entry.is_rewind for entry in remembered.versions)
        for (at_s, reporter), rows in groupby(remembered.edges, key=lambda row: row[:2]):
            self.advisor.report(reporter, tuple(edge for _, _, edge in rows), at_s)
        for member in remembered.members:
            self._evaluated[member.node_id] = dict(member.report.evaluations)
        self.advice_log.extend(remembered.advice)
        logger.info("state restored", extra={"members": len(remembered.members), "versions": len(remembered.versions)})

    async def heartbeat(self, node_id: NodeId, report: NodeReport, subnet: str = "") -> Advice:
        """Renews the node's lease, stores its figures and returns the advice for it.

        Args:
            node_id: id that the caller proved.
            report: figures of the node.
            subnet: subnet of the caller; empty if unknown: then the node counts as a subnet by itself.

        Raises:
            Unauthenticated: the report is in another node's name.
            Unavailable: no room for another member.
            StorageFull: the store cannot write; the lease in memory is renewed all the same.
        """
        await self.store_report(self.take_report(node_id, report, subnet))
        return self.advice(node_id)

    def take_report(self, node_id: NodeId, report: NodeReport, subnet: str = "") -> TakenReport:
        """Takes a heartbeat into membership and advisor, without the store.

        Arguments and errors are those of `heartbeat`, except StorageFull.
        """
        if report.node_id != node_id:
            raise Unauthenticated(f"node {short(node_id)} reported as {short(report.node_id)}")
        now_s = self.clock.now_s()
        member, has_joined = self.membership.renew(report, now_s, subnet)
        if has_joined:
            logger.info("node joined", extra={"node": short(node_id), "node_name": report.name})
        self.num_heartbeats += 1
        self.advisor.report(node_id, report.edges, now_s)
        changes = self._decide(now_s) if abs(now_s - self._decided_s) >= self._next_after_s else []
        return TakenReport(member=member, evaluations=self._new_evaluations(report, now_s), changes=changes)

    async def store_report(self, taken: TakenReport) -> None:
        """Writes a taken report, and the changes of advice that came with it, to the store. Raises StorageFull."""
        await self.store.put_member(taken.member, taken.member.report.edges, taken.evaluations)
        if taken.changes:
            await self.store.add_advice(taken.changes)

    def advice(self, node_id: NodeId) -> Advice:
        """The present advice for a node."""
        return self.advisor.advice(node_id, self.membership.lease_s)

    async def record_versions(self, node_id: NodeId, versions: Sequence[PolicyVersion]) -> list[LedgerAnswer]:
        """Adds versions to the node's own lineage, in their order; they are durable when this call returns.

        Returns:
            One answer for each version, in order: accepted, or refused with a reason.

        Raises:
            StorageFull: the store cannot write; none of the versions is in the ledger.
        """
        async with self._writing:
            judgement = self.ledger.judge(node_id, versions, self.clock.now_s(), self.is_live_member)
            await self.store.add_versions(judgement.entries)  # durable before anybody can read them here
            self.ledger.apply(node_id, judgement)
            for entry in judgement.entries:
                if not entry.is_rewind:
                    self.num_versions += 1
                    self.watches.offer(entry.version)
        for answer in judgement.answers:
            if not answer.accepted:
                self.num_refused_versions += 1
                logger.info("version refused", extra={"node": short(node_id), "reason": answer.reason})
        return judgement.answers

    async def watch_versions(
        self, node_id: NodeId, policy_id: str, subnet: str = ""
    ) -> AsyncGenerator[PolicyVersion, None]:
        """Yields the head of a lineage, if there is one, then each new head; all of them are durable.

        A slow reader gets only the newest head. A rewind to step s alone changes no head. When the owner then records
        other weights for a step above s, that version becomes the head, even if its step is smaller than that of the
        head before. So a watcher accepts every version that it gets as the head, also a smaller step or a new digest
        for a known step.

        Args:
            node_id: node that watches.
            policy_id: id of any lineage; if it does not exist yet, its first version is the first head.
            subnet: subnet of the watcher; empty if unknown: then the node counts as a subnet by itself.

        Raises:
            Unavailable: too many watches are open, another subnet needed the place of this one, or the coordinator
                stops.
        """
        with self.watches.open(node_id, policy_id, subnet or node_id) as watch:
            async with self._writing:  # a version that is being written is the first to be sent, not the one before
                head = self.ledger.head(policy_id)
                if head is not None:
                    watch.offer(head)
            while True:
                yield await watch.next()

    async def leave(self, node_id: NodeId) -> None:
        """Ends a node's lease at once and drops the edges that it reported; idempotent. Raises StorageFull."""
        member = self.membership.leave(node_id)
        self.advisor.forget(node_id)
        if member is not None:
            logger.info("node left", extra={"node": short(node_id), "node_name": member.report.name})
            await self.store.put_member(member, (), [])

    async def tidy(self) -> None:
        """Does a round of maintenance: forgets members gone for a day, recomputes the advice and trims the store.

        Raises:
            StorageFull: the store cannot write.
        """
        now_s = self.clock.now_s()
        old = self.membership.expire(now_s, KEEP_GONE_S)
        for node_id in old:
            self._evaluated.pop(node_id, None)
        changes = self._decide(now_s)
        async with self._writing:
            await self.store.forget_members(old)
            await self.store.add_advice(changes)
            await self.store.trim()

    def live_members(self) -> list[Member]:
        """The members whose lease runs now."""
        return self.membership.live(self.clock.now_s())

    def is_live_member(self, node_id: NodeId) -> bool:
        """True for a node whose lease runs now."""
        return self.membership.is_live(node_id, self.clock.now_s())

    def shown_members(self, limit: int) -> list[Member]:
        """Up to `limit` members, all live ones before those that are gone, each by name and id."""
        now_s = self.clock.now_s()
        return sorted(self.membership.all(), key=lambda member: not member.is_live(now_s))[:limit]

    def _decide(self, now_s: float) -> list[AdviceChange]:
        begun_s = self.clock.monotonic_s()
        changes = self.advisor.decide(now_s)
        self._decided_s = now_s
        self._next_after_s = max(DECIDE_EVERY_S, (self.clock.monotonic_s() - begun_s) / DECIDE_SHARE)
        for change in changes:
            logger.info("advice changed", extra={"what": change.what, "after": change.after, "reason": change.reason})
        self.advice_log.extend(changes)
        return changes

    def _new_evaluations(self, report: NodeReport, now_s: float) -> list[StoredEvaluation]:
        """Returns a row for each finite accuracy that the node's last report did not have, so a repeat adds no row."""
        known = self._evaluated.get(report.node_id, {})
        self._evaluated[report.node_id] = dict(report.evaluations)
        return [
            StoredEvaluation(at_s=now_s, node_id=report.node_id, step=report.head.step, name=name, accuracy=accuracy)
            for name, accuracy in sorted(report.evaluations.items())
            if math.isfinite(accuracy) and known.get(name) != accuracy
        ]
