"""History of the calls of a coordinator, and whether one ledger and one table of members could have given the answers.

Invariant: only what callers saw is judged: what they asked, when, and what they were answered. The order of invocations
and answers is that of one process; a call without an answer may have been carried out or not. A watch begins with the
head when the batches that were begun before it are written, whosever they are: until then it owes nothing.

A lineage has one owner, who records one batch after another, so its ledger is a sequence of states, and every answer to
anybody else has to be that of a state between the last batch that was answered before it was asked and the last that
was begun before it was answered; whoever asks after another was answered never sees an earlier state than the other did
(linearizability: Herlihy and Wing, 1990, for one writer). The ledger itself is written down once more in `_next_state`.
"""

import itertools
import math
import random
from collections import defaultdict
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from swarm.clock import Clock
from swarm.errors import Unavailable
from swarm.types import Advice, NodeId, PolicyVersion

LEASE_S: Final = 30.0  # what `CoordinatorCore` grants
MAX_UNANSWERED: Final = 8  # batches of one lineage, each of which may have been carried out or not
_NEVER: Final = 2**62


@dataclass(kw_only=True)
class Call:
    """One call: its place in the order of all invocations and answers, and when."""

    invoked: int
    invoked_s: float  # wall clock, as the next
    answered: int = _NEVER  # never: the outcome is unknown
    answered_s: float = math.inf

    @property
    def is_answered(self) -> bool:
        return self.answered < _NEVER


@dataclass(kw_only=True)
class RecordCall(Call):
    """Versions that an owner handed in."""

    versions: tuple[PolicyVersion, ...]
    accepted: tuple[bool, ...] = ()  # unknown where it was not answered; empty: its answers were not looked at


@dataclass(kw_only=True)
class HeadCall(Call):
    """The head of a lineage, as the status page shows it."""

    head: PolicyVersion | None = None


@dataclass(kw_only=True)
class BeatCall(Call):
    """A heartbeat of a node, and the advice it got."""

    node_id: NodeId
    advice: Advice | None = None


@dataclass(kw_only=True)
class MembersCall(Call):
    """The table of members, and whether each was live."""

    members: dict[NodeId, bool] = field(default_factory=dict[NodeId, bool])


@dataclass(kw_only=True)
class ManifestCall(Call):
    """The serial of the run's manifest."""

    serial: int = 0


@dataclass(kw_only=True)
class Watch(Call):
    """A watch of the heads of a lineage; `answered` is its end."""

    history: "CoordinatorHistory"
    heads: list[tuple[int, PolicyVersion]] = field(default_factory=list[tuple[int, PolicyVersion]])  # when, which
    is_waiting: bool = True  # for the next head; False while its reader does something else

    @contextmanager
    def seeing(self, head: PolicyVersion) -> Generator[None]:
        """While the reader of the watch has a head that arrived."""
        self.heads.append((self.history.tick(), head))
        self.is_waiting = False
        yield
        self.is_waiting = True


State = tuple[tuple[PolicyVersion, ...], int]  # versions of the branch in force by step, and where the owner is


