"""The one door for foreign data: a sealed group becomes a scored and stored one, or a counted refusal.

Invariant: nothing a peer sent reaches buffer, learner or relay but through `Door.admit`, whose result
carries rewards computed on this node. Checks run from cheap to expensive, and concurrency is bounded.
"""

import asyncio
import hashlib
import logging
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from swarm.clock import Clock
from swarm.errors import RolloutFailed, StorageFull
from swarm.exchange.admission_checks import (
    AdmissionLimits,
    Finding,
    check_form,
    check_freshness,
    check_verdict,
    clamp_logprobs,
    correction_of,
)
from swarm.exchange.known_versions import KnownVersions
from swarm.identity import Identity
from swarm.interfaces import GroupStore, Offload, Tokenizer, Verdict, Verifier
from swarm.peers.reputation import UNPROVEN, Reputation
from swarm.types import (
    Correction,
    Digest,
    FloatArray,
    NodeId,
    PolicyVersion,
    RefusalReason,
    Refused,
    RolloutGroup,
    ScoredGroup,
    SealedGroup,
    short,
)
from swarm.weight_sync.credit import CreditLedger
from swarm.wire.envelopes import open_group, seal_group

__all__ = ["Admission", "AdmissionLimits"]

logger = logging.getLogger(__name__)

_MAX_CONCURRENT: Final = 8  # groups between the first byte looked at and the end of their admission


