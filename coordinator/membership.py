"""Membership of the run: leases that nodes renew by heartbeats, as pure state; time is passed in.

Invariant: the table is bounded, a live member is never evicted, and only its own node id renews a lease.
"""

from dataclasses import dataclass, replace
from typing import Final

from swarm.errors import Unavailable
from swarm.types import NodeId, NodeReport

MAX_MEMBERS: Final = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One node, alive or gone, with the last figures that it reported."""

    report: NodeReport
    joined_s: float  # wall clock, start of the present lease chain
    last_seen_s: float  # wall clock of the last heartbeat
    expires_s: float  # wall clock; the lease ends here
    has_left: bool = False  # it ended the lease itself

    @property
    def node_id(self) -> NodeId:
        return self.report.node_id

    def is_live(self, now_s: float) -> bool:
        """True while the lease runs."""
        return not self.has_left and now_s < self.expires_s


class Membership:
    """The leases of one run.

    Example:
        membership = Membership(lease_s=30.0)
        membership.renew(report, now_s=clock.now_s())
    """

    def __init__(self, lease_s: float, max_members: int = MAX_MEMBERS) -> None:
        self.lease_s = lease_s
        self._max_members = max_members
        self._members: dict[NodeId, Member] = {}  # the longest unseen first

    def renew(self, report: NodeReport, now_s: float) -> tuple[Member, bool]:
        """Registers a node or renews its lease (heartbeat liveness).

        Returns:
            The member, and whether it joined (is new, or was gone) with this call.

        Raises:
            Unavailable: the table is full of live members.
        """
        known = self._members.get(report.node_id)
        has_joined = known is None or not known.is_live(now_s)
        if known is None:
            self._make_room(now_s)
        member = Member(
            report=report,
            joined_s=now_s if known is None or has_joined else known.joined_s,
            last_seen_s=now_s,
            expires_s=now_s + self.lease_s,
        )
        self._put(member)
        return member, has_joined

    def leave(self, node_id: NodeId) -> Member | None:
        """Ends a lease at once; returns the member as it is now, None for an unknown node. Idempotent."""
        known = self._members.get(node_id)
        if known is not None:
            known = self._members[node_id] = replace(known, has_left=True)
        return known

    def expire(self, now_s: float, keep_s: float) -> list[NodeId]:
        """Forgets members that were gone for `keep_s` seconds; returns their ids."""
        old = [m.node_id for m in self._members.values() if not m.is_live(now_s) and now_s - m.last_seen_s >= keep_s]
        for node_id in old:
            del self._members[node_id]
        return old

    def restore(self, members: list[Member]) -> None:
        """Takes over stored members, replacing those that are there."""
        for member in sorted(members, key=lambda member: member.last_seen_s)[-self._max_members :]:
            self._put(member)

    def all(self) -> list[Member]:
        """Every known member by name, then id."""
        return sorted(self._members.values(), key=lambda member: (member.report.name, member.node_id))

    def is_live(self, node_id: NodeId, now_s: float) -> bool:
        """Whether a node is known and its lease runs."""
        known = self._members.get(node_id)
        return known is not None and known.is_live(now_s)

    def live(self, now_s: float) -> list[Member]:
        """Those whose lease runs."""
        return [member for member in self.all() if member.is_live(now_s)]

    def _put(self, member: Member) -> None:
        self._members.pop(member.node_id, None)
        self._members[member.node_id] = member

    def _make_room(self, now_s: float) -> None:
        if len(self._members) < self._max_members:
            return
        gone = next((m for m in self._members.values() if not m.is_live(now_s)), None)
        if gone is None:
            raise Unavailable(f"the run has {self._max_members} live members; no room for another")
        del self._members[gone.node_id]
