"""Where a group comes from: producer, run, environment, lineage, age and credit, before its content is read.

Invariant: what is decided here costs a look-up or two, and a group that is refused here used up no quota of its
producer, since anybody can send its old groups again.
"""

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

from swarm.clock import Clock
from swarm.exchange.admission_checks import AdmissionLimits
from swarm.exchange.episode_checks import Finding
from swarm.exchange.known_versions import KnownVersions
from swarm.exchange.staleness import check_freshness
from swarm.peers.entry import EntryRule
from swarm.peers.peer_table import Peers
from swarm.peers.reputation import Reputation
from swarm.types import NodeId, RefusalReason, RolloutGroup, short
from swarm.weight_sync.credit import CreditLedger


@dataclass(eq=False, kw_only=True, repr=False)
class OriginChecks:
    """The checks of a group's origin; see `Admission` for what each part is."""

    node_id: NodeId
    run_id: str
    clock: Clock
    limits: AdmissionLimits
    entry: EntryRule | None
    reputation: Reputation
    environments: frozenset[str]
    peers: Peers
    versions: KnownVersions
    credit_ledger: CreditLedger | None
    _num_judged: Counter[NodeId] = field(default_factory=Counter[NodeId])  # of our lineage, with credit, by producer

    def check(self, group: RolloutGroup, via: NodeId) -> Finding:
        """What is wrong with the origin of a group that a peer sent."""
        return (
            self._producer_is_not_us(group)
            or self._producer_entry(group)
            or self._producer_reputation(group)
            or self._run(group)
            or self._environment(group)
            or self._own_policy_has_followers(group)
            or self._freshness(group)
            or self.versions.check(group)
            or self._credit(group)
            or self._producer_quota(group, via)  # after freshness: old groups of it are anybody's to replay
        )

    @contextmanager
    def counting_against_credit(self, group: RolloutGroup) -> Generator[None, None, None]:
        """Counts a group of our lineage until its end, so that many at a time cannot pass on credit for one."""
        if group.policy_id != self.node_id:
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
        return (RefusalReason.DUPLICATE, "our own group") if group.producer == self.node_id else None

    def _producer_entry(self, group: RolloutGroup) -> Finding:
        """A peer that was let in relays nothing of those who were not."""
        if self.entry is None or self.entry.is_admitted(group.producer):
            return None
        return RefusalReason.NO_ENTRY, f"producer {short(group.producer)} has shown nothing that lets it into the run"

    def _producer_reputation(self, group: RolloutGroup) -> Finding:
        if not self.reputation.is_allowed(group.producer):
            return RefusalReason.LOW_REPUTATION, f"producer {short(group.producer)} is below the floor"
        return None

    def _producer_quota(self, group: RolloutGroup, via: NodeId) -> Finding:
        """Groups that others relay count against their producer, too."""
        if group.producer != via and not self.reputation.try_take(group.producer):
            return RefusalReason.OVER_QUOTA, f"producer {short(group.producer)} used up its quota"
        return None

    def _run(self, group: RolloutGroup) -> Finding:
        return (RefusalReason.WRONG_RUN, "a group of another run") if group.run_id != self.run_id else None

    def _environment(self, group: RolloutGroup) -> Finding:
        if group.env not in self.environments or group.env in self.limits.own_environments:
            return RefusalReason.UNKNOWN_ENVIRONMENT, "an environment this node does not have, or not with others"
        believed = self.limits.believed_from.get(group.env)
        if believed is not None and group.producer not in believed:
            return RefusalReason.NOT_BELIEVED, f"{short(group.producer)} is not in scored_from of {group.env}"
        return None

    def _own_policy_has_followers(self, group: RolloutGroup) -> Finding:
        if group.policy_id == self.node_id and not self.limits.has_followers:
            return RefusalReason.BAD_VERSION, "our own policy, whose weights nobody else has"
        return None

    def _freshness(self, group: RolloutGroup) -> Finding:
        head = self.peers.head_of(group.policy_id)
        is_own_policy = group.policy_id == self.node_id
        now_s = self.clock.now_s()
        return check_freshness(group, head, now_s, self.limits, is_own_policy=is_own_policy)

    def _credit(self, group: RolloutGroup) -> Finding:
        """Of our own lineage only as much as was granted, so that no follower crowds out the others."""
        if self.credit_ledger is None or group.policy_id != self.node_id:
            return None
        if self.credit_ledger.is_expected(group.producer, self._num_judged[group.producer]):
            return None
        return RefusalReason.NO_CREDIT, "more than its producer was given credit for"