class Admission:
    """Admission of groups; one per node.

    Args:
        run_id: groups of other runs are refused.
        node_id: our own; our groups coming back are duplicates. Also the name of our lineage.
        tokenizer: of this node's model.
        verifier: scores answers in the sandbox and rebuilds tasks.
        store: admitted groups are in it before `admit` returns.
        clock: wall clock and monotonic time.
        limits: bounds.
        head_of: newest signed head known of a lineage, our own included.
        environments: names this node can rebuild.
        standing: what is known of each peer.
        offload: runs a blocking function off the event loop.
        usable: what this node's recipe may learn from; a group of another correction is refused.
    """

    def __init__(
        self,
        *,
        run_id: str,
        node_id: NodeId,
        tokenizer: Tokenizer,
        verifier: Verifier,
        store: GroupStore,
        clock: Clock,
        limits: AdmissionLimits,
        head_of: Callable[[NodeId], PolicyVersion | None],
        environments: frozenset[str],
        reputation: Reputation,
        offload: Offload,
        usable: frozenset[Correction] = frozenset(Correction),
    ) -> None:
        self._run_id = run_id
        self._node_id = node_id
        self._tokenizer = tokenizer
        self._verifier = verifier
        self._store = store
        self._clock = clock
        self._limits = limits
        self._head_of = head_of
        self._environments = environments
        self._reputation = reputation
        self._offload = offload
        self._usable = usable
        self.versions = KnownVersions(node_id, clock)  # recorded by the agent
        self.credit_ledger: CreditLedger | None = None  # who may send groups of our own lineage; set by the agent
        self._judged: Counter[NodeId] = Counter()  # such groups between that check and their end
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT)
        self._in_flight: set[Digest] = set()
        self.num_admitted = 0
        self.refusals: Counter[RefusalReason] = Counter()

    def is_open_to(self, peer: NodeId) -> bool:
        """False while the peer's standing is below the floor: nothing from it is worth any work."""
        return not self._reputation.is_low(peer)

    async def admit(self, sealed: SealedGroup, via: NodeId) -> ScoredGroup | Refused:
        """Judges, scores and stores one foreign group.

        Args:
            sealed: as it travelled; hostile.
            via: the authenticated peer that sent it.
        """
        refused = self._refuse_at_the_step(sealed, via)
        if refused is not None:
            return refused
        async with self._slots:
            opened = await self._open(sealed)
            if isinstance(opened, Refused):
                self._count(opened, via, is_signed=opened.reason not in UNPROVEN)
                return opened
            result = await self._admit_once(opened, sealed, via)
        if isinstance(result, Refused):
            self._count(result, via, is_signed=True)
        else:
            self.num_admitted += 1
            self._reputation.record_good(result.group.producer)
        return result

    def refuse_items(self, via: NodeId) -> Refused:
        """A neighbour said more than anybody has to say; it is charged."""
        refused = Refused(reason=RefusalReason.TOO_MANY_ITEMS, detail=f"{short(via)} said too much in a minute")
        self._count(refused, via, is_signed=False)
        return refused

    async def score_own(self, group: RolloutGroup) -> tuple[RolloutGroup, FloatArray]:
        """One of our groups with its rewards claimed: rewards ([G]) and verifier come from the sandbox.

        Raises:
            LookupError: unknown environment or task.
            RolloutFailed: the verifier failed on these answers.
        """
        verdict = await self._verifier.score(group.env, group.task_id, [r.text for r in group.rollouts])
        rollouts = tuple(
            replace(rollout, claimed_reward=float(reward))
            for rollout, reward in zip(group.rollouts, verdict.rewards, strict=True)
        )
        return replace(group, rollouts=rollouts, verifier=verdict.verifier), verdict.rewards

    async def own(self, group: RolloutGroup, identity: Identity) -> tuple[ScoredGroup, SealedGroup]:
        """Scores, seals and stores one of our groups; nothing is refused. Raises also StorageFull."""
        claimed, rewards = await self.score_own(group)
        sealed = await self._offload(seal_group, claimed, identity)
        scored = self._scored(clamp_logprobs(claimed), sealed, rewards, is_made_here=True)
        await self._store.put(scored, sealed)
        return scored, sealed

    # --- steps of admission ----------------------------------------------------------------------

    def _refuse_at_the_step(self, sealed: SealedGroup, via: NodeId) -> Refused | None:
        """What can be said without looking at more than a length."""
        finding: Finding = None
        if self._reputation.is_low(via):
            finding = RefusalReason.LOW_REPUTATION, f"sender {short(via)} is below the floor"
        elif not self._reputation.take(via):
            finding = RefusalReason.OVER_QUOTA, f"sender {short(via)} used up its quota"
        elif sealed.size_bytes > self._limits.max_group_bytes:
            bound = self._limits.max_group_bytes
            finding = RefusalReason.TOO_LARGE, f"{sealed.size_bytes} bytes exceed {bound}"
        if finding is None:
            return None
        refused = _refused(finding, sealed)
        self._count(refused, via, is_signed=False)
        return refused

    async def _open(self, sealed: SealedGroup) -> RolloutGroup | Refused:
        """The group inside: digest, duplicate, signature, structure, and what its values alone decide."""
        digest = await self._offload(_digest_of, sealed.body)
        if digest != sealed.digest:
            return _refused((RefusalReason.WRONG_DIGEST, "the body does not hash to the digest"), sealed)
        if await self._store.contains(digest):
            return _refused((RefusalReason.DUPLICATE, "seen before"), sealed)
        opened = await self._offload(open_group, sealed, self._limits.max_group_bytes)
        if isinstance(opened, Refused):
            return replace(opened, producer=sealed.producer, digest=sealed.digest)
        return opened

    async def _admit_once(self, group: RolloutGroup, sealed: SealedGroup, via: NodeId) -> ScoredGroup | Refused:
        """The rest for a group whose signature holds, unless the same one is on its way already."""
        # Only a genuine group enters the set: a forged copy must not hold the place of the real one.
        if sealed.digest in self._in_flight:
            return _refused((RefusalReason.DUPLICATE, "on its way already"), sealed)
        self._in_flight.add(sealed.digest)
        try:
            # Again: another copy may have come all the way through while this one was opened.
            if await self._store.contains(sealed.digest):
                return _refused((RefusalReason.DUPLICATE, "seen before"), sealed)
            finding = self._check_origin(group, via)
            if finding is not None:
                return replace(_refused(finding, sealed), created_at_s=group.created_at_s)
            if group.policy_id != self._node_id:
                return await self._judge(group, sealed)
            with self._judging(group.producer):
                return await self._judge(group, sealed)
        finally:
            self._in_flight.discard(sealed.digest)

    @contextmanager
    def _judging(self, producer: NodeId) -> Generator[None, None, None]:
        """Counts a group of our lineage while it is judged, so that many at a time cannot pass on leave for one."""
        self._judged[producer] += 1
        try:
            yield
        finally:
            self._judged[producer] -= 1
            if not self._judged[producer]:
                del self._judged[producer]

    async def _judge(self, group: RolloutGroup, sealed: SealedGroup) -> ScoredGroup | Refused:
        """Its values and its answers."""
        finding = await self._offload(check_form, group, self._tokenizer, self._limits)
        if finding is not None:
            return _refused(finding, sealed)
        verdict = await self._verdict(group)
        if not isinstance(verdict, Verdict):
            return _refused(verdict, sealed)
        return await self._keep(group, sealed, verdict)

    def _check_origin(self, group: RolloutGroup, via: NodeId) -> Finding:
        """Who made it, when, for which run and environment."""
        producer = group.producer
        if producer == self._node_id:
            return RefusalReason.DUPLICATE, "our own group"
        if self._reputation.is_low(producer):
            return RefusalReason.LOW_REPUTATION, f"producer {short(producer)} is below the floor"
        if producer != via and not self._reputation.take(producer):
            return RefusalReason.OVER_QUOTA, f"producer {short(producer)} used up its quota"
        if group.run_id != self._run_id:
            return RefusalReason.WRONG_RUN, "a group of another run"
        if group.env not in self._environments:
            return RefusalReason.UNKNOWN_ENVIRONMENT, "an environment this node does not have"
        if group.policy_id == self._node_id and not self._limits.has_followers:
            return RefusalReason.BAD_VERSION, "our own policy, whose weights nobody else has"
        head = self._head_of(group.policy_id)
        finding = check_freshness(group, head, self._clock.now_s(), self._limits)
        return finding or self.versions.check(group) or self._check_credit(group)

    def _check_credit(self, group: RolloutGroup) -> Finding:
        """Of our own lineage only what we gave leave for: nobody crowds out the others with it."""
        if self.credit_ledger is None or group.policy_id != self._node_id:
            return None
        if self.credit_ledger.is_expected(group.producer, self._judged[group.producer]):
            return None
        return RefusalReason.NO_CREDIT, "more than its producer was given leave for"

    async def _verdict(self, group: RolloutGroup) -> Verdict | tuple[RefusalReason, str]:
        """The sandbox's rewards, checked against the group; a crash is the producer's."""
        try:
            verdict = await self._verifier.score(group.env, group.task_id, [r.text for r in group.rollouts])
        except LookupError:
            return RefusalReason.UNKNOWN_TASK, f"no task {group.task_id}"
        except RolloutFailed as error:
            logger.debug("verifier failed on a peer's group", extra={"producer": short(group.producer)})
            return RefusalReason.VERIFIER_FAILED, type(error).__name__
        return check_verdict(group, verdict, self._tokenizer, self._limits) or verdict

    async def _keep(self, group: RolloutGroup, sealed: SealedGroup, verdict: Verdict) -> ScoredGroup | Refused:
        scored = self._scored(clamp_logprobs(group), sealed, verdict.rewards, is_made_here=False)
        if scored.correction not in self._usable:
            detail = f"correction {scored.correction}, usable: {', '.join(sorted(self._usable))}"
            return _refused((RefusalReason.UNUSABLE_CORRECTION, detail), sealed)
        try:
            await self._store.put(scored, sealed)
        except StorageFull as error:
            logger.warning("store is full, foreign group refused", extra={"error": str(error)})
            return _refused((RefusalReason.NO_ROOM, "the store is full"), sealed)
        return scored

    # --- inside ------------------------------------------------------------------------------------

    def _scored(self, group: RolloutGroup, sealed: SealedGroup, rewards: FloatArray, is_made_here: bool) -> ScoredGroup:
        return ScoredGroup(
            digest=sealed.digest,
            group=group,
            rewards=rewards,
            correction=correction_of(group, self._tokenizer),
            is_made_here=is_made_here,
            first_seen_s=self._clock.now_s(),
            size_bytes=sealed.size_bytes,
        )

    def _count(self, refused: Refused, via: NodeId, is_signed: bool) -> None:
        self.refusals[refused.reason] += 1
        self._reputation.record_refused(refused.reason, via, refused.producer if is_signed else None)


def _digest_of(body: bytes) -> Digest:
    return hashlib.sha256(body).digest()


def _refused(finding: tuple[RefusalReason, str], sealed: SealedGroup) -> Refused:
    reason, detail = finding
    return Refused(reason=reason, detail=detail, producer=sealed.producer, digest=sealed.digest)
