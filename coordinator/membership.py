"""Membership of the run: leases that nodes renew by heartbeats, as pure state; time is passed in.

Invariant: the table is bounded, and so are the members of a subnet. A live member makes room only for a new member
whose subnet has at least two members fewer.
"""

from dataclasses import dataclass, replace
from typing import Final

from swarm.errors import Unavailable
from swarm.fairness import FairTable
from swarm.types import NodeId, NodeReport

MAX_MEMBERS: Final = 10_000
MEMBERS_PER_SUBNET: Final = 1_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """One node, live or gone, with the last report that it sent."""

    report: NodeReport
    joined_s: float  # wall clock, start of the present lease chain
    last_seen_s: float  # wall clock of the last heartbeat
    expires_s: float  # wall clock; the lease ends here
    has_left: bool = False  # True if the node ended the lease itself
    subnet: str = ""  # of the last report; empty if unknown: then the node is a party by itself

    @property
    def node_id(self) -> NodeId:
        return self.report.node_id

    @property
    def party(self) -> str:
        """Party under which the member is counted: its subnet, or its id if the subnet is unknown."""
        return self.subnet or self.node_id

    def is_live(self, now_s: float) -> bool:
        """True while the lease runs."""
        return not self.has_left and now_s < self.expires_s


class Membership:
    """The leases of one run.

    Example:
        membership = Membership(lease_s=30.0)
        membership.renew(report, now_s=clock.now_s())
    """

    def __init__(self, lease_s: float, max_members: int = MAX_MEMBERS, per_subnet: int = MEMBERS_PER_SUBNET) -> None:
        self.lease_s = lease_s
        self._max_members = max_members
        self._per_subnet = per_subnet
        self._of_party = FairTable[str, NodeId]()
        self._dropped: list[NodeId] = []  # made room; the store still has them
        self._members: dict[NodeId, Member] = {}  # the longest unseen first

    def renew(self, report: NodeReport, now_s: float, subnet: str = "") -> tuple[Member, bool]:
        """Registers a node or renews its lease (heartbeat liveness).

        Returns:
            The member, and True if this call made it live: it is new, or was gone.

        Raises:
            Unavailable: the subnet has its maximum of members and all are live, or the table is full of live members
                and no subnet has at least two more than this one.
        """
        known, party = self._members.get(report.node_id), subnet or report.node_id
        has_joined = known is None or not known.is_live(now_s)
        if known is None or known.party != party:  # a member that moved takes a place in its new subnet
            self._make_room(now_s, party, is_new=known is None)
        member = Member(
            report=report,
            joined_s=now_s if known is None or has_joined else known.joined_s,
            last_seen_s=now_s,
            expires_s=now_s + self.lease_s,
            subnet=subnet,
        )
        self._put(member)
        return member, has_joined

    def leave(self, node_id: NodeId) -> Member | None:
        """Ends a lease at once; returns the member as it is now, or None for an unknown node. Idempotent."""
        known = self._members.get(node_id)
        if known is not None:
            known = self._members[node_id] = replace(known, has_left=True)
        return known

    def expire(self, now_s: float, keep_s: float) -> list[NodeId]:
        """Drops members that are not live and sent no heartbeat for `keep_s` seconds.

        Returns:
            Ids of these members, and of the members that made room since the last call and have not come back.
        """
        old = [m.node_id for m in self._members.values() if not m.is_live(now_s) and now_s - m.last_seen_s >= keep_s]
        for node_id in old:
            self._drop(node_id)
        old += [node_id for node_id in self._dropped if node_id not in self._members]
        self._dropped.clear()
        return old

    def restore(self, members: list[Member]) -> None:
        """Adds stored members, replacing those of the same id; beyond the table's bound only the last seen are kept."""
        for member in sorted(members, key=lambda member: member.last_seen_s)[-self._max_members :]:
            self._put(member)

    def all(self) -> list[Member]:
        """Every known member, sorted by name, then id."""
        return sorted(self._members.values(), key=lambda member: (member.report.name, member.node_id))

    def is_live(self, node_id: NodeId, now_s: float) -> bool:
        """True for a known node whose lease runs."""
        known = self._members.get(node_id)
        return known is not None and known.is_live(now_s)

    def live(self, now_s: float) -> list[Member]:
        """The members whose lease runs, sorted by name, then id."""
        return [member for member in self.all() if member.is_live(now_s)]

    def _put(self, member: Member) -> None:
        self._drop(member.node_id)
        self._members[member.node_id] = member
        self._of_party.add(member.party, member.node_id)

    def _drop(self, node_id: NodeId) -> None:
        member = self._members.pop(node_id, None)
        if member is not None:
            self._of_party.remove(member.party, node_id)

    def _make_room(self, now_s: float, party: str, is_new: bool) -> None:
        """Drops a member if this party is full, or the table for a new one. Raises Unavailable if no member may go.

        The longest gone member goes, of this party if that is full; else the newest live member of the largest party.
        """
        num_own = len(self._of_party.of(party))
        is_own_full = num_own >= self._per_subnet
        if not is_own_full and (not is_new or len(self._members) < self._max_members):
            return
        gone = (m for m in self._members.values() if not m.is_live(now_s) and (not is_own_full or m.party == party))
        dropped = next(gone, None)
        if dropped is None and is_own_full:
            raise Unavailable(f"{num_own} live members are of {party}; no room for another")
        if dropped is None:
            most = self._of_party.longest(beside=party)
            if most is None:
                raise Unavailable(f"the run has {self._max_members} live members; no room for another")
            dropped = max(map(self._members.__getitem__, self._of_party.of(most)), key=lambda m: m.joined_s)
        self._drop(dropped.node_id)
        self._dropped.append(dropped.node_id)
