"""Invariants of a run, checked from the nodes' own events while they happen.

Invariant: the checks know only events, so that the same ones judge a virtual swarm, a swarm of processes, and a
recorded event file; a virtual swarm also shows them the groups that are sent, and the calls of the coordinator.

Safety is checked at each event, while faults go on (every `_violate` of `check`, `sent`, `bound`). Liveness (PROGRESS)
is checked in `finish` alone: each live node made a step, and another one after `healed` if that was called.
"""

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from swarm.events import (
    DrawsAbandoned,
    Event,
    GroupAdmitted,
    GroupGivenUp,
    GroupPut,
    GroupRefused,
    GroupsDrawn,
    GroupUse,
    LoopFailed,
    NodeRestored,
    StepMade,
    StoreDamaged,
    VersionPublished,
    WorkerDied,
)
from swarm.trust_policy import SHARE, WINDOW
from swarm.types import Cursor, NodeId, SealedGroup

_MAX_ABANDONED = 1024  # ranges of lost draws of a node; one comes with each loss of a journal

Named = tuple[str, NodeId, int, str]  # lineage, producer of the group, step, digest of the weights


@dataclass(frozen=True, kw_only=True)
class InvariantVerdict:
    """Verdict on one invariant of a run."""

    name: str
    holds: bool
    detail: str


