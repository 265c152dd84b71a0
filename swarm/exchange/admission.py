"""Admission: a sealed group from a peer becomes a scored and stored one, or a counted refusal.

Invariant: nothing that a peer sent reaches buffer, learner or relay except through `Admission.admit`, whose result
carries rewards computed on this node. Checks run from cheap to expensive, and concurrency is bounded.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from swarm.environments.sandbox.time_accounts import Allowance, TimeAccounts
from swarm.errors import OverBudget, RolloutFailed, StorageFull, TooLarge
from swarm.exchange.admission_checks import AdmissionLimits, check_form
from swarm.exchange.episode_checks import Finding, check_num_turns
from swarm.exchange.group_form import GroupForm, read_group, timed
from swarm.exchange.known_versions import KnownVersions
from swarm.exchange.novelty import MIN_BITS, Novelty, keep_keys
from swarm.exchange.origin_checks import OriginChecks
from swarm.exchange.reward_recheck import check_verdict, cut_group, to_scored_group
from swarm.fairness import FairTurns, Turn
from swarm.interfaces import EnvironmentShape, GroupStore, Producer, Result, Tokenizer, Verdict, Verifier
from swarm.node_context import NodeContext
from swarm.peers.entry import EntryRule
from swarm.peers.peer_table import Peers
from swarm.peers.reputation import Reputation
from swarm.types import (
    Correction,
    Digest,
    NodeId,
    RefusalReason,
    Refused,
    RolloutGroup,
    ScoredGroup,
    SealedGroup,
    short,
)
from swarm.weight_sync.credit import CreditLedger
from swarm.wire.envelopes import open_group, stated_bytes

logger = logging.getLogger(__name__)

MAX_CONCURRENT: Final = 8  # groups between the first byte looked at and the scoring of their answers
_NUM_RESERVED: Final = 4  # of them for senders whose groups were admitted before: a flood of new keys delays no other
_MAX_OF_ONE_SENDER: Final = 4
_FIRST_TRY_CHARS: Final = 8192  # of a group whose party has no time left; 1 us each to encode and decode
_FIRST_TRY_BYTES: Final = 65_536  # of the same, opened
_FREE_BYTES: Final = 8192  # that nobody pays to have opened: 12 us, hardly more than counting them
_OPEN_S_PER_BYTE: Final = 1.5e-9  # 4.4 to 6.2 ms for 4 MB, which may be 400 bytes that travelled
_OVER_TIME: Final = RefusalReason.OVER_REPLAY_TIME, "its party has taken its seconds of this minute"


@dataclass(eq=False, kw_only=True, slots=True)
class Arrival:
    """One group on its way through the checks, with what they have established so far."""

    sealed: SealedGroup  # as it travelled; hostile
    via: NodeId  # the authenticated peer that sent it
    is_small: bool  # also when it is decompressed
    group: RolloutGroup | None = None  # once digest, signature and structure hold
    producer: Producer = field(init=False)  # whom its time counts against, before its texts are read
    allowance: Allowance = field(init=False)  # of that time
    form: GroupForm = field(init=False)  # once its texts were read
    order: int = 0  # among commitments and arrivals, once it is opened
    turn: Turn[NodeId] = field(init=False)  # ends before the answers are scored, which has turns of its own
    verdict: Verdict = field(init=False)  # of the sandbox
    scored: ScoredGroup = field(init=False)  # once it is stored


@dataclass(eq=False, repr=False)
class Admission:
    """Admission of groups from peers; one per node."""

    _context: NodeContext
    _store: GroupStore  # admitted groups are in it before `admit` returns
    _tokenizer: Tokenizer
    _verifier: Verifier  # scores answers in the sandbox and rebuilds tasks
    _peers: Peers  # the newest head known of each lineage, our own included
    _versions: KnownVersions  # that existed, as far as this node knows
    _reputation: Reputation  # of each peer, charged for what it sends
    _credit_ledger: CreditLedger | None  # who may send groups of our own lineage; None admits them from everybody
    _environments: frozenset[str]  # names this node can rebuild
    _usable: frozenset[Correction] = frozenset(Correction)  # what this node's recipe may learn from
    _entry: EntryRule | None = None  # who may take part in the run; None: everybody
    _novelty: Novelty = field(default_factory=Novelty)  # the answers seen so far
    _origin_of: Callable[[NodeId], str] = str  # whom the time counts against that answers take; empty: not known
    _is_established: Callable[[NodeId], bool] = lambda _: False  # whether a producer counts in full
    _accounts: TimeAccounts = field(default_factory=TimeAccounts)  # of CPU seconds, those of the verifier
    _shapes: Mapping[str, EnvironmentShape] = field(default_factory=dict[str, EnvironmentShape])  # as far as known

    def __post_init__(self) -> None:
        self._limits = AdmissionLimits.from_config(self._context.config)
        self._slots = FairTurns[NodeId](MAX_CONCURRENT, _NUM_RESERVED, _MAX_OF_ONE_SENDER)
        self._in_flight: set[Digest] = set()  # genuine groups under admission now
        self._is_full = False  # the newest group found no room in the store
        self._origin = OriginChecks(
            node_id=self._context.node_id,
            run_id=self._context.config.run_id,
            clock=self._context.clock,
            limits=self._limits,
            entry=self._entry,
            reputation=self._reputation,
            environments=self._environments,
            peers=self._peers,
            versions=self._versions,
            credit_ledger=self._credit_ledger,
        )
        self.num_admitted = 0
        self.refusals: Counter[RefusalReason] = Counter()

    async def admit(self, sealed: SealedGroup, via: NodeId) -> ScoredGroup | Refused:
        """Checks, scores and stores one group of another node.

        Args:
            sealed: as it travelled; hostile.
            via: the authenticated peer that sent it.
        """
        arrival = Arrival(sealed=sealed, via=via, is_small=stated_bytes(sealed) <= self._context.in_place_bytes)
        finding = self._check_unread(arrival)
        if finding is None:
            async with self._slots.turn(via, is_known=self._reputation.score(via) > 0) as arrival.turn:
                finding = await self._check_sealed(arrival) or await self._check_opened(arrival)
        if finding is not None:
            reason, detail = finding
            refused = Refused(
                reason=reason,
                detail=detail,
                producer=sealed.producer,
                digest=sealed.digest,
                created_at_s=None if arrival.group is None else arrival.group.created_at_s,
            )
            return self._count(refused, via)
        self.num_admitted += 1
        self._reputation.record_good(sealed.producer)
        return arrival.scored

    def is_well_formed(self, scored: ScoredGroup) -> bool:
        """Whether a stored group would still be let in by its form: an earlier release, or other limits, may have let
        in what stops whoever learns from it, after every restart again."""
        return scored.is_made_here or check_form(scored.group, self._tokenizer, self._limits) is None

    def as_learned(self, scored: ScoredGroup) -> RolloutGroup:
        """A stored group as far as a batch takes its texts: its answers are those that are remembered."""
        return scored.group if scored.is_made_here else cut_group(scored.group, self._tokenizer)

    def refuse_items(self, via: NodeId) -> Refused:
        """A neighbour's stream exceeds its quota of items; it is charged."""
        return self._count(
            Refused(reason=RefusalReason.TOO_MANY_ITEMS, detail=f"{short(via)} sent too many items in a minute"), via
        )

    # --- the order of checks -------------------------------------------------------------------------
    # Cheap to expensive. Each check returns what is wrong, or None.

    def _check_unread(self, arrival: Arrival) -> Finding:
        """What is decided by the sender and a length."""
        return self._sender_reputation(arrival) or self._sender_quota(arrival) or self._size(arrival)

    async def _check_sealed(self, arrival: Arrival) -> Finding:
        """What is decided by the bytes; afterwards the group is its producer's."""
        return (
            await self._digest(arrival)
            or await self._duplicate(arrival)
            or self._time_to_open(arrival)
            or await self._signature_and_structure(arrival)
        )

    async def _check_opened(self, arrival: Arrival) -> Finding:
        """What is decided by origin, content and answers; afterwards the group is stored."""
        group, digest = arrival.group, arrival.sealed.digest
        assert group is not None
        # Only a genuine group enters the set: a forged copy must not hold the place of the real one.
        if digest in self._in_flight:
            return RefusalReason.DUPLICATE, "under admission already"
        self._in_flight.add(digest)
        arrival.order = self._novelty.take_number()
        try:
            finding = (
                await self._duplicate(arrival)  # again: another copy may have been stored while this one was opened
                or self._origin.check(group, arrival.via)
            )
            if finding is not None:
                return finding
            with self._origin.counting_against_credit(group):
                return (
                    await self._form(group, arrival)
                    or self._novelty_of_answers(arrival, self._novelty.order(group, arrival.order))
                    or await self._task_prompt_and_rewards(group, arrival)
                    or self._correction(group, arrival)
                    or self._novelty_of_answers(arrival, arrival.order)  # again: a copy may have come through
                    or await self._storage(arrival)
                )
        finally:
            self._in_flight.discard(digest)

    async def _compute(self, arrival: Arrival, function: Callable[..., Result], /, *arguments: object) -> Result:
        """The result of a pure function: of a small group in place, where waking a thread would be most of the cost."""
        if arrival.is_small:
            return function(*arguments)
        return await self._context.offload(function, *arguments)

    # --- unread --------------------------------------------------------------------------------------

    def _sender_reputation(self, arrival: Arrival) -> Finding:
        if not self._reputation.is_allowed(arrival.via):
            return RefusalReason.LOW_REPUTATION, f"sender {short(arrival.via)} is below the floor"
        return None

    def _sender_quota(self, arrival: Arrival) -> Finding:
        if not self._reputation.try_take(arrival.via):
            return RefusalReason.OVER_QUOTA, f"sender {short(arrival.via)} used up its quota"
        return None

    def _size(self, arrival: Arrival) -> Finding:
        size_bytes, bound = arrival.sealed.size_bytes, self._limits.max_group_bytes
        return (RefusalReason.TOO_LARGE, f"{size_bytes} bytes exceed {bound}") if size_bytes > bound else None

    # --- sealed --------------------------------------------------------------------------------------

    async def _digest(self, arrival: Arrival) -> Finding:
        if await self._compute(arrival, _digest_of, arrival.sealed.body) != arrival.sealed.digest:
            return RefusalReason.WRONG_DIGEST, "the body does not hash to the digest"
        return None

    async def _duplicate(self, arrival: Arrival) -> Finding:
        if await self._store.contains(arrival.sealed.digest):
            return RefusalReason.DUPLICATE, "seen before"
        return None

    def _time_to_open(self, arrival: Arrival) -> Finding:
        """Of the sender, who is known before, and apart from what its own groups take: relays send those of others, and
        anybody can send the old ones of a producer again."""
        via, num_bytes = arrival.via, stated_bytes(arrival.sealed)
        if num_bytes <= _FREE_BYTES:
            return None
        sender = Producer(node_id=via, is_known=False, origin=f"sent by {self._origin_of(via) or via}")
        allowance = self._accounts.allowance(sender)
        if allowance is Allowance.NOTHING or (allowance is Allowance.FIRST_TRY and num_bytes > _FIRST_TRY_BYTES):
            return _OVER_TIME
        self._accounts.spend(sender, _OPEN_S_PER_BYTE * num_bytes, allowance)
        return None

    async def _signature_and_structure(self, arrival: Arrival) -> Finding:
        opened = await self._compute(
            arrival, open_group, arrival.sealed, self._limits.max_group_bytes, self._limits.counts
        )
        if isinstance(opened, Refused):
            return opened.reason, opened.detail
        arrival.group = opened
        return None

    # --- opened: content and answers -----------------------------------------------------------------

    async def _form(self, group: RolloutGroup, arrival: Arrival) -> Finding:
        """Everything that group, vocabulary and limits decide; what it takes counts against its party."""
        producer = arrival.producer = self._producer_of(group.producer, arrival.via)
        allowance = arrival.allowance = self._accounts.allowance(producer)
        num_chars = sum([sum(map(len, rollout.actions)) for rollout in group.rollouts])
        if allowance is Allowance.NOTHING or (allowance is Allowance.FIRST_TRY and num_chars > _FIRST_TRY_CHARS):
            return _OVER_TIME
        shape = self._shapes.get(group.env)
        finding = None if shape is None else check_num_turns(group, shape.max_turns, shape.verifier)
        if finding is None:
            form = arrival.form = await self._compute(arrival, read_group, group, self._tokenizer, self._limits)
            self._accounts.spend(producer, form.cpu_s, allowance)
            finding = form.finding
            if finding is None:
                keep_keys(group, form.answers)
                keep_keys(form.learned, form.learned_answers)
        return finding

    def _novelty_of_answers(self, arrival: Arrival, order: int) -> Finding:
        arrival.order = order
        bits = self._novelty.copied_bits(arrival.form.learned, arrival.sealed.digest, arrival.order)
        if bits >= MIN_BITS:
            return RefusalReason.COPIED, f"{bits:.0f} bits of its answers were given before, at most {MIN_BITS:.0f}"
        return None

    async def _task_prompt_and_rewards(self, group: RolloutGroup, arrival: Arrival) -> Finding:
        """Task and rewards as the sandbox rebuilds them, against what the producer says; a crash is the producer's."""
        producer, form = arrival.producer, arrival.form
        arrival.turn.end()
        try:
            verdict = await self._verifier.verify(
                group.env, group.task_id, [r.actions for r in form.learned.rollouts], producer
            )
        except LookupError:
            return RefusalReason.UNKNOWN_TASK, f"no task {group.task_id}"
        except TooLarge as error:  # characters that take several bytes each on the way to the sandbox
            return RefusalReason.UNUSABLE_TEXT, str(error)
        except OverBudget as error:
            return RefusalReason.OVER_REPLAY_TIME, str(error)
        except RolloutFailed as error:
            logger.debug("verifier failed on a peer's group", extra={"producer": short(group.producer)})
            return RefusalReason.VERIFIER_FAILED, type(error).__name__
        arrival.verdict = verdict
        # A text of another tokenizer is encoded here, and one of a few bytes on the wire may have thousands of letters.
        judged = group, form.learned, verdict, form.tokenizer, self._limits
        finding, cpu_s = await self._compute(arrival, timed, check_verdict, *judged)
        self._accounts.spend(producer, cpu_s, arrival.allowance)
        return finding

    def _producer_of(self, node_id: NodeId, via: NodeId) -> Producer:
        """Who signed a group, as far as that is known here; who sent it decides only where nothing is."""
        origin = self._origin_of(node_id)
        is_relayed = not origin and via != node_id
        if is_relayed:  # keys are free: all that one neighbour passes on of such keys counts together
            origin = f"relayed by {self._origin_of(via) or via}"
        return Producer(
            node_id=node_id,
            is_known=self._reputation.score(node_id) > 0,
            origin=origin,
            is_relayed=is_relayed,
            is_established=self._is_established(node_id),
        )

    def _correction(self, group: RolloutGroup, arrival: Arrival) -> Finding:
        now_s = self._context.clock.now_s()
        scored = to_scored_group(
            group,
            arrival.sealed,
            arrival.verdict.rewards,
            self._tokenizer,
            is_made_here=False,
            now_s=now_s,
            outcomes=arrival.verdict.outcomes,
        )
        arrival.scored = scored
        if scored.correction not in self._usable:
            usable = ", ".join(sorted(self._usable))
            return RefusalReason.UNUSABLE_CORRECTION, f"correction {scored.correction}, usable: {usable}"
        return None

    async def _storage(self, arrival: Arrival) -> Finding:
        group, digest = arrival.form.learned, arrival.sealed.digest
        self._novelty.record(group, digest, arrival.order)
        try:
            await self._store.put(arrival.scored, arrival.sealed)
        except StorageFull as error:
            self._novelty.release(group, digest)
            if not self._is_full:  # once: a line for each group would fill what is left
                full = "store is full; groups of peers are refused until it has room"
                logger.warning(full, extra={"error": str(error)})
            self._is_full = True
            return RefusalReason.NO_ROOM, "the store is full"
        self._is_full = False
        return None

    # --- counting ------------------------------------------------------------------------------------

    def _count(self, refused: Refused, via: NodeId) -> Refused:
        self.refusals[refused.reason] += 1
        self._reputation.record_refused(refused.reason, via, refused.producer)
        return refused


def _digest_of(body: bytes) -> Digest:
    return hashlib.sha256(body).digest()
