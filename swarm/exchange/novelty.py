"""Novelty of answers (deduplication, plagiarism): the content of a group must be its producer's own, and new.

Invariant: an honest group is refused with a probability of at most 2 ** -CHANCE_BITS, and own groups never. Only the
*text* of each answer to a task counts, not the group or the tokens: a group that repeats 7 of 8 answers, in another
order, in other tokens or without log-probs, is a copy.

Equal answers alone prove nothing: honest answers of a small or well-trained model coincide often (29 % of the tiny
model's). So an answer counts with its *bits*, and the rule depends on the node that states them:

- The *copier's* figure cannot count: it would claim 0 bits. The *first producer's* figure is safe for honest
  producers: a policy that draws an answer of b bits repeats an independent answer with a probability of at most
  2 ** -b, whatever policy drew that answer; with n known answers, n * 2 ** -b. So k equal answers exclude chance
  by the sum of their bits less k * log2(n), or, if all are of one group of G, less (k * log2(G) + log2(n)).
- A first producer that overstates its bits could make honest groups look like copies if it guesses their answers. So no
  answer counts for more than its chosen tokens times the mean bits of a token in this node's *own* groups of the
  environment, which no peer can move; guessable answers are short, and equal answers in a group count once. A trainer
  that generates nothing uses the lower median of the means of established followers; without followers an answer is
  evidence only against its own first producer.
- If a task is far easier than that mean, even long answers can be guessed. So a newcomer's first answer is no evidence
  against an established node. That node's own claim to the answer is kept as another first claim.
- A first producer that understates its bits gives up its own protection, and could pass off its old content as new. So
  a producer's own content, like content without log-probs, counts with an eighth of this node's own mean, whatever is
  claimed: groups of one producer that are equal by chance have few bits.

The first producer is the one that *committed* first, with a hash over producer and content that is sent before the
group. Only a node that knows the content can commit to it, so the commitment of a copy is later if the original's
commitment arrived before the original's content; a copy that was admitted before the original arrived is then dropped.
No node is blamed for a refusal: without commitments the copy may have overtaken the original. Edited texts, which no
policy drew, are found by scoring instead.
"""

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median_low
from typing import Final
from weakref import ref

import numpy as np

from swarm.flow import BoundedTable, RunningMean
from swarm.trust_policy import MIN_BITS, UNCLAIMED_SHARE
from swarm.types import Digest, NodeId, Rollout, RolloutGroup

CHANCE_BITS: Final = 32.0  # bits of evidence that exclude chance
MAX_ANSWERS: Final = 2**16  # remembered; the oldest make room
MAX_COMMITMENTS: Final = 512  # of one neighbour that wait for their groups
_MAX_NEIGHBOURS: Final = 256
_MEMORY: Final = 0.98  # of the mean bits of a token
_KEY_BYTES: Final = 16
_MAX_LATER: Final = 8  # groups remembered that gave an answer after the first
_DOMAIN: Final = b"swarm.v1.commitment\0"

AnswerKey = bytes  # of a task and the text of one answer to it


def answer_keys(group: RolloutGroup) -> list[AnswerKey]:
    """[G] keys of a group's answers: equal for equal texts that answer the same task."""
    kept = _keys_of.get(id(group))
    if kept is not None and kept[0]() is group:
        return kept[1]
    keys = hash_answers(group)
    keep_keys(group, keys)
    return keys


def keep_keys(group: RolloutGroup, keys: list[AnswerKey]) -> None:
    """Caches the keys of a group that were hashed in a thread; the group itself is not kept alive."""
    _keys_of[id(group)] = ref(group), keys


# Keys of the groups under admission, which needs them four times, at 20 us each.
_keys_of: Final = BoundedTable[int, tuple[ref[RolloutGroup], list[AnswerKey]]](64)


def hash_answers(group: RolloutGroup) -> list[AnswerKey]:
    """Computes `answer_keys` by reading every text; to be called in a thread if the texts may be long."""
    task = hashlib.blake2b(struct.pack("<Q", group.task_id) + group.env.encode(), digest_size=_KEY_BYTES)
    keys: list[AnswerKey] = []
    for rollout in group.rollouts:
        answer = task.copy()
        texts = [text.encode() for text in rollout.actions]
        if len(texts) == 1:
            answer.update(b"\0" + texts[0])
        else:  # no character separates turns: a text may hold any
            answer.update(b"\1" + b"".join(struct.pack("<Q", len(text)) + text for text in texts))
        keys.append(answer.digest())
    return keys


def commitment_of(group: RolloutGroup) -> Digest:
    """SHA-256 that binds a producer to the answers of a group without showing them."""
    content = b"".join(sorted(answer_keys(group)))
    return hashlib.sha256(_DOMAIN + group.producer.encode() + content).digest()


def claimed_bits(group: RolloutGroup) -> list[float | None]:
    """[G] bits of the answers by their claimed log-probs; None for an answer without exact log-probs."""
    return [_bits(rollout) for rollout in group.rollouts]


