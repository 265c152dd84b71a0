"""Admission of groups from peers: a sealed group becomes a scored and stored one, or a counted refusal.

Invariant: no group of a peer reaches buffer, learner or relay except through `Admission.admit`, and the rewards of an
admitted group were computed on this node. Checks run from cheap to expensive, and concurrency is bounded.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from swarm.environments.sandbox.time_accounts import Allowance, TimeAccounts
from swarm.errors import OverBudget, RolloutFailed, StorageFull, TooLarge
from swarm.exchange.checks.admission_checks import GroupForm, check_form, read_group, timed
from swarm.exchange.checks.admission_limits import AdmissionLimits, Finding
from swarm.exchange.checks.episode_checks import check_num_turns
from swarm.exchange.checks.origin_checks import OriginChecks
from swarm.exchange.checks.reward_recheck import check_verdict, cut_group, to_scored_group
from swarm.exchange.novelty import Novelty, keep_keys
from swarm.fairness import FairTurns, Turn
from swarm.interfaces import EnvironmentShape, GroupStore, Producer, Result, Tokenizer, Verifier
from swarm.node_context import NodeContext
from swarm.peers.reputation import Reputation
from swarm.trust_policy import MIN_BITS
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
from swarm.wire.envelopes import open_group, stated_bytes

logger = logging.getLogger(__name__)

MAX_CONCURRENT: Final = 8  # groups under check at a time, until their answers are scored
_NUM_RESERVED: Final = 4  # slots of senders with admitted groups, so that a flood of new keys does not delay them
_MAX_OF_ONE_SENDER: Final = 4
_FIRST_TRY_CHARS: Final = 8192  # of a group whose party has no time left; 1 us each to encode and decode
_FIRST_TRY_BYTES: Final = 65_536  # opened bytes of such a group
_FREE_BYTES: Final = 8192  # opened without a charge: 12 us, hardly more than the accounting
_OPEN_S_PER_BYTE: Final = 1.5e-9  # 4.4 to 6.2 ms for 4 MB, which may travel as 400 bytes
_OVER_TIME: Final = RefusalReason.OVER_REPLAY_TIME, "its party has taken its seconds of this minute"


@dataclass(eq=False, kw_only=True, slots=True)
class Arrival:
    """One group under admission, with the results of the checks so far."""

    sealed: SealedGroup  # as received; hostile
    via: NodeId  # the authenticated peer that sent it
    is_small: bool  # also when it is decompressed
    turn: Turn[NodeId]  # ends before the answers are scored: the verifier has turns of its own
    group: RolloutGroup | None = None  # once digest, signature and structure hold
    order: int = 0  # among commitments and arrivals, once it is opened
    producer: Producer = field(init=False)  # pays for the CPU time of its texts, from `_form` on
    allowance: Allowance = field(init=False)  # of that time
    form: GroupForm = field(init=False)  # from `_form` on
    scored: ScoredGroup = field(init=False)  # once its rewards were checked


@dataclass(eq=False, repr=False)
class Admission:
    """Admission of groups from peers; one per node."""

    _context: NodeContext
    _store: GroupStore  # admitted groups are in it before `admit` returns
    _tokenizer: Tokenizer
    _verifier: Verifier  # scores answers in the sandbox and rebuilds tasks
    _origin: OriginChecks
    _reputation: Reputation  # of each peer, charged for the groups it sends
    _usable: frozenset[Correction]  # that this node's recipe may learn from
    _novelty: Novelty  # the answers seen so far
    _origin_of: Callable[[NodeId], str]  # account that a key's CPU time counts against; empty: not known
    _is_established: Callable[[NodeId], bool]  # a producer's groups count in full
    _accounts: TimeAccounts  # of CPU seconds, those of the verifier
    _shapes: Mapping[str, EnvironmentShape]  # as far as known

    def __post_init__(self) -> None:
        self._limits = AdmissionLimits.from_config(self._context.config)
        self._slots = FairTurns[NodeId](MAX_CONCURRENT, _NUM_RESERVED, _MAX_OF_ONE_SENDER)
        self._in_flight: set[Digest] = set()  # genuine groups under admission now
        self._is_full = False  # the newest group found no room in the store
        self.num_admitted = 0
        self.refusals: Counter[RefusalReason] = Counter()

    async def admit(self, sealed: SealedGroup, via: NodeId) -> ScoredGroup | Refused:
        """Checks, scores and stores a group of another node; returns the scored group, or the counted refusal.

        Args:
            sealed: the group as received; hostile.
            via: the authenticated peer that sent the group.
        """
        finding = self._check_unread(sealed, via)
        if finding is not None:
            return self._refuse(finding, sealed, via)
        async with self._slots.turn(via, is_known=self._reputation.score(via) > 0) as turn:
            is_small = stated_bytes(sealed) <= self._context.in_place_bytes
            arrival = Arrival(sealed=sealed, via=via, is_small=is_small, turn=turn)
            finding = await self._check_sealed(arrival) or await self._check_opened(arrival)
        if finding is not None:
            return self._refuse(finding, sealed, via, arrival.group)
        self.num_admitted += 1
        self._reputation.record_good(sealed.producer)
        return arrival.scored

    def is_well_formed(self, scored: ScoredGroup) -> bool:
        """True if a stored group has a form that is admitted now; always true for a group made here.

        An earlier release, or other limits, may have admitted a group that stops the learner after every restart.
        """
        return scored.is_made_here or check_form(scored.group, self._tokenizer, self._limits) is None

    def as_learned(self, scored: ScoredGroup) -> RolloutGroup:
        """Returns a stored group with its texts cut as the learner cuts them; a group made here is unchanged."""
        return scored.group if scored.is_made_here else cut_group(scored.group, self._tokenizer)

    def refuse_items(self, via: NodeId) -> Refused:
        """Charges a neighbour whose stream exceeds its quota of items, and returns the counted refusal."""
        detail = f"{short(via)} sent too many items in a minute"
        return self._count(Refused(reason=RefusalReason.TOO_MANY_ITEMS, detail=detail), via)

    # --- the order of checks -------------------------------------------------------------------------
    # Cheap to expensive. Each check returns a finding, or None where nothing is wrong.

    def _check_unread(self, sealed: SealedGroup, via: NodeId) -> Finding:
        """Checks the sender's reputation and quota, and the length of the group, before anything is read."""
        if not self._reputation.is_allowed(via):
            return RefusalReason.LOW_REPUTATION, f"sender {short(via)} is below the floor"
        if not self._reputation.try_take(via):
            return RefusalReason.OVER_QUOTA, f"sender {short(via)} used up its quota"
        if sealed.size_bytes > self._limits.max_group_bytes:
            return RefusalReason.TOO_LARGE, f"{sealed.size_bytes} bytes exceed {self._limits.max_group_bytes}"
        return None

    async def _check_sealed(self, arrival: Arrival) -> Finding:
        """Checks the sealed bytes; if there is no finding, sets `arrival.group`, which its producer signed."""
        return (
            await self._digest(arrival)
            or await self._duplicate(arrival)
            or self._time_to_open(arrival)
            or await self._signature_and_structure(arrival)
        )

    async def _check_opened(self, arrival: Arrival) -> Finding:
        """Checks origin, content and answers of an opened group; stores the group if there is no finding."""
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
                    or self._correction(arrival)
                    or self._novelty_of_answers(arrival, arrival.order)  # again: a copy may have come through
                    or await self._storage(arrival)
                )
        finally:
            self._in_flight.discard(digest)

    async def _compute(self, arrival: Arrival, function: Callable[..., Result], /, *arguments: object) -> Result:
        """Runs a pure function in a thread, or in place for a small group, since waking a thread would cost more."""
        if arrival.is_small:
            return function(*arguments)
        return await self._context.offload(function, *arguments)

    # --- sealed --------------------------------------------------------------------------------------

    async def _digest(self, arrival: Arrival) -> Finding:
        found = await self._compute(arrival, lambda: hashlib.sha256(arrival.sealed.body).digest())
        if found != arrival.sealed.digest:
            return RefusalReason.WRONG_DIGEST, "the body does not hash to the digest"
        return None

    async def _duplicate(self, arrival: Arrival) -> Finding:
        if await self._store.contains(arrival.sealed.digest):
            return RefusalReason.DUPLICATE, "seen before"
        return None

    def _time_to_open(self, arrival: Arrival) -> Finding:
        """Charges the CPU time of opening a group to its sender, the only party known by then; small groups are free.

        The sender's account is separate from that of its own groups: relays send other nodes' groups, and anybody can
        send a producer's old groups again.
        """
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
        """Checks the form of an opened group; the CPU time is charged to the group's party."""
        producer = arrival.producer = self._producer_of(group.producer, arrival.via)
        allowance = arrival.allowance = self._accounts.allowance(producer)
        num_chars = sum([sum(map(len, rollout.actions)) for rollout in group.rollouts])
        if allowance is Allowance.NOTHING or (allowance is Allowance.FIRST_TRY and num_chars > _FIRST_TRY_CHARS):
            return _OVER_TIME
        shape = self._shapes.get(group.env)
        finding = None if shape is None else check_num_turns(group, shape.max_turns, shape.verifier)
        if finding is not None:
            return finding
        form = arrival.form = await self._compute(arrival, read_group, group, self._tokenizer, self._limits)
        self._accounts.spend(producer, form.cpu_s, allowance)
        if form.finding is None:
            keep_keys(group, form.answers)
            keep_keys(form.learned, form.learned_answers)
        return form.finding

    def _novelty_of_answers(self, arrival: Arrival, order: int) -> Finding:
        arrival.order = order
        bits = self._novelty.copied_bits(arrival.form.learned, arrival.sealed.digest, arrival.order)
        if bits >= MIN_BITS:
            return RefusalReason.COPIED, f"{bits:.0f} bits of its answers were given before, at most {MIN_BITS:.0f}"
        return None

    async def _task_prompt_and_rewards(self, group: RolloutGroup, arrival: Arrival) -> Finding:
        """Checks task, prompt and rewards against this node's sandbox; a crash there is charged to the producer."""
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
        # A text of another tokenizer is encoded here, and one of a few bytes on the wire may have thousands of letters.
        judged = group, form.learned, verdict, form.tokenizer, self._limits
        finding, cpu_s = await self._compute(arrival, timed, check_verdict, *judged)
        self._accounts.spend(producer, cpu_s, arrival.allowance)
        if finding is None:
            arrival.scored = to_scored_group(
                group,
                arrival.sealed,
                verdict.rewards,
                self._tokenizer,
                is_made_here=False,
                now_s=self._context.clock.now_s(),
                outcomes=verdict.outcomes,
            )
        return finding

    def _producer_of(self, node_id: NodeId, via: NodeId) -> Producer:
        """The producer that pays for a group's CPU time; the relaying neighbour stands in for an unknown origin."""
        origin = self._origin_of(node_id)
        is_relayed = not origin and via != node_id
        if is_relayed:  # keys are free: groups of such keys that one neighbour relays count together
            origin = f"relayed by {self._origin_of(via) or via}"
        return Producer(
            node_id=node_id,
            is_known=self._reputation.score(node_id) > 0,
            origin=origin,
            is_relayed=is_relayed,
            is_established=self._is_established(node_id),
        )

    def _correction(self, arrival: Arrival) -> Finding:
        correction = arrival.scored.correction
        if correction not in self._usable:
            return (
                RefusalReason.UNUSABLE_CORRECTION,
                f"correction {correction}, usable: {', '.join(sorted(self._usable))}",
            )
        return None

    async def _storage(self, arrival: Arrival) -> Finding:
        group, digest = arrival.form.learned, arrival.sealed.digest
        self._novelty.record(group, digest, arrival.order)
        try:
            await self._store.put(arrival.scored, arrival.sealed)
        except StorageFull as error:
            self._novelty.release(group, digest)
            if not self._is_full:  # once: a line for each group would fill the rest of the disk
                full = "store is full; groups of peers are refused until it has room"
                logger.warning(full, extra={"error": str(error)})
            self._is_full = True
            return RefusalReason.NO_ROOM, "the store is full"
        self._is_full = False
        return None

    # --- counting ------------------------------------------------------------------------------------

    def _refuse(
        self, finding: tuple[RefusalReason, str], sealed: SealedGroup, via: NodeId, group: RolloutGroup | None = None
    ) -> Refused:
        refused = Refused(
            reason=finding[0],
            detail=finding[1],
            producer=sealed.producer,
            digest=sealed.digest,
            created_at_s=None if group is None else group.created_at_s,
        )
        return self._count(refused, via)

    def _count(self, refused: Refused, via: NodeId) -> Refused:
        self.refusals[refused.reason] += 1
        self._reputation.record_refused(refused.reason, via, refused.producer)
        return refused
