"""Tally of a node's events: the result of the node, from one pass over its log.

Invariant: memory grows with steps, groups and minutes, not with all events; a step or evaluation repeated after a
restart counts once, as it was made last, and a skipped step has its own row.
"""

import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain

from swarm.events import (
    ApplyFailed,
    EarlierRefusals,
    Event,
    GroupAdmitted,
    GroupPut,
    GroupRefused,
    GroupsDrawn,
    GroupStored,
    GroupUse,
    LoopFailed,
    NodeKilled,
    NodeRestarted,
    NodeRestored,
    NodeStarted,
    NodeStopped,
    OthersSetAside,
    PolicyEvaluated,
    StepMade,
    VersionApplied,
    VersionPublished,
    WorkerDied,
    groups_learned_from,
    kind_of,
)
from swarm.report.result import ContributionRow, MadeRow, NodeResult, StepRow, TurnsRow
from swarm.telemetry.shown_episodes import ShownEpisode
from swarm.types import FinishReason, JsonDict, NodeId

MARKS = (NodeKilled, NodeStopped, NodeRestarted, NodeRestored, WorkerDied, OthersSetAside)
_Stored = tuple[str, int, NodeId, str]  # environment, turns, producer, lineage


class NodeTally:
    """Counts a node's events, in order; `result` can be called at any time.

    Example:
        tally = NodeTally()
        for event in EventTail(path).stream():
            tally.add(event)
        result = tally.result("ada", status=status)
    """

    def __init__(self) -> None:
        self.node_id: NodeId = ""  # as its NodeStarted events say, or its own groups
        self.num_starts = 0
        self.is_whole = True
        self.began_at_s = self.ended_at_s = 0.0
        self._down_s = 0.0  # since its first group
        self._first_group_at_s = 0.0
        self._steps: dict[int, StepRow] = {}  # by draw
        self._stepped_at_s: dict[int, float] = {}
        self._evaluations: dict[tuple[int, str, str], PolicyEvaluated] = {}
        self._stored: dict[str, _Stored] = {}  # digest -> what it is, own and admitted
        self._draws: dict[int, GroupsDrawn] = {}
        self._consumed: dict[int, Iterable[GroupUse]] = {}  # draw -> what was learned from
        self._num_put = self._num_admitted = self._tokens_generated = self._bytes_useful = 0
        self._finishes = Counter[str]()
        self._made: dict[int, tuple[int, float, int]] = {}  # minute -> groups, sum of their rewards, tokens
        self._brought = Counter[NodeId]()  # groups, by producer
        self._brought_bytes = Counter[NodeId]()
        self._free_text = defaultdict[NodeId, float](float)  # sum of the shares
        self._compute_dtypes: dict[NodeId, str] = {}  # of the newest group
        self._curriculum: set[str] = set()
        self._refusals = Counter[str]()
        self._refused_of: dict[NodeId, Counter[str]] = defaultdict(Counter)
        self._refused_at: dict[str, Counter[int]] = defaultdict(Counter)
        self._seconds = Counter[str]()
        self._edges_kl: dict[NodeId, float] = {}
        self._versions: list[VersionApplied] = []
        self._num_not_taken = self._num_failures = 0
        self._marks: list[tuple[float, str]] = []
        self._release = self._first_weights = ""

    def add(self, event: Event) -> None:
        """Counts one event; ignores an event whose time, reward or accuracy is not finite."""
        figures = (event.at_s, getattr(event, "reward_mean", 0.0), getattr(event, "accuracy", 0.0))
        if not all(map(math.isfinite, figures)):
            return
        if not self.began_at_s:
            self.began_at_s, self.is_whole = event.at_s, not isinstance(event, EarlierRefusals)
        match event:
            case GroupPut():
                self._num_put += 1
                self.node_id = self.node_id or event.producer
                self._first_group_at_s = self._first_group_at_s or event.at_s
                self._tokens_generated += event.num_tokens
                self._finishes.update(event.finishes)
                num_groups, rewards, tokens = self._made.get(int(event.at_s // 60), (0, 0.0, 0))
                made = (num_groups + 1, rewards + event.reward_mean, tokens + event.num_tokens)
                self._made[int(event.at_s // 60)] = made
                self._curriculum.add(event.env)
                self._add_stored(event)
            case GroupAdmitted():
                self._num_admitted += 1
                self._bytes_useful += event.size_bytes
                self._add_stored(event)
            case GroupRefused() | EarlierRefusals():
                self._add_refused(event)
            case GroupsDrawn():
                self._draws[event.draw_step], self._consumed[event.draw_step] = event, event.groups
            case StepMade():
                self._add_step(event)
            case PolicyEvaluated():
                self._evaluations[event.step, event.env, event.split] = event
            case VersionPublished():
                self._first_weights = self._first_weights or event.digest
            case VersionApplied():
                self._versions.append(event)
            case ApplyFailed():
                self._num_not_taken += 1
            case NodeStarted():
                self.node_id, self._release = event.node_id, event.release
                self.num_starts += 1
                if self._first_group_at_s:
                    self._down_s += max(0.0, event.at_s - self.ended_at_s)
            case LoopFailed() | WorkerDied():
                self._num_failures += 1
            case _:
                pass  # no figure follows from it
        if isinstance(event, MARKS):
            is_over = isinstance(event, OthersSetAside) and event.is_over
            self._marks.append((event.at_s, "others used again" if is_over else kind_of(event)))
        self.ended_at_s = max(self.ended_at_s, event.at_s)

    def result(
        self,
        name: str,
        node_id: NodeId = "",
        curriculum: Sequence[str] = (),
        status: JsonDict | None = None,
        num_starts: int = 0,
        trains: bool = True,
        episodes: Sequence[ShownEpisode] = (),
    ) -> NodeResult:
        """Returns the result according to all events so far.

        Args:
            name: name of the node, for people.
            node_id: hex; if empty, that of the events, or else that of the status.
            curriculum: environments that the node generates for; if empty, those of its own groups.
            status: `Daemon.status()` as JSON, or an empty dict.
            num_starts: starts of the node's process; 0: as counted from the events.
            trains: True if the node has a learner.
            episodes: episodes to show, of the first and the newest evaluation.
        """
        status = status or {}
        own_id = node_id or self.node_id or str(status.get("node_id", ""))
        consumed = [group for groups in self._consumed.values() for group in groups]
        origins = Counter(group.origin for group in consumed)
        return NodeResult(
            name=name,
            node_id=own_id,
            curriculum=tuple(curriculum) or tuple(sorted(self._curriculum)),
            steps=tuple(self._steps[draw] for draw in sorted(self._steps)),
            evaluations=tuple(self._evaluations[key] for key in sorted(self._evaluations)),
            num_local=origins["local"] + origins["follower"],
            num_from_followers=origins["follower"],
            num_external=origins["external"],
            num_set_aside=sum(len(draw.groups) for draw in self._draws.values()) - len(consumed),
            num_zero_variance=sum(draw.num_zero_variance for draw in self._draws.values()),
            sources=dict(Counter(group.producer for group in consumed)),
            ages=_histogram(group.age_steps for group in consumed),
            ages_in_flight=_histogram(group.in_flight_steps for group in consumed),
            ages_in_queue=_histogram(group.age_steps - group.in_flight_steps for group in consumed),
            refusals=dict(self._refusals.most_common()),
            seconds=dict(self._seconds),
            tokens_generated=self._tokens_generated,
            generating_s=max(0.0, self.ended_at_s - self._first_group_at_s - self._down_s) if self._num_put else 0.0,
            num_generated=self._num_put,
            num_admitted=self._num_admitted,
            bytes_received=int(status.get("bytes_received", 0)),
            bytes_sent=int(status.get("bytes_sent", 0)),
            bytes_useful=self._bytes_useful,
            edges_kl=dict(self._edges_kl),
            num_starts=num_starts or self.num_starts,
            trains=trains,
            versions=tuple(self._versions),
            num_not_taken=self._num_not_taken,
            stepped_at_s=dict(self._stepped_at_s),
            num_failures=self._num_failures,
            learned_from=self._learned_from(consumed),
            episodes=tuple(episodes),
            by_turns=self._by_turns(own_id, consumed),
            exchange=dict(status.get("environments", {})),
            marks=tuple(self._marks),
            aside_at=self._aside_at(),
            release=self._release,
            first_weights=self._first_weights,
            contributions=self._contributions(consumed),
            refused_at={reason: dict(minutes) for reason, minutes in self._refused_at.items()},
            made=tuple(
                MadeRow(minute=minute, num_groups=num_groups, reward=rewards / num_groups, num_tokens=tokens)
                for minute, (num_groups, rewards, tokens) in sorted(self._made.items())
            ),
            num_responses=self._finishes.total(),
            num_cut_off=self._finishes[FinishReason.LENGTH],
            began_at_s=self.began_at_s,
            ended_at_s=self.ended_at_s,
            is_whole=self.is_whole,
        )

    # --- inside -------------------------------------------------------------------------------------------

    def _add_stored(self, event: GroupStored) -> None:
        producer = sys.intern(event.producer)
        self._stored[event.digest] = (sys.intern(event.env), event.num_turns, producer, sys.intern(event.policy_id))
        self._brought[producer] += 1
        self._brought_bytes[producer] += event.size_bytes
        self._free_text[producer] += event.free_text_share
        self._compute_dtypes[producer] = event.compute_dtype

    def _add_refused(self, event: GroupRefused | EarlierRefusals) -> None:
        if isinstance(event, GroupRefused):
            self._refusals[event.reason] += event.count
            self._refused_of[event.producer][event.reason] += event.count
            self._refused_at[event.reason][int(event.at_s // 60)] += event.count
            return
        before = Counter(event.refused) - self._refusals  # of files that are gone: nobody knows whose
        self._refusals = Counter(event.refused)
        if before:
            self._refused_of[""].update(before)

    def _add_step(self, step: StepMade) -> None:
        figures = {name: _measured(value) for name, value in step.diagnostics.items()}
        self._steps[step.draw_step] = StepRow(
            draw=step.draw_step,
            step=step.step,
            at_s=step.at_s,
            reward=figures.get("reward_mean"),
            loss=_measured(step.loss),
            grad_norm=_measured(step.grad_norm),
            num_tokens=step.num_tokens,
            was_skipped=step.was_skipped,
            age_mean_steps=figures.get("age_mean_steps"),
            ess_share=figures.get("ess_share"),
            mismatch_kl=figures.get("mismatch_kl_k3"),
            entropy_nats=figures.get("entropy_nats"),
            learning_rate=figures.get("learning_rate"),
            response_tokens=figures.get("response_tokens_mean"),
            cut_off_share=figures.get("cut_off_share"),
            num_local=step.num_local,
            num_external=step.num_external,
        )
        self._stepped_at_s[step.step] = step.at_s - step.seconds.get("publish", 0.0)
        self._seconds.update({phase: _measured(value) or 0.0 for phase, value in step.seconds.items()})
        self._edges_kl |= {edge.source: edge.mismatch_kl for edge in step.edges}
        draw = self._draws.get(step.draw_step)
        if draw is not None:
            self._consumed[step.draw_step] = tuple(groups_learned_from(draw, step))

    def _aside_at(self) -> tuple[tuple[int, int], ...]:
        """(step, groups that were drawn for it and not learned from) of each step that left groups out."""
        counts = [
            (self._steps[draw].step, len(event.groups) - len(tuple(self._consumed[draw])))
            for draw, event in self._draws.items()
            if draw in self._steps
        ]
        return tuple((step, count) for step, count in counts if count)

    def _learned_from(self, consumed: Sequence[GroupUse]) -> dict[str, tuple[int, int]]:
        """Environment -> groups learned from, of the own policy and of others; without groups that no event stored."""
        counts = Counter(
            (self._stored[use.digest][0], use.is_own_policy) for use in consumed if use.digest in self._stored
        )
        return {env: (counts[env, True], counts[env, False]) for env in sorted({env for env, _ in counts})}

    def _by_turns(self, own_id: NodeId, consumed: Sequence[GroupUse]) -> tuple[TurnsRow, ...]:
        """Rows of the groups of the own lineage, and of all groups that the node made, by number of turns."""
        turns_of = {
            digest: turns
            for digest, (_, turns, producer, policy_id) in self._stored.items()
            if own_id in (producer, policy_id)
        }
        learned_from, without_signal, too_old = {use.digest for use in consumed}, set[str](), set[str]()
        for draw in self._draws.values():
            without_signal.update(draw.zero_variance)
            too_old.update(draw.too_old)

        def count(digests: Iterable[str]) -> Counter[int]:
            return Counter(turns_of[digest] for digest in digests if digest in turns_of)

        num_made, num_learned_from = count(turns_of), count(learned_from)
        num_without_signal, num_too_old = count(without_signal), count(too_old - learned_from)
        return tuple(
            TurnsRow(
                num_turns=turns,
                num_made=num_made[turns],
                num_learned_from=num_learned_from[turns],
                num_without_signal=num_without_signal[turns],
                num_too_old=num_too_old[turns],
            )
            for turns in sorted(num_made)
        )

    def _contributions(self, consumed: Sequence[GroupUse]) -> tuple[ContributionRow, ...]:
        drawn = Counter(use.producer for draw in self._draws.values() for use in draw.groups)
        learned_from = Counter(use.producer for use in consumed)
        lost = [
            self._count_producers(chain.from_iterable(digests))
            for digests in (
                (draw.zero_variance for draw in self._draws.values()),
                (draw.too_old for draw in self._draws.values()),
            )
        ]
        rows = [
            ContributionRow(
                producer=producer,
                num_brought=self._brought[producer],
                num_bytes=self._brought_bytes[producer],
                compute_dtype=self._compute_dtypes.get(producer, ""),
                free_text_share=self._free_text[producer] / max(1, self._brought[producer]),
                num_learned_from=learned_from[producer],
                num_set_aside=drawn[producer] - learned_from[producer],
                num_without_signal=lost[0][producer],
                num_too_old=lost[1][producer],
                refused=dict(self._refused_of.get(producer, Counter[str]()).most_common()),
            )
            for producer in {*self._brought, *drawn, *self._refused_of}
        ]
        return tuple(
            sorted(rows, key=lambda row: (-row.num_learned_from, -row.num_brought, -row.num_refused, row.producer))
        )

    def _count_producers(self, digests: Iterable[str]) -> Counter[NodeId]:
        return Counter(self._stored[digest][2] for digest in set(digests) if digest in self._stored)


def node_result(
    name: str,
    node_id: NodeId,
    curriculum: Sequence[str],
    events: Iterable[Event],
    status: JsonDict,
    num_starts: int = 1,
    trains: bool = True,
    episodes: Sequence[ShownEpisode] = (),
) -> NodeResult:
    """Result of a node from its events, in order; the other arguments are those of `NodeTally.result`."""
    tally = NodeTally()
    for event in events:
        tally.add(event)
    return tally.result(name, node_id, curriculum, status, num_starts, trains, episodes)


def _histogram(values: Iterable[int]) -> dict[int, int]:
    return dict(sorted(Counter(values).items()))


def _measured(figure: float | None) -> float | None:
    """The figure; None if it is None, or was not finite when it was logged."""
    return None if figure is None or not math.isfinite(figure) else figure
