"""Entry rule: the nodes that may take part in a run, by its configuration or manifest, and the voucher of each node.

Invariant: one rule judges at Hello, in directory records and for producers of relayed groups; its tables are bounded,
and strangers cost a bounded number of expensive checks a second.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

from swarm.clock import Clock
from swarm.config import EntryConfig
from swarm.errors import Unauthenticated, Unavailable
from swarm.flow import BoundedTable, TokenBucket
from swarm.types import NodeId, short
from swarm.wire.credentials import (
    Credential,
    credential_from_bytes,
    fits_invitation,
    fits_work,
    is_current,
    work_ends_s,
)

MAX_REMEMBERED: Final = 16_384  # nodes whose credential was good
MAX_INVITED: Final = 256  # of one member, at a time; the coordinator may invite any number
MAX_REFUSED: Final = 4_096  # credentials that never will be, by digest
WORK_CHECKS_PER_S: Final = 20.0  # 2 ms each: 4 % of one core at most
INVITATION_CHECKS_PER_S: Final = 200.0  # 0.1 ms each
MAX_IN_OWN_FILE: Final = 256  # proofs of work that are checked at a start: more than the file of known peers holds


@dataclass(frozen=True, slots=True)
class _NotGood:
    reason: str
    is_final: bool = True  # False: at another time it may be good, or this clock be right


@dataclass(frozen=True, slots=True)
class _Admitted:
    mark: bytes  # digest of node and credential
    until_s: float  # wall clock
    voucher: NodeId | None  # None: proof of work


class _Checks:
    """Limits on the checks of strangers' credentials in one place, so that no flood of keys costs more."""

    def __init__(self, now_s: float, num_proofs: float = WORK_CHECKS_PER_S) -> None:
        """Starts with full limits, with which `num_proofs` proofs of work may be checked at once."""
        self.work = TokenBucket(WORK_CHECKS_PER_S, num_proofs, now_s)
        self.invitations = TokenBucket(INVITATION_CHECKS_PER_S, INVITATION_CHECKS_PER_S, now_s)