class CoordinatorHistory:
    """Records calls and judges them at the end.

    Example:
        with history.record(owner, versions) as call:
            call.accepted = ...  # an exception leaves the outcome unknown
        assert not history.violations()
    """

    def __init__(self, clock: Clock, lease_s: float = LEASE_S, is_prompt: bool = False) -> None:
        """`is_prompt`: what is on its way arrives before time goes on, as on virtual time."""
        self._clock = clock
        self._is_prompt = is_prompt
        self._lease_s = lease_s
        self._order = itertools.count(1)
        self._records: dict[str, list[RecordCall]] = defaultdict(list)  # by lineage, as the rest
        self._heads: dict[str, list[HeadCall]] = defaultdict(list)
        self._watches: dict[str, list[Watch]] = defaultdict(list)
        self._beats: dict[NodeId, list[BeatCall]] = defaultdict(list)
        self._leaves: dict[NodeId, list[Call]] = defaultdict(list)
        self._members: list[MembersCall] = []
        self._manifests: list[ManifestCall] = []
        self.num_calls = 0

    # --- recording -------------------------------------------------------------------------------

    def tick(self) -> int:
        """The next place in the order of everything."""
        return next(self._order)

    @contextmanager
    def record(self, owner: NodeId, versions: Sequence[PolicyVersion]) -> Generator[RecordCall]:
        """While an owner hands in versions."""
        call = RecordCall(invoked=self.tick(), invoked_s=self._clock.now_s(), versions=tuple(versions))
        self._records[owner].append(call)
        with self._answering(call):
            yield call

    @contextmanager
    def read_head(self, policy_id: str) -> Generator[HeadCall]:
        """While somebody reads the head of a lineage."""
        call = HeadCall(invoked=self.tick(), invoked_s=self._clock.now_s())
        with self._answering(call):
            yield call
        self._heads[policy_id].append(call)

    @contextmanager
    def heartbeat(self, node_id: NodeId) -> Generator[BeatCall]:
        """While a node reports."""
        call = BeatCall(invoked=self.tick(), invoked_s=self._clock.now_s(), node_id=node_id)
        self._beats[node_id].append(call)
        with self._answering(call):
            yield call

    @contextmanager
    def leave(self, node_id: NodeId) -> Generator[Call]:
        """While a node leaves."""
        call = Call(invoked=self.tick(), invoked_s=self._clock.now_s())
        self._leaves[node_id].append(call)
        with self._answering(call):
            yield call

    @contextmanager
    def list_members(self) -> Generator[MembersCall]:
        """While somebody reads the table of members."""
        call = MembersCall(invoked=self.tick(), invoked_s=self._clock.now_s())
        with self._answering(call):
            yield call
        self._members.append(call)

    @contextmanager
    def read_manifest(self) -> Generator[ManifestCall]:
        """While somebody reads the manifest."""
        call = ManifestCall(invoked=self.tick(), invoked_s=self._clock.now_s())
        with self._answering(call):
            yield call
        self._manifests.append(call)

    @contextmanager
    def watch(self, policy_id: str) -> Generator[Watch]:
        """While somebody watches a lineage."""
        watch = Watch(invoked=self.tick(), invoked_s=self._clock.now_s(), history=self)
        self._watches[policy_id].append(watch)
        try:
            yield watch
        except Unavailable:
            watch.is_waiting = False  # the coordinator ended it, also for a head that was not read yet
            raise
        finally:
            watch.answered, watch.answered_s = self.tick(), self._clock.now_s()

    @contextmanager
    def _answering(self, call: Call) -> Generator[None]:
        self.num_calls += 1
        yield
        call.answered, call.answered_s = self.tick(), self._clock.now_s()

    # --- judging ---------------------------------------------------------------------------------

    def violations(self) -> list[str]:
        """What no coordinator could have answered, also to the watches that are still open now."""
        found: list[str] = []
        for policy_id in {**self._records, **self._heads, **self._watches}:
            found += self._judge_lineage(policy_id)
        return found + self._judge_members() + self._judge_advice() + self._judge_manifests()

    def _judge_lineage(self, policy_id: str) -> list[str]:
        records = self._records[policy_id]
        unknown = [call for call in records if not call.is_answered][-MAX_UNANSWERED:]
        best, now_s = (-1, ""), self._clock.now_s()
        watches = self._watches[policy_id]
        due = [watch for watch in watches if self._is_prompt or not watch.is_answered]
        due = [watch for watch in due if watch.heads or self._opened_s(watch) < min(watch.answered_s, now_s)]
        for outcomes in itertools.product((True, False), repeat=len(unknown)):
            undone = {id(call) for call, is_done in zip(unknown, outcomes, strict=True) if not is_done}
            explanation = _Explanation(records, undone)
            problem = explanation.judge(self._heads[policy_id], watches)
            problem = problem or explanation.judge_ends(due, now_s)
            if not problem:
                return []
            best = max(best, (explanation.num_explained, problem))
        return [f"lineage {policy_id[:8]}: {best[1]}"]

    def _opened_s(self, watch: Watch) -> float:
        """When a watch that has shown nothing yet was open at the latest: no batch that was begun before it, of any
        lineage, is written any more. The coordinator writes batches in the order in which they were begun, one at a
        time, so a batch whose caller died is over when a later one is answered."""
        batches = [call for calls in self._records.values() for call in calls]
        last = max((call.invoked for call in batches if call.invoked < watch.invoked), default=_NEVER)
        return min((call.answered_s for call in batches if call.invoked >= last), default=-math.inf)

    def _judge_members(self) -> list[str]:
        found: list[str] = []
        for call in self._members:
            for node_id in set(call.members) - set(self._beats):
                found.append(f"{node_id[:8]} is a member and never reported")
            for node_id, beats in self._beats.items():
                is_live = call.members.get(node_id)
                known = [beat for beat in beats if beat.answered < call.invoked]
                begun = [beat for beat in beats if beat.invoked < call.answered]
                left = [leave for leave in self._leaves[node_id] if leave.invoked < call.answered]
                was_left = any(leave.answered_s >= known[-1].invoked_s for leave in left) if known else False
                if is_live is None and known:
                    found.append(f"{node_id[:8]} reported, was answered, and is no member")
                since_s = call.answered_s - known[-1].invoked_s if known else math.inf
                if is_live is False and not was_left and since_s < self._lease_s:
                    found.append(f"{node_id[:8]} is not live {since_s:.1f} s after its last report")
                last_s = max((min(beat.answered_s, call.answered_s) for beat in begun), default=-math.inf)
                if is_live and call.invoked_s >= last_s + self._lease_s:
                    found.append(f"{node_id[:8]} is live {call.invoked_s - last_s:.1f} s after its last report")
        return found

    def _judge_manifests(self) -> list[str]:
        found: list[str] = []
        for call in self._manifests:
            newest = max((other.serial for other in self._manifests if other.answered < call.invoked), default=0)
            if call.serial < newest:
                found.append(f"a manifest of serial {call.serial} after one of {newest}")
        return found

    def _judge_advice(self) -> list[str]:
        found: list[str] = []
        for beat in itertools.chain.from_iterable(self._beats.values()):
            advice = beat.advice
            if advice is None:
                continue
            if advice.max_age_steps is not None and advice.max_age_steps < 1:
                found.append(f"{beat.node_id[:8]} was advised an age of {advice.max_age_steps} steps")
            if not all(0.0 <= weight <= 1.0 for weight in advice.source_weights.values()):
                found.append(f"{beat.node_id[:8]} was advised weights outside 0 to 1")
        return found


