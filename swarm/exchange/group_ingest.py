"""Intake of groups from peers: choice, admission, and hand-over to the learner and to other peers.

Invariant: a group of another node reaches the learner and other peers only after it was admitted and stored.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from swarm.errors import Unavailable
from swarm.events import GroupAdmitted, GroupRefused
from swarm.exchange.admission import Admission
from swarm.exchange.group_stream import GroupStreams
from swarm.exchange.novelty import Novelty
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.flow import BoundedTable
from swarm.node_context import NodeContext
from swarm.peers.parties import Parties
from swarm.peers.peer_table import MAX_PEERS, Peers
from swarm.peers.quotas import IntakeQuota, stream_quota
from swarm.peers.reputation import UNPROVEN, Reputation
from swarm.trust_policy import SHARE
from swarm.types import Correction, Digest, NodeId, RefusalReason, Refused, Role, ScoredGroup, SealedGroup, short
from swarm.weight_sync.credit import CreditLedger

logger = logging.getLogger(__name__)

_NOT_COUNTED = {RefusalReason.DUPLICATE, RefusalReason.NO_CREDIT}  # refusals that use up no credit
# refusals of groups whose signature may not have been checked: their producer is only a claim of the sender
_UNSIGNED = UNPROVEN | {RefusalReason.DUPLICATE, RefusalReason.LOW_REPUTATION, RefusalReason.OVER_QUOTA}

MAX_DETAIL: Final = 200  # characters of a refusal's detail, which may quote its producer
STRAY_PAUSE_S: Final = 10.0  # time for which a follower that sent another lineage's group counts as any peer


Fetch = dict[NodeId, Callable[[], None]]  # one fetch of a group: other announcers, and how each queues it again


class FetchQueue:
    """Announced groups that are being fetched, each with the other neighbours that announced it too.

    Invariant: another neighbour fetches a group only if the fetch from the first one failed or takes long.

    Example:
        if not queue.announce(digest, neighbour, fetch_later):
            fetch = queue.begin(digest)  # this neighbour fetches the group, and `settle` or `pass_on` follows
    """

    def __init__(self) -> None:
        self._fetches: dict[Digest, Fetch] = {}

    def __len__(self) -> int:
        return len(self._fetches)

    def announce(self, digest: Digest, neighbour: NodeId, fetch_later: Callable[[], None]) -> bool:
        """True if the group is being fetched already; `pass_on` of that fetch then calls `fetch_later`."""
        fetch = self._fetches.get(digest)
        if fetch is not None:
            fetch.setdefault(neighbour, fetch_later)
        return fetch is not None

    def begin(self, digest: Digest) -> Fetch:
        """Begins a fetch of the group, and returns it for `settle` and `pass_on`."""
        fetch = self._fetches[digest] = {}
        return fetch

    def settle(self, digest: Digest, fetch: Fetch) -> None:
        """Ends a fetch whose group was judged, and forgets its other announcers."""
        if self._fetches.get(digest) is fetch:
            del self._fetches[digest]

    def pass_on(self, digest: Digest, fetch: Fetch) -> None:
        """Ends a fetch that failed or takes long: the other announcers, and later ones, may fetch the group."""
        if self._fetches.get(digest) is fetch:
            del self._fetches[digest]
            for fetch_later in fetch.values():
                fetch_later()


@dataclass(eq=False, repr=False)
class GroupIngest:
    """Intake of groups from peers; `GroupStreams` is the other direction."""

    _context: NodeContext
    _admission: Admission
    _intake_quota: IntakeQuota  # bounds the groups from neighbours by what draws use up
    _peers: Peers  # learns heads from admitted groups
    _reputation: Reputation  # a peer that falls below the floor loses its streams at once
    _parties: Parties  # newcomers share a small part of the intake
    _credit_ledger: CreditLedger  # records the groups of our own lineage that followers deliver
    _replay: ReplayBuffer  # takes admitted groups for the learner of this node
    _streams: GroupStreams  # offers admitted groups to peers
    _novelty: Novelty  # measures the bits of answers of our own policy
    _learns: bool  # False on a node that follows another node's versions: it uses up no groups

    def __post_init__(self) -> None:
        self.fetching = FetchQueue()
        self.refusals: dict[RefusalReason, int] = {}
        self.newest_refusals: dict[RefusalReason, tuple[NodeId, str]] = {}  # producer and detail
        self.num_admitted = 0  # since the process started
        self.bytes_received = 0  # since the process started: sealed groups from peers, useful or not
        self._strayed_s = BoundedTable[NodeId, float](MAX_PEERS)  # time of a follower's newest group without credit
        self._stream_quota = stream_quota()

    def count_item(self, peer: NodeId) -> None:
        """Counts one item of a neighbour's stream, useful or not. Raises Unavailable above `stream_quota`."""
        if not self._stream_quota.try_take(peer, self._context.clock.monotonic_s()):
            refused = self._admission.refuse_items(peer)
            self._note_refused(refused, via=peer)
            raise Unavailable(refused.detail)

    def is_wanted_from(self, peer: NodeId) -> bool:
        """True if this node takes one more group from a neighbour; ask once for each group, as it uses up quota.

        Every group made with our credit is taken; a node that neither learns nor relays takes no others.
        """
        if self._may_bring_ours(peer):
            return True
        if not self._learns and Role.RELAY not in self._context.config.roles:
            return False
        is_established = self._parties.is_established(peer)
        num_alike = sum(self._parties.is_established(other) == is_established for other in self._peers.connected)
        num_new = self._replay.num_external_of_newcomers
        num_held = self._replay.num_external - num_new if is_established else num_new
        share = 1.0 if is_established else 1 / SHARE
        return self._intake_quota.try_take(peer, max(1, num_alike), num_held, share)

    async def receive(self, sealed: SealedGroup, via: NodeId) -> ScoredGroup | Refused:
        """Admits a group of another node and hands it to learner and peers; returns the scored group or the refusal."""
        self.bytes_received += sealed.size_bytes
        with self._streams.admitting(sealed.digest):
            result = await self._admission.admit(sealed, via)
            if isinstance(result, ScoredGroup):
                await self._streams.read_head()
        if isinstance(result, Refused):
            self._note_refused(result, via)
        else:
            self._note_admitted(result, via)
        return result

    # --- inside --------------------------------------------------------------------------------------

    def _may_bring_ours(self, peer: NodeId) -> bool:
        """True if a group of this peer probably uses credit of our lineage; only admission can see the lineage."""
        if peer not in self._credit_ledger.followers or not self._credit_ledger.is_expected(peer, 0):
            return False
        strayed_s = self._strayed_s.get(peer)
        return strayed_s is None or self._context.clock.monotonic_s() >= strayed_s + STRAY_PAUSE_S

    def _note_admitted(self, scored: ScoredGroup, via: NodeId) -> None:
        self.num_admitted += 1
        self._peers.learn_head(scored.group)
        is_held = self._learns and self._replay.add(scored)
        self._streams.offer(scored, via)
        self._context.changed.fire()
        if scored.is_own_policy(self._context.node_id):
            # after it was added: the room that it takes is not granted again
            is_established = self._parties.is_established(scored.group.producer)
            has_logprobs = scored.correction is Correction.EXACT
            is_useful = (is_held or self._parties.is_private) and (has_logprobs or not is_established)
            self._credit_ledger.record_logprobs(scored.group.producer, has_logprobs)
            self._arrived(scored.group.producer, is_admitted=True, is_useful=is_useful)
            if is_established:
                self._novelty.measure_follower(scored.group, self._parties.party_of(scored.group.producer))
        elif via in self._credit_ledger.followers:
            self._strayed_s[via] = self._context.clock.monotonic_s()
        self._context.emit(GroupAdmitted.of(scored, via, self._context.clock.now_s()))

    def _note_refused(self, refused: Refused, via: NodeId) -> None:
        reason = refused.reason
        producer = via if reason in _UNSIGNED else refused.producer or via
        self.refusals[reason] = self.refusals.get(reason, 0) + 1
        detail = "".join(c if c.isprintable() else "?" for c in refused.detail[:MAX_DETAIL])  # shown on terminals
        self.newest_refusals[reason] = producer, detail
        digest = refused.digest.hex() if refused.digest else ""
        self._context.emit(GroupRefused(reason=str(reason), producer=producer, via=via, digest=digest))
        level = logging.INFO if self.refusals[reason] == 1 else logging.DEBUG  # the first one of each reason
        fields = {"reason": str(reason), "detail": refused.detail, "producer": short(producer), "via": short(via)}
        logger.log(level, "group refused", extra=fields)
        if reason is not RefusalReason.LOW_REPUTATION and not all(map(self._reputation.is_allowed, (via, producer))):
            self._streams.wake()  # one of them just fell below the floor: its streams end at once
            self._context.changed.fire()
        if self._is_arrival(refused, via):
            self._arrived(producer, is_admitted=False)

    def _is_arrival(self, refused: Refused, via: NodeId) -> bool:
        """True if a refused group used up credit: its producer sent it, and made it for its current stream."""
        if refused.producer is None or refused.producer != via or refused.reason in _NOT_COUNTED:
            return False
        made_at_s = refused.created_at_s if refused.reason is RefusalReason.TOO_OLD else None
        return made_at_s is None or not self._credit_ledger.predates_stream(refused.producer, made_at_s)

    def _arrived(self, producer: NodeId, *, is_admitted: bool, is_useful: bool = False) -> None:
        """Records that a group arrived under this follower's credit, admitted or refused."""
        self._credit_ledger.record_delivery(producer, is_admitted=is_admitted, is_useful=is_useful)
        self._context.changed.fire()