def _bits(rollout: Rollout) -> float | None:
    logprobs = None if rollout.trace is None else rollout.trace.logprobs
    if rollout.trace is None or logprobs is None or not rollout.sampling.is_exact:
        return None
    bits = -float(np.add.reduce(logprobs, where=rollout.trace.action_mask)) / math.log(2)
    return bits if math.isfinite(bits) else None


def _num_chosen(rollout: Rollout) -> int:
    """Number of tokens that a policy drew; observations follow from them and distinguish no episodes."""
    return 0 if rollout.trace is None else int(np.count_nonzero(rollout.trace.action_mask))


def _bits_per_token(group: RolloutGroup) -> float | None:
    """Mean bits of a chosen token over the answers with log-probs; None if there are none."""
    known = [
        (bits, _num_chosen(rollout))
        for bits, rollout in zip(claimed_bits(group), group.rollouts, strict=True)
        if bits is not None
    ]
    num_tokens = sum(count for _, count in known)
    return sum(bits for bits, _ in known) / num_tokens if num_tokens else None


def _excluded(bits: Sequence[float], num_candidates: int) -> float:
    """Bits by which chance is excluded if each answer equals one of `num_candidates` known answers."""
    return sum(max(0.0, each - math.log2(max(1, num_candidates))) for each in bits)


@dataclass(frozen=True, slots=True)
class _Claim:
    """One group's claim to an answer; the group was admitted or made here."""

    producer: NodeId
    group: Digest
    order: int
    bits: float | None  # claimed
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Answer:
    """The claims of the groups that gave an answer."""

    task: tuple[str, int]
    first: tuple[_Claim, ...]  # the first of all, and the first of an established node if it is another
    later: tuple[_Claim, ...] = ()  # of other groups, the newest arrivals


