"""Checks of a group's origin: producer, run, environment, lineage, age and credit, before its content is read.

Invariant: each check costs a look-up or two, and a group that is refused here used up no quota of its producer, since
anybody can send a producer's old groups again.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from swarm.exchange.checks.admission_limits import AdmissionLimits, Finding
from swarm.exchange.known_versions import KnownVersions
from swarm.exchange.staleness import check_freshness
from swarm.node_context import NodeContext
from swarm.peers.entry import EntryRule
from swarm.peers.peer_table import Peers
from swarm.peers.reputation import Reputation
from swarm.types import NodeId, RefusalReason, RolloutGroup, short
from swarm.weight_sync.credit import CreditLedger


@dataclass(eq=False, repr=False)
class OriginChecks:
    """Checks of a group's origin; one per node."""

    _context: NodeContext
    _entry: EntryRule | None  # admits nodes to the run; None admits everybody
    _reputation: Reputation
    _environments: frozenset[str]  # names that this node can rebuild
    _peers: Peers  # the newest head known of each lineage, our own included
    _versions: KnownVersions
    _credit_ledger: CreditLedger | None  # credit of our own lineage; None: everybody may send groups of it

    def __post_init__(self) -> None:
        self._node_id = self._context.node_id
        self._limits = AdmissionLimits.from_config(self._context.config)
        self._num_judged = Counter[NodeId]()  # groups of our lineage under admission, by producer

    def check(self, group: RolloutGroup, via: NodeId) -> Finding:
        """Returns the first fault in the origin of a group that the peer `via` sent; None without one."""
        return (
            self._producer_is_not_us(group)
            or self._producer_entry(group)
            or self._producer_reputation(group)
            or self._run(group)
            or self._environment(group)
            or self._own_policy_has_followers(group)
            or self._freshness(group)
            or self._versions.check(group)
            or self._credit(group)
            or self._producer_quota(group, via)  # after freshness: anybody can replay its old groups
        )

    @contextmanager
    def counting_against_credit(self, group: RolloutGroup) -> Generator[None, None, None]:
        """Counts a group of our lineage while it is judged, so that several at once cannot use the credit for one."""
        if group.policy_id != self._node_id:
            yield
            return
        producer = group.producer
        self._num_judged[producer] += 1
        try:
            yield
        finally:
            self._num_judged[producer] -= 1
            if not self._num_judged[producer]:
                del self._num_judged[producer]

    def _producer_is_not_us(self, group: RolloutGroup) -> Finding:
        return (RefusalReason.DUPLICATE, "our own group") if group.producer == self._node_id else None

    def _producer_entry(self, group: RolloutGroup) -> Finding:
        """Checks that the producer may take part in the run: no peer may relay groups of a node that may not."""
        if self._entry is None or self._entry.is_admitted(group.producer):
            return None
        return RefusalReason.NO_ENTRY, f"producer {short(group.producer)} has shown nothing that lets it into the run"

    def _producer_reputation(self, group: RolloutGroup) -> Finding:
        if not self._reputation.is_allowed(group.producer):
            return RefusalReason.LOW_REPUTATION, f"producer {short(group.producer)} is below the floor"
        return None

    def _producer_quota(self, group: RolloutGroup, via: NodeId) -> Finding:
        """Charges a relayed group to the quota of its producer, in addition to that of the sender."""
        if group.producer != via and not self._reputation.try_take(group.producer):
            return RefusalReason.OVER_QUOTA, f"producer {short(group.producer)} used up its quota"
        return None

    def _run(self, group: RolloutGroup) -> Finding:
        is_ours = group.run_id == self._context.config.run_id
        return None if is_ours else (RefusalReason.WRONG_RUN, "a group of another run")

    def _environment(self, group: RolloutGroup) -> Finding:
        if group.env not in self._environments or group.env in self._limits.own_environments:
            return RefusalReason.UNKNOWN_ENVIRONMENT, "an environment this node does not have, or not with others"
        believed = self._limits.believed_from.get(group.env)
        if believed is not None and group.producer not in believed:
            return RefusalReason.NOT_BELIEVED, f"{short(group.producer)} is not in scored_from of {group.env}"
        return None

    def _own_policy_has_followers(self, group: RolloutGroup) -> Finding:
        if group.policy_id == self._node_id and not self._limits.has_followers:
            return RefusalReason.BAD_VERSION, "our own policy, whose weights nobody else has"
        return None

    def _freshness(self, group: RolloutGroup) -> Finding:
        head, now_s = self._peers.head_of(group.policy_id), self._context.clock.now_s()
        is_own_policy = group.policy_id == self._node_id
        return check_freshness(group, head, now_s, self._limits, is_own_policy=is_own_policy)

    def _credit(self, group: RolloutGroup) -> Finding:
        """Checks that a group of our own lineage has credit, so that no follower crowds out the others."""
        if self._credit_ledger is None or group.policy_id != self._node_id:
            return None
        if self._credit_ledger.is_expected(group.producer, self._num_judged[group.producer]):
            return None
        return RefusalReason.NO_CREDIT, "more than its producer was given credit for"