class EntryRule:
    """The entry rule of one run at one node or coordinator.

    Example:
        rule = EntryRule(config.entry, config.run_id, clock, coordinator=config.coordinator.fingerprint)
        rule.require(node_id, hello.credential)  # raises where it is refused
    """

    def __init__(self, config: EntryConfig, run_id: str, clock: Clock, coordinator: NodeId = "") -> None:
        """Creates a rule that has seen no credential yet.

        Args:
            coordinator: node id of the run's coordinator, which may invite too; "" if there is none.
        """
        self._run_id, self._clock, self._coordinator = run_id, clock, coordinator
        self._admitted = BoundedTable[NodeId, _Admitted](MAX_REMEMBERED)
        self._refused = BoundedTable[bytes, str](MAX_REFUSED)  # digest of node and credential -> reason
        # Records come in any number for free, sessions at a bounded rate from each subnet: neither starves the other.
        self._of_sessions, self._of_records = _Checks(clock.monotonic_s()), _Checks(clock.monotonic_s())
        self._of_own_file = _Checks(clock.monotonic_s(), MAX_IN_OWN_FILE)
        self._invited_by: dict[NodeId, dict[NodeId, float]] = {}  # of each member: whom it invited, and until when
        self.num_refused = 0
        self.config = config
        self.update(config)

    def update(self, config: EntryConfig, coordinator: NodeId = "") -> None:
        """Applies the configuration of a newer manifest, and its coordinator unless that is "".

        Invited nodes stay while their voucher may invite; proofs of work are forgotten if more bits are asked for now.
        """
        if config.work_bits > self.config.work_bits:
            for node_id in [node_id for node_id, known in self._admitted.items() if known.voucher is None]:
                del self._admitted[node_id]
        self.config, self._coordinator = config, coordinator or self._coordinator
        self._members, self._denied = frozenset(config.members), frozenset(config.denied)
        self._refused.clear()

    def fresh(self) -> "EntryRule":
        """A new rule with the same settings, which has seen no credential yet."""
        return EntryRule(self.config, self._run_id, self._clock, self._coordinator)

    def is_member(self, node_id: NodeId) -> bool:
        """True if a node takes part in its own right: it is listed, or has shown the coordinator's invitation."""
        if node_id in self._denied:
            return False
        known = self._known(node_id)
        return node_id in self._members or (known is not None and known.voucher == self._coordinator != "")

    def voucher_of(self, node_id: NodeId) -> NodeId | None:
        """Id of the member that invited a node, by an invitation shown here; None for members and for all other nodes.

        The first invitation shown holds until it ends: a node with several cannot change its voucher at will.
        """
        known = self._known(node_id)
        return None if known is None or self.is_member(node_id) else known.voucher

    def is_admitted(self, node_id: NodeId) -> bool:
        """True if a node may take part by its entry in the list, or by a credential that it showed here before."""
        if node_id in self._denied:
            return False
        return self.config.kind == "open" or node_id in self._members or self._known(node_id) is not None

    def is_denied(self, node_id: NodeId) -> bool:
        """True if a node is known not to belong here, even if it was admitted before the newest manifest."""
        if node_id in self._denied:
            return True
        if self.config.kind == "open" or node_id in self._members:
            return False
        known = self._admitted.get(node_id)
        return self.config.kind == "members" or (
            known is not None and known.voucher is not None and not self._may_invite(known.voucher)
        )

    def require(self, node_id: NodeId, data: bytes) -> None:
        """Judges the credential of a node that has proved its key on this connection.

        Raises:
            Unauthenticated: the node may not take part; the message names the fix.
            Unavailable: the credential cannot be checked just now, or its voucher answers for the most nodes allowed.
        """
        reason = self._judge(node_id, data, self._of_sessions)
        if reason:
            self.num_refused += 1
            raise Unauthenticated(reason)

    def admits(self, node_id: NodeId, data: bytes) -> bool:
        """True if a node may take part with the credential in its advert; also False if that cannot be checked now."""
        return self._admits(node_id, data, self._of_records)

    def readmits(self, node_id: NodeId, data: bytes) -> bool:
        """As `admits`, for the nodes in our own file, whose checks have their own limit: no stranger uses it up."""
        return self._admits(node_id, data, self._of_own_file)

    def _admits(self, node_id: NodeId, data: bytes, checks: _Checks) -> bool:
        try:
            is_admitted = not self._judge(node_id, data, checks)
        except Unavailable:
            return False
        self.num_refused += not is_admitted
        return is_admitted

    def _known(self, node_id: NodeId) -> _Admitted | None:
        known = self._admitted.get(node_id)
        if known is None or known.until_s <= self._clock.now_s() or node_id in self._denied:
            return None
        return known if known.voucher is None or self._may_invite(known.voucher) else None

    def _may_invite(self, voucher: NodeId) -> bool:
        return (voucher in self._members or voucher == self._coordinator) and voucher not in self._denied

    def _judge(self, node_id: NodeId, data: bytes, checks: _Checks) -> str:
        """Reason why a node may not take part; "" if it may. Raises Unavailable if that cannot be checked now."""
        if node_id in self._denied:
            return f"run {self._run_id} denies node {short(node_id)} (entry.denied); ask its operator"
        if node_id in self._members:
            return ""
        if self.config.kind == "members":
            return f"run {self._run_id} admits listed nodes only; ask its operator to list {node_id}"
        if self.config.kind == "open" and not data:
            return ""
        known, mark = self._known(node_id), hashlib.sha256(node_id.encode() + data).digest()
        if known is not None and (known.voucher is not None or known.mark == mark):
            return ""
        reason = self._refused.get(mark)
        is_needed = known is None and self.config.kind != "open"
        if reason is None:
            try:
                found = self._check(node_id, credential_from_bytes(data), checks)
            except Unavailable:
                if is_needed:
                    raise
                return ""  # it is looked at again the next time
            if not isinstance(found, _NotGood):
                self._admitted[node_id] = _Admitted(mark, *found)
                return ""
            reason = found.reason
            if found.is_final:
                self._refused[mark] = reason
        return reason if is_needed else ""

    def _check(
        self, node_id: NodeId, shown: Credential | None, checks: _Checks
    ) -> tuple[float, NodeId | None] | _NotGood:
        """Wall-clock end of a credential and its voucher (None: proof of work), or the reason why it is not good.

        Raises:
            Unavailable: too many credentials are checked just now, or the voucher answers for the most nodes allowed.
        """
        now_s, monotonic_s = self._clock.now_s(), self._clock.monotonic_s()
        if shown is None:
            return _NotGood(f"the credential is malformed; {_fix(node_id)}")
        is_final, reason = True, f"run {self._run_id} admits invited nodes only; {_fix(node_id)}"
        if shown.invitation is not None:
            given, voucher = shown.invitation, shown.invitation.voucher
            if not self._may_invite(voucher):
                reason = f"{short(voucher)}, who signed the invitation, is no member; {_fix(node_id)}"
            elif given.expires_at_s <= now_s:
                is_final, reason = False, f"the invitation has expired; {_fix(node_id)}"
            elif not checks.invitations.try_take(monotonic_s):
                raise Unavailable("too many strangers show invitations; try again later")
            elif not fits_invitation(given, self._run_id, node_id):
                reason = f"the invitation is not for this node and run; {_fix(node_id)}"
            elif self._has_place(voucher, node_id, float(given.expires_at_s)):
                return float(given.expires_at_s), voucher
            elif shown.work is None:
                raise Unavailable(f"{short(voucher)} answers for {MAX_INVITED} nodes now, the most; {_fix(node_id)}")
        if self.config.kind != "work":
            return _NotGood(reason, is_final)
        if shown.work is None:
            reason = f"run {self._run_id} asks for a proof of work: join it again, the node makes one"
            return _NotGood(reason, is_final)
        if not is_current(shown.work, now_s):
            reason = "the proof of work is of another month: start the node again, it makes a new one"
            return _NotGood(reason, is_final=False)
        if not checks.work.try_take(monotonic_s):
            raise Unavailable("too many strangers show proofs of work; try again later")
        if not fits_work(shown.work, self._run_id, node_id, self.config.work_bits):
            reason = "the proof of work is not for this node and run: delete its work.json, and start it again"
            return _NotGood(reason, is_final)
        return work_ends_s(shown.work), None

    def _has_place(self, voucher: NodeId, node_id: NodeId, until_s: float) -> bool:
        """Reserves one of a voucher's places for a node; False if all are taken. The coordinator has no bound."""
        if voucher == self._coordinator:
            return True
        invited = self._invited_by.setdefault(voucher, {})
        if node_id not in invited and len(invited) >= MAX_INVITED:
            now_s = self._clock.now_s()
            invited = self._invited_by[voucher] = {
                node_id: end_s for node_id, end_s in invited.items() if end_s > now_s
            }
        if node_id not in invited and len(invited) >= MAX_INVITED:
            return False
        invited[node_id] = until_s
        return True


def _fix(node_id: NodeId) -> str:
    return f"ask a member for an invitation: swarm-node invite {node_id}"