class UnrulyOwner:
    """Versions as an owner may hand them in: new ones, the same again, earlier ones, and others of a known step."""

    def __init__(self, policy_id: str, rng: random.Random) -> None:
        self._policy_id = policy_id
        self._rng = rng
        self._known: list[PolicyVersion] = []

    def versions(self) -> list[PolicyVersion]:
        """The next batch."""
        return [self._version() for _ in range(self._rng.choice([1, 1, 1, 2, 4]))]

    def _version(self) -> PolicyVersion:
        known, kind = self._rng.choice(self._known[-6:] or [None]), self._rng.random()
        if known is not None and kind < 0.3:
            return known  # a retry, or a rewind
        step = 0 if known is None else known.step if kind < 0.45 else self._known[-1].step + self._rng.choice([1, 1, 2])
        self._known.append(PolicyVersion(policy_id=self._policy_id, step=step, digest=self._rng.randbytes(32)))
        return self._known[-1]


def _next_state(state: State, version: PolicyVersion) -> tuple[State, bool]:
    """The ledger's rules: the state after an owner handed in a version, and whether it was accepted.

    A version of the branch in force: the owner is there now. A step beyond where the owner is: what came after that
    place is replaced. Anything else, a fork or a step that was never recorded, changes nothing.
    """
    versions, at = state
    if version in versions:
        return (versions, version.step), True
    if version.step > at:
        return ((*(known for known in versions if known.step <= at), version), version.step), True
    return state, False


