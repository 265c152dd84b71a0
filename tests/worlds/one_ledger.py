"""Judge of a coordinator's history: the answers have to be those of one ledger and one table of members.

Invariant: only the record of the callers is judged. A watch begins with the head when the batches that were begun
before it, by any owner, are written: until then it owes nothing.

A lineage has one owner, who records one batch after another, so its ledger is a sequence of states. Every answer to
anybody else has to be that of a state between the last batch that was answered before the question and the last batch
that was begun before the answer; a caller that asks after another one was answered never sees an earlier state
(linearizability: Herlihy and Wing, 1990, for one writer). `_next_state` states the ledger's rules once more.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Final

from swarm.simulate.coordinator_history import NEVER, CoordinatorHistory, HeadCall, RecordCall, Watch
from swarm.types import PolicyVersion

MAX_UNANSWERED: Final = 8  # batches of one lineage, each of which may have been carried out or not

State = tuple[tuple[PolicyVersion, ...], int]  # versions of the branch in force by step, and where the owner is


def violations(history: CoordinatorHistory) -> list[str]:
    """Answers that no coordinator could have given, those of watches that are still open included."""
    return _Judge(history).violations()


class _Judge:
    def __init__(self, history: CoordinatorHistory) -> None:
        self._history = history

    def violations(self) -> list[str]:
        found: list[str] = []
        for policy_id in {**self._history.records, **self._history.heads, **self._history.watches}:
            found += self._judge_lineage(policy_id)
        return found + self._judge_members() + self._judge_advice() + self._judge_manifests()

    def _judge_lineage(self, policy_id: str) -> list[str]:
        records = self._history.records[policy_id]
        unknown = [call for call in records if not call.is_answered][-MAX_UNANSWERED:]
        best, now_s = (-1, ""), self._history.clock.now_s()
        watches = self._history.watches[policy_id]
        due = [watch for watch in watches if self._history.is_prompt or not watch.is_answered]
        due = [watch for watch in due if watch.heads or self._opened_s(watch) < min(watch.answered_s, now_s)]
        for outcomes in itertools.product((True, False), repeat=len(unknown)):
            undone = {id(call) for call, is_done in zip(unknown, outcomes, strict=True) if not is_done}
            explanation = _Explanation(records, undone)
            problem = explanation.judge(self._history.heads[policy_id], watches)
            problem = problem or explanation.judge_ends(due, now_s)
            if not problem:
                return []
            best = max(best, (explanation.num_explained, problem))
        return [f"lineage {policy_id[:8]}: {best[1]}"]

    def _opened_s(self, watch: Watch) -> float:
        """When a watch that has shown nothing yet was open at the latest: no batch that was begun before it, of any
        lineage, is written any more. The coordinator writes batches in the order in which they were begun, one at a
        time, so a batch whose caller died is over when a later one is answered."""
        batches = [call for calls in self._history.records.values() for call in calls]
        last = max((call.invoked for call in batches if call.invoked < watch.invoked), default=NEVER)
        return min((call.answered_s for call in batches if call.invoked >= last), default=-math.inf)

    def _judge_members(self) -> list[str]:
        found: list[str] = []
        for call in self._history.members:
            for node_id in set(call.members) - set(self._history.beats):
                found.append(f"{node_id[:8]} is a member and never reported")
            for node_id, beats in self._history.beats.items():
                is_live = call.members.get(node_id)
                known = [beat for beat in beats if beat.answered < call.invoked]
                begun = [beat for beat in beats if beat.invoked < call.answered]
                left = [leave for leave in self._history.leaves[node_id] if leave.invoked < call.answered]
                was_left = any(leave.answered_s >= known[-1].invoked_s for leave in left) if known else False
                if is_live is None and known:
                    found.append(f"{node_id[:8]} reported, was answered, and is no member")
                since_s = call.answered_s - known[-1].invoked_s if known else math.inf
                if is_live is False and not was_left and since_s < self._history.lease_s:
                    found.append(f"{node_id[:8]} is not live {since_s:.1f} s after its last report")
                last_s = max((min(beat.answered_s, call.answered_s) for beat in begun), default=-math.inf)
                if is_live and call.invoked_s >= last_s + self._history.lease_s:
                    found.append(f"{node_id[:8]} is live {call.invoked_s - last_s:.1f} s after its last report")
        return found

    def _judge_manifests(self) -> list[str]:
        found: list[str] = []
        for call in self._history.manifests:
            newest = max(
                (other.serial for other in self._history.manifests if other.answered < call.invoked), default=0
            )
            if call.serial < newest:
                found.append(f"a manifest of serial {call.serial} after one of {newest}")
        return found

    def _judge_advice(self) -> list[str]:
        found: list[str] = []
        for beat in itertools.chain.from_iterable(self._history.beats.values()):
            advice = beat.advice
            if advice is None:
                continue
            if advice.max_age_steps is not None and advice.max_age_steps < 1:
                found.append(f"{beat.node_id[:8]} was advised an age of {advice.max_age_steps} steps")
            if not all(0.0 <= weight <= 1.0 for weight in advice.source_weights.values()):
                found.append(f"{beat.node_id[:8]} was advised weights outside 0 to 1")
        return found


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