@dataclass
class Invariants:
    """Checks the events of nodes, in order for each node; `verdicts` lists which invariants held."""

    violations: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    _put: dict[NodeId, set[str]] = field(default_factory=lambda: defaultdict(set))
    _admitted: dict[NodeId, set[str]] = field(default_factory=lambda: defaultdict(set))
    _drawn: dict[NodeId, dict[int, tuple[str, ...]]] = field(default_factory=lambda: defaultdict(dict))
    _uses: dict[NodeId, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    members: frozenset[NodeId] = frozenset()  # of an open run: whoever else made a group is a newcomer
    honest: frozenset[NodeId] = frozenset()  # nodes of which nothing may be refused that they can be blamed for
    known: frozenset[NodeId] | None = None  # whose events are here from the first one on; None: everybody's
    repeats_exactly: bool = False  # a step made again after a restart has the same weights, bit for bit
    _steps: dict[NodeId, dict[int, str]] = field(default_factory=lambda: defaultdict(dict))
    _made: dict[NodeId, dict[int, tuple[int, str]]] = field(default_factory=lambda: defaultdict(dict))  # draw, digest
    _abandoned: dict[NodeId, deque[range]] = field(  # draws; ranges, as the log of a stranger may name any number
        default_factory=lambda: defaultdict(lambda: deque(maxlen=_MAX_ABANDONED))
    )
    _num_steps: Counter[NodeId] = field(default_factory=Counter)
    _num_steps_before: Counter[NodeId] | None = None
    _num_repeated: int = 0
    _num_draws: int = 0
    _places: dict[NodeId, deque[tuple[int, int]]] = field(default_factory=lambda: defaultdict(deque))
    _num_consumed: int = 0
    _num_of_newcomers: int = 0
    _num_of_strangers: int = 0  # groups consumed, of nodes whose events are not here
    _max_age: int = 0
    _published: dict[str, dict[int, set[str]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(set)))
    _named: dict[Named, str] = field(default_factory=dict["Named", str])  # where each version was named first
    _num_named: int = 0
    _num_reach: Counter[str] = field(default_factory=Counter)  # checks, by the invariant that they were of
    _num_judged: Counter[str] = field(default_factory=Counter)  # draws, by the invariant that they were judged by
    _num_journals_lost: int = 0
    _places_of: dict[tuple[NodeId, str, int], str] = field(default_factory=dict[tuple[NodeId, str, int], str])
    _num_sent: int = 0
    _num_calls: int = 0  # of the coordinator, whose answers were checked

    def check(self, node: NodeId, event: Event) -> None:
        """Checks one event of a node."""
        match event:
            case GroupAdmitted():
                self._admitted[node].add(event.digest)
                self._note_versions(node, event, "admitted")
            case GroupPut():
                self._put[node].add(event.digest)
                self._note_versions(node, event, "put")
            case GroupRefused():
                if event.producer in self.honest and event.reason in BLAMED:
                    self._violate(HONEST, f"{node[:8]} refused a group of {event.producer[:8]}: {event.reason}")
            case GroupsDrawn():
                self._check_draw(node, event)
            case StepMade():
                self._check_step(node, event)
            case VersionPublished():
                self._published[event.policy_id][event.step].add(event.digest)
            case NodeRestored():
                for digest, is_made_here in event.held:
                    (self._put if is_made_here else self._admitted)[node].add(digest)
            case DrawsAbandoned():
                self._abandon(node, event.first, event.last)
            case StoreDamaged():
                self._forget_draws(node)
            case GroupGivenUp():  # the steps of this draw, and of those after it, are made without the group
                draw = event.draw_step
                self._steps[node] = {each: digest for each, digest in self._steps[node].items() if each < draw}
                self._made[node] = {step: made for step, made in self._made[node].items() if made[0] < draw}
            case LoopFailed():
                self._violate(NO_FAILURE, f"{node[:8]}: {event.loop}: {event.error}")
            case WorkerDied():
                self._violate(NO_FAILURE, f"{node[:8]}: worker ended with exit code {event.exit_code}")
            case _:
                pass  # no invariant follows from it

    def _note_versions(self, node: NodeId, group: GroupPut | GroupAdmitted, what: str) -> None:
        """Keeps the versions that a group names for `finish`: events of several processes come in no exact order."""
        for step, digest in group.versions:
            named = (group.policy_id, group.producer, step, digest)
            if named not in self._named:
                self._named[named] = f"{node[:8]}: {what} group {group.digest[:8]}"

    def _check_versions(self) -> None:
        """Checks that the kept versions existed. Versions of a lineage outside the run are not judged."""
        for (policy, producer, step, digest), where in self._named.items():
            published = self._published.get(policy)
            if published is None or not self._knows(policy):
                continue
            self._num_named += 1
            # its owner generates with a version from the end of the step on; a kill may come before it is published
            is_unpublished = producer == policy and step not in published and step - 1 in published
            if digest not in published.get(step, ()) and not is_unpublished:
                self._violate(EXISTED, f"{where}: version {step} of {policy[:8]} with weights {digest or 'unnamed'}")
        self._named.clear()

    def _check_step(self, node: NodeId, made: StepMade) -> None:
        self._num_steps[node] += 1
        draw = made.draw_step
        self._num_repeated += draw in self._steps[node]
        known = self._steps[node].setdefault(draw, made.digest)
        if not self.repeats_exactly:
            return
        if known != made.digest:
            self._violate(REPEAT, f"{node[:8]}: step {made.step} was made again and became another")
        if draw not in self._drawn[node]:
            self._violate(REPEAT, f"{node[:8]}: step {made.step} was never drawn for")
        if any(draw in each for each in self._abandoned[node]):
            self._violate(REPEAT, f"{node[:8]}: step {made.step} was made from an abandoned draw")
        _, claimed = self._made[node].setdefault(made.step, (draw, made.digest))
        if claimed != made.digest:
            self._violate(REPEAT, f"{node[:8]}: step {made.step} became another without a DrawsAbandoned event")

    def _abandon(self, node: NodeId, first: int, last: int) -> None:
        """Notes that a node cannot repeat these draws, so that other draws may make their steps."""
        self._abandoned[node].append(range(first, last + 1))
        self._made[node] = {step: made for step, made in self._made[node].items() if made[0] < first}

    def _forget_draws(self, node: NodeId) -> None:
        """Forgets the draws of a node that lost its journal: numbers of draws and groups may be used again."""
        for of_nodes in (self._drawn, self._uses, self._steps, self._made, self._abandoned, self._places):
            of_nodes.pop(node, None)
        self._num_journals_lost += 1

    def sent(self, node: NodeId, sealed: SealedGroup) -> None:
        """Checks the bytes of a group that an honest node sends."""
        self._num_sent += 1
        if hashlib.sha256(sealed.body).digest() != sealed.digest:
            self._violate(SENT_WHOLE, f"{node[:8]} sent group {sealed.digest.hex()[:8]} with other bytes")

    def placed(self, node: NodeId, at: Cursor, digest: str) -> None:
        """Checks that a position in the log of a node has only ever been that of one group."""
        known = self._places_of.setdefault((node, at.epoch, at.sequence), digest)
        if known != digest:
            what = f"position {at.sequence} of its log is that of groups {known[:8]} and {digest[:8]}"
            self._violate(ONE_PLACE, f"{node[:8]}: {what}")

    def coordinator(self, violations: Sequence[str], num_calls: int) -> None:
        """Adds violations that were found in the answers of the coordinator. `num_calls`: calls checked in all."""
        self._num_calls = num_calls
        for violation in violations:
            self._violate(COORDINATED, violation)

    def _check_draw(self, node: NodeId, draw: GroupsDrawn) -> None:
        self._num_draws += 1
        digests = tuple(group.digest for group in draw.groups)
        if draw.draw_step in self._drawn[node]:
            self._violate(ONCE, f"{node[:8]}: draw {draw.draw_step} was made twice")
        self._drawn[node][draw.draw_step] = digests
        if len(set(digests)) != len(digests):
            self._violate(ONCE, f"{node[:8]}: draw {draw.draw_step} holds a group twice")
        for group in draw.groups:
            self._num_consumed += 1
            self._check_group(node, draw, group)
        if self.members:
            self._check_shares(node, draw)

    def _check_shares(self, node: NodeId, draw: GroupsDrawn) -> None:
        """Checks that newcomers got at most one in SHARE of the places for others' groups.

        The share counts over this draw and any number of draws before it within the window.
        """
        places = self._places[node]  # of each draw: how many, and how many of them are newcomers'
        num_newcomers = sum(group.producer != node and group.producer not in self.members for group in draw.groups)
        self._num_of_newcomers += num_newcomers
        places.append((draw.num_places, num_newcomers))
        while sum(count for count, _ in places) > WINDOW + draw.num_places:
            places.popleft()
        total = taken = 0
        for count, of_newcomers in reversed(places):
            total, taken = total + count, taken + of_newcomers
            if taken > -(-total // SHARE):
                self._violate(SHARES, f"{node[:8]}: draw {draw.draw_step}: {taken} of {total} places are newcomers'")
                break

    def _check_group(self, node: NodeId, draw: GroupsDrawn, group: GroupUse) -> None:
        digest, age, producer = group.digest, group.age_steps, group.producer
        uses, is_made_here = self._uses[node], producer == node
        uses[digest] += 1
        self._max_age = max(self._max_age, age)
        self._num_of_strangers += not self._knows(producer)
        violations: list[tuple[str, str]] = []
        if uses[digest] > draw.max_reuse:
            violations.append((REUSE, f"use {uses[digest]} of at most {draw.max_reuse}"))
        if age > draw.max_age_steps:
            violations.append((AGE, f"age {age} steps exceeds {draw.max_age_steps}"))
        if group.is_own_policy != (group.policy_id == node):
            violations.append((ADMITTED, "wrong lineage"))
        if self._knows(node) and is_made_here and digest not in self._put[node]:
            violations.append((ADMITTED, "own group was never stored"))
        if self._knows(node) and not is_made_here and digest not in self._admitted[node]:
            violations.append((ADMITTED, "group of another node was never admitted"))
        if not is_made_here and self._put and self._knows(producer) and digest not in self._put[producer]:
            violations.append((ADMITTED, "its producer never made it"))
        for name, what in violations:
            self._violate(name, f"{node[:8]}: draw {draw.draw_step}, group {digest[:8]}: {what}")

    def finish(
        self,
        steps: Mapping[NodeId, int],
        dead: frozenset[NodeId] = frozenset(),
        excused: frozenset[NodeId] = frozenset(),
    ) -> None:
        """Checks versions and progress after the run, or so far.

        Args:
            steps: the head step of every node that trains.
            dead: nodes that were killed for good.
            excused: nodes that had no time, or no groups, for a first step; after `healed` they must make one, too.
        """
        self._check_versions()
        for node, step in steps.items():
            if node in dead:
                continue
            has_begun = step > 0 or self._num_steps[node] > 0  # one that lost its disk at the end begins anew
            if not has_begun and node not in excused:
                self._violate(PROGRESS, f"{node[:8]} made no optimizer step")
            elif self._num_steps_before is not None and self._num_steps[node] == self._num_steps_before[node]:
                self._violate(PROGRESS, f"{node[:8]} made no optimizer step after every fault had healed")

    def healed(self) -> None:
        """Notes that all faults are over: every live node has to make a step before `finish`."""
        self._num_steps_before = self._num_steps.copy()

    def bound(self, node: NodeId, what: str, value: float, limit: float) -> None:
        """Checks a buffer's fill against its bound."""
        if value > limit:
            self._violate(BOUNDS, f"{node[:8]}: {what} {value} exceeds {limit}")

    def learned(self, node: NodeId, draw: int, name: str, wrong: Sequence[str]) -> None:
        """Counts a draw as judged by the invariant `name`, and adds its violations (`wrong`)."""
        self._num_judged[name] += 1
        for what in wrong:
            self._violate(name, f"{node[:8]}: draw {draw}: {what}")

    def reach(self, name: str, wrong: str = "") -> None:
        """Counts a check of the invariant `name` on nodes that cannot be dialled; `wrong` is its violation, if any."""
        self._num_reach[name] += 1
        if wrong:
            self._violate(name, wrong)

    def _knows(self, node: NodeId) -> bool:
        return self.known is None or node in self.known

    def _violate(self, name: str, detail: str) -> None:
        self.violations[name].append(detail)

    def verdicts(self) -> list[InvariantVerdict]:
        """Verdict on every invariant that was checked, with the first three violations or with counts."""
        num_abandoned = sum(max(0, each.stop - each.start) for of in self._abandoned.values() for each in of)
        shares = [SHARES] if self.members else []
        learned = list(self._num_judged)
        honest = [HONEST] if self.honest else []
        seen = [SENT_WHOLE] if self._num_sent else []
        seen += [ONE_PLACE] if self._places_of else []
        seen += [COORDINATED] if self._num_calls else []
        reach = [REACHED, RESUMED, RELAY_BUDGET, ADVERTISED] if self._num_reach else []
        details = {
            REUSE: f"{self._num_consumed} groups consumed in {self._num_draws} draws",
            AGE: f"oldest consumed: {self._max_age} steps",
            SHARES: f"{self._num_of_newcomers} groups of newcomers consumed",
            ADMITTED: f"{self._num_of_strangers} of nodes whose events are not here" if self._num_of_strangers else "",
            **{name: f"{count} draws looked through" for name, count in self._num_judged.items()},
            EXISTED: f"{self._num_named} versions named, by producer",
            ONCE: f"{self._num_journals_lost} journals lost and announced" if self._num_journals_lost else "",
            REPEAT: f"{self._num_repeated} steps made again, {num_abandoned} draws lost and announced"
            if num_abandoned
            else f"{self._num_repeated} steps made again",
            SENT_WHOLE: f"{self._num_sent} groups sent",
            ONE_PLACE: f"{len(self._places_of)} positions",
            COORDINATED: f"{self._num_calls} calls",
            **{name: f"{count} checks" for name, count in self._num_reach.items()},
        }
        return [
            InvariantVerdict(
                name=name,
                holds=not self.violations.get(name),
                detail="; ".join(self.violations.get(name, [])[:3]) or details.get(name, ""),
            )
            for name in (
                *(REUSE, AGE, *shares, ADMITTED, *honest, *learned, EXISTED, ONCE, REPEAT, *seen),
                *reach,
                *(PROGRESS, NO_FAILURE, BOUNDS),
            )
        ]

    @property
    def hold(self) -> bool:
        """True when nothing was violated."""
        return not any(self.violations.values())


REUSE = "no group consumed more often than max_reuse"
AGE = "no group older than max_age at consumption"
SHARES = "newcomers had at most an eighth of the places of others' groups"
ADMITTED = "every consumed group of another node was admitted (signature, re-checked reward)"
LEARNED = "every learned token of others is one that its answer shows, within the run's length"
WHOLE_EPISODES = "every learned episode is whole, and the one that its actions make in a fresh environment"
TRAINED = "every learned token is one that a model chose, and no observation was trained"
TURNS = "rewards and statuses of learned turns are those of an independent replay"
HONEST = "nothing that an honest node made was refused for what it holds"
EXISTED = "every rollout's spans name versions that existed"
ONCE = "no group counted twice"
REPEAT = "a step made again after a crash learned from the same draw"
SENT_WHOLE = "no honest node sent a group that its disk had changed"
ONE_PLACE = "a position in a node's log was never that of two groups"
COORDINATED = "the coordinator's answers are those of one ledger and one table of members"
REACHED = "what a node gives to who dials it comes through its relays where nobody can dial it"
RESUMED = "no stream began behind a group that its reader never got"
RELAY_BUDGET = "no relay held more reservations or connections than its budget"
ADVERTISED = "a reservation was advertised only while it was held"
PROGRESS = "every live node made optimizer steps"
NO_FAILURE = "no task or exception swallowed"
BOUNDS = "memory and buffers within their bounds"

BLAMED = frozenset(
    {
        *("malformed", "wrong_group_size", "held_out", "wrong_prompt", "wrong_episode", "other_environment"),
        *("text_mismatch", "bad_tokens", "unusable_text", "bad_logprobs", "bad_sampling", "false_reward"),
        *("unknown_environment", "unknown_task", "unusable_correction"),
    }
)
"""Reasons of refusals that depend neither on time nor on chance nor on the route of a group."""