class _Explanation:
    """One way in which the calls of a lineage may have been carried out."""

    def __init__(self, records: Sequence[RecordCall], undone: set[int]) -> None:
        self._states: list[State] = [((), -1)]  # after each version, as each batch went in
        self._ends: list[int] = [0]  # places of the states between two batches
        self._batches: list[tuple[RecordCall, int]] = []  # and the place after each
        self.num_explained = 0
        self._problem = ""
        for call in records:
            answers: list[bool] = []
            for version in () if id(call) in undone else call.versions:
                state, is_accepted = _next_state(self._states[-1], version)
                self._states.append(state)
                answers.append(is_accepted)
            if call.is_answered and call.accepted and tuple(answers) != call.accepted and not self._problem:
                self._problem = f"{_named(call.versions)} were answered {call.accepted}, expected {tuple(answers)}"
            self._ends.append(len(self._states) - 1)
            self._batches.append((call, self._ends[-1]))
            self.num_explained += not self._problem

    def judge(self, heads: Sequence[HeadCall], watches: Sequence[Watch]) -> str:
        """The first answer that this way does not explain; empty where it explains all."""
        if self._problem:
            return self._problem
        seen: list[tuple[int, int]] = []  # when something was seen, and the place of the least state that it shows
        before: dict[int, int] = {}  # by watch: the place of the last head that it showed
        for answered, invoked, watch, shown in self._observations(heads, watches):
            least = max([self._answered_before(invoked), *(at for when, at in seen if when < invoked)])
            most = self._begun_before(answered)
            if watch is None:
                places = (at for at in self._ends if least <= at <= most and self._states[at][0][-1:] == shown)
            else:
                least = max(least, before.get(watch, 0))
                places = (at for at in range(least, most + 1) if self._states[at][0][-1:] == shown)
            found = next(places, None)
            if found is None:
                what = "the status page" if watch is None else "a watch"
                branch = f"the branch went from {self._named(least)} to {self._named(most)}"
                return f"{what} showed {_named(shown) or 'nothing'} where {branch}"
            seen.append((answered, found))
            if watch is not None:
                before[watch] = found
            self.num_explained += 1
        return ""

    def _observations(
        self, heads: Sequence[HeadCall], watches: Sequence[Watch]
    ) -> list[tuple[int, int, int | None, tuple[PolicyVersion, ...]]]:
        """When it was answered and invoked, number of the watch, and the head, in the order of the answers."""
        shown: list[tuple[int, int, int | None, tuple[PolicyVersion, ...]]] = [
            (call.answered, call.invoked, None, () if call.head is None else (call.head,)) for call in heads
        ]
        for number, watch in enumerate(watches):
            shown += [(when, watch.invoked, number, (head,)) for when, head in watch.heads]
        return sorted(shown, key=lambda one: one[0])

    def judge_ends(self, watches: Sequence[Watch], now_s: float) -> str:
        """A watch that waited for the next head, and had not shown the last one that there was; empty for none."""
        for watch in watches:
            end_s = min(watch.answered_s, now_s)
            begun = [call for call, _ in self._batches if call.invoked < watch.answered]
            if not watch.is_waiting or not all(call.answered_s < end_s for call in begun):
                continue  # the last one may be on its way
            head = self._states[self._answered_before(watch.answered)][0][-1:]
            last = tuple(shown for _, shown in watch.heads[-1:])
            if head and last != head:
                return f"a watch missed {_named(head)}: the last that it showed is {_named(last) or 'none'}"
        return ""

    def _answered_before(self, when: int) -> int:
        return max((at for call, at in self._batches if call.answered < when), default=0)

    def _begun_before(self, when: int) -> int:
        return max((at for call, at in self._batches if call.invoked < when), default=0)

    def _named(self, place: int) -> str:
        return _named(self._states[place][0]) or "nothing"


def _named(versions: Sequence[PolicyVersion]) -> str:
    return " ".join(f"{version.step}:{version.digest.hex()[:4]}" for version in versions)