class Novelty:
    """The answers that this node has seen, and the first commitments to them.

    Args:
        drop_copy: called with the digest of an admitted group that turned out to be a copy.
        is_established: True for a producer against which a newcomer's answers are no evidence.

    Example:
        novelty.commit(commitment, via)
        order = novelty.order(group)
        if novelty.copied_bits(group, digest, order) < MIN_BITS:
            novelty.record(group, digest, order)
    """

    def __init__(
        self,
        drop_copy: Callable[[Digest], None] = lambda digest: None,
        is_established: Callable[[NodeId], bool] = lambda producer: True,
    ) -> None:
        self._drop_copy = drop_copy
        self._is_established = is_established
        self._answers: dict[AnswerKey, _Answer] = {}  # in order of arrival
        self._num_of_task: Counter[tuple[str, int]] = Counter()
        self._committed = BoundedTable[NodeId, BoundedTable[Digest, int]](_MAX_NEIGHBOURS)  # order, by neighbour
        self._bits_per_token: dict[str, RunningMean] = {}  # of our own groups, by environment
        self._bits_of_followers: dict[str, BoundedTable[str, RunningMean]] = {}  # by environment, by party
        self._next = 0

    # --- commitments ---------------------------------------------------------------------------

    def commit(self, commitments: Sequence[Digest], via: NodeId) -> None:
        """Records a neighbour's commitments; the first arrival counts, and none displaces another neighbour's."""
        table = self._committed.get(via)
        if table is None:
            table = self._committed[via] = BoundedTable[Digest, int](MAX_COMMITMENTS)
        for commitment in commitments:
            if commitment not in table:
                table[commitment] = self.take_number()

    def order(self, group: RolloutGroup, arrived: int | None = None) -> int:
        """The place of a group among commitments and arrivals: the earlier of its first commitment and its arrival.

        Reads every text, so texts that are too long must be refused first. `arrived`: its place; None: arrives now.
        """
        commitment = commitment_of(group)
        orders = [table[commitment] for table in self._committed.values() if commitment in table]
        if arrived is not None:  # a commitment that came since then moves it back no further
            return min([arrived, *orders])
        return min(orders) if orders else self.take_number()

    def take_number(self) -> int:
        """Takes the next place among commitments and arrivals."""
        self._next += 1
        return self._next

    # --- judging -------------------------------------------------------------------------------

    def copied_bits(self, group: RolloutGroup, digest: Digest, order: int) -> float:
        """Bits of a group's distinct answers that were given before its place `order`; 0 if chance may explain them."""
        task = group.env, group.task_id
        bits_of: dict[Digest, list[float]] = {}  # by the group that gave them first
        copied: list[float] = []
        for key in set(answer_keys(group)):
            known = self._answers.get(key)
            claims = () if known is None else known.first
            # A commitment binds one producer to one content: an equal place is the same content with another date.
            found = {
                claim.group: self._evidence(claim, task[0], group.producer)
                for claim in claims
                if claim.order <= order and claim.group != digest
            }
            for first, bits in found.items():
                bits_of.setdefault(first, []).append(bits)
            if found:
                copied.append(max(found.values()))
        if not copied:
            return 0.0
        excluded = [
            _excluded(copied, self._num_of_task[task]),
            *(self._excluded_by(each, group) for each in bits_of.values()),
        ]
        return sum(copied) if max(excluded) >= CHANCE_BITS else 0.0

    def _excluded_by(self, bits: Sequence[float], group: RolloutGroup) -> float:
        """Bits by which chance is excluded if all copied answers come from one group."""
        known = self._num_of_task[group.env, group.task_id]
        return _excluded(bits, len(group.rollouts)) - math.log2(max(1, known))

    def record(self, group: RolloutGroup, digest: Digest, order: int) -> None:
        """Remembers a group that was admitted or made here, and drops copies of it that were admitted before."""
        task = (group.env, group.task_id)
        overtaken: dict[Digest, list[float]] = {}
        for key, rollout in zip(answer_keys(group), group.rollouts, strict=True):
            known = self._answers.get(key)
            if known is not None and any(each.group == digest for each in (*known.first, *known.later)):
                continue  # equal answers in a group count once
            claim = _Claim(group.producer, digest, order, _bits(rollout), _num_chosen(rollout))
            if known is None:
                self._answers[key] = _Answer(task, (claim,))
                self._num_of_task[task] += 1
                continue
            first = self._first_of((*known.first, claim))
            others = (*known.later, *known.first, claim)
            later = tuple(each for each in others if each not in first)[-_MAX_LATER:]
            self._answers[key] = _Answer(task, first, later)
            if claim not in first:
                continue
            for copy in {each.group: each for each in (*first, *later) if each.order > order}.values():
                if copy.producer != group.producer:
                    evidence = self._evidence(claim, group.env, copy.producer)
                    overtaken.setdefault(copy.group, []).append(evidence)
        while len(self._answers) > MAX_ANSWERS:
            self._forget(next(iter(self._answers)))
        for copy, copied in overtaken.items():
            if sum(copied) >= MIN_BITS and self._excluded_by(copied, group) >= CHANCE_BITS:
                self._drop_copy(copy)

    def _first_of(self, claims: Sequence[_Claim]) -> tuple[_Claim, ...]:
        """The first claim, and the first of an established node if that is another; of equal places, the older one."""
        ordered = sorted(claims, key=lambda claim: claim.order)
        established = next((claim for claim in ordered if self._is_established(claim.producer)), ordered[0])
        return (ordered[0],) if established is ordered[0] else (ordered[0], established)

    def release(self, group: RolloutGroup, digest: Digest) -> None:
        """Forgets a recorded group that could not be stored after all."""
        for key in answer_keys(group):
            known = self._answers.get(key)
            claims = () if known is None else (*known.first, *known.later)
            others = tuple(claim for claim in claims if claim.group != digest)
            if known is None or len(others) == len(claims):
                continue
            if not others:
                self._forget(key)
                continue
            first = self._first_of(others)
            later = tuple(claim for claim in others if claim not in first)
            self._answers[key] = replace(known, first=first, later=later)

    def measure_own(self, group: RolloutGroup) -> None:
        """Adds a group of our own engine to the mean bits of a token in its environment."""
        bits = _bits_per_token(group)
        if bits is not None:
            self._bits_per_token.setdefault(group.env, RunningMean(memory=_MEMORY)).add(bits)

    def measure_follower(self, group: RolloutGroup, party: str) -> None:
        """Adds a group that an established party made with our weights to the party's mean bits of a token."""
        bits = _bits_per_token(group)
        if bits is not None:
            means = self._bits_of_followers.setdefault(group.env, BoundedTable(_MAX_NEIGHBOURS))
            means.setdefault(party, RunningMean(memory=_MEMORY)).add(bits)

    def _expected_bits(self, env: str) -> float | None:
        """Mean bits of a token of our own policy, else the lower median of established followers' means, else None."""
        own = self._bits_per_token.get(env)
        if own is not None:
            return own.value
        means = self._bits_of_followers.get(env)
        values = [] if means is None else [mean.value for mean in means.values() if mean.value is not None]
        return median_low(values) if values else None

    def _evidence(self, claim: _Claim, env: str, copier: NodeId) -> float:
        """Bits that an earlier `claim` to an answer counts against a later group of `copier` in environment `env`.

        A producer's own earlier answers count by a share of our mean, if there is one, whatever the producer claimed.
        """
        is_own_content = claim.producer == copier
        if not is_own_content and self._is_established(copier) and not self._is_established(claim.producer):
            return 0.0
        bits_per_token = self._expected_bits(env)
        if bits_per_token is None:
            # Only the first producer's claim is known, which could be anything: it counts against itself alone.
            return max(0.0, claim.bits or 0.0) if is_own_content else 0.0
        expected = bits_per_token * claim.num_tokens
        if claim.bits is None or is_own_content:
            return max(0.0, expected * UNCLAIMED_SHARE)
        return max(0.0, min(claim.bits, expected))

    def _forget(self, key: AnswerKey) -> None:
        known = self._answers.pop(key, None)
        if known is not None:
            self._num_of_task[known.task] -= 1
            if not self._num_of_task[known.task]:
                del self._num_of_task[known.task]

    def __len__(self) -> int:
        return len(self._answers)
