"""Result of a finished simulation: plain values, made from the nodes' own events.

Invariant: every figure of a report comes from here, and everything here comes from an event or a status
that a node wrote; a step or evaluation repeated after a restart counts once, as it was made last, and a
skipped step stands beside the one whose version it kept.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from swarm.events import (
    ApplyFailed,
    Event,
    GroupAdmitted,
    GroupPut,
    GroupsDrawn,
    GroupStored,
    GroupUse,
    LoopFailed,
    NodeKilled,
    NodeRestarted,
    NodeRestored,
    NodeStarted,
    NodeStopped,
    PolicyEvaluated,
    StepMade,
    VersionApplied,
    WorkerDied,
    events_of,
    groups_learned_from,
    kind_of,
)
from swarm.simulate.invariants import InvariantVerdict
from swarm.telemetry import count_refusals
from swarm.telemetry.shown_episodes import ShownEpisode
from swarm.types import JsonDict, NodeId

RIVALS = {
    "silo": "the same nodes without sharing",
    "colocated": "one node that generates for itself",
}  # what a run can be compared with
MARKS = (NodeKilled, NodeStopped, NodeRestarted, NodeRestored, WorkerDied)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """What one draw led to: an optimizer step, or the old version again where the step was skipped."""

    draw: int
    step: int  # of the version afterwards
    at_s: float  # wall clock
    reward: float | None  # mean of what it learned from
    loss: float | None
    grad_norm: float | None
    num_tokens: int  # trained
    was_skipped: bool
    age_mean_steps: float | None
    ess_share: float | None
    mismatch_kl: float | None  # k3, nats per token
    num_local: int
    num_external: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationRow:
    """Accuracy of one node on one environment and split."""

    step: int
    at_s: float
    env: str
    split: str  # held_out or all
    accuracy: float
    num_problems: int
    majority_baseline: float


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionRow:
    """A version of another node's policy that this node's engine took."""

    step: int
    at_s: float  # wall clock
    num_bytes: int  # manifests and payloads
    seconds: dict[str, float]  # stage, load, and pause, a part of load
    mismatch_nats: float  # of the canaries


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnsRow:
    """What became of the groups of a node's own policy whose longest episode has so many turns."""

    num_turns: int
    num_made: int  # here, and by followers
    num_learned_from: int
    num_without_signal: int
    num_too_old: int  # before a draw took them

    @property
    def too_old_share(self) -> float:
        return self.num_too_old / self.num_made


@dataclass(frozen=True, kw_only=True)
class NodeResult:
    """Result of one node: steps, evaluations, groups, bytes and failures."""

    name: str
    node_id: NodeId
    curriculum: tuple[str, ...]  # environments that it generates for
    steps: tuple[StepRow, ...]
    evaluations: tuple[EvaluationRow, ...]
    num_local: int  # groups of the own policy learned from
    num_from_followers: int  # those of them that other nodes made
    num_external: int
    num_set_aside: int  # groups drawn and not learned from: the guard left them out, or the step was skipped
    num_zero_variance: int  # own groups without signal, used up by draws
    sources: dict[NodeId, int]  # producer -> groups learned from, own included
    ages: dict[int, int]  # age when learned from, in steps -> groups
    ages_in_flight: dict[int, int]  # the part of it that passed during generation
    ages_in_queue: dict[int, int]  # the rest
    refusals: dict[str, int]  # reason -> groups
    seconds: dict[str, float]  # phase -> seconds
    tokens_generated: int
    first_group_at_s: float = 0.0  # wall clock; 0: it made none
    num_generated: int  # groups
    num_admitted: int
    bytes_received: int  # sealed groups from peers since the process started last
    bytes_sent: int
    bytes_useful: int  # of admitted groups
    edges_kl: dict[NodeId, float]  # source -> newest mismatch KL, nats per token
    num_starts: int
    num_failures: int
    trains: bool = True
    versions: tuple[VersionRow, ...] = ()  # taken from a trainer, in order
    num_not_taken: int = 0  # versions that the engine refused
    stepped_at_s: dict[int, float] = field(default_factory=dict[int, float])  # step -> wall clock at its end
    marks: tuple[tuple[float, str], ...] = ()  # (wall clock, killed or restarted ...)
    learned_from: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])  # env -> own, others'
    episodes: tuple[ShownEpisode, ...] = ()  # of its first and newest evaluation
    by_turns: tuple[TurnsRow, ...] = ()
    exchange: dict[str, str] = field(default_factory=dict[str, str])  # environment -> class of its episodes


@dataclass(frozen=True, kw_only=True)
class SwarmResult:
    """Result of one run of all nodes."""

    nodes: tuple[NodeResult, ...]
    began_at_s: float  # wall clock; until the first step it was set-up
    first_step_at_s: float
    ended_at_s: float

    @property
    def trainers(self) -> tuple[NodeResult, ...]:
        return tuple(node for node in self.nodes if node.trains)

    @property
    def environments(self) -> tuple[str, ...]:
        """Every environment that was evaluated or is in a curriculum, sorted."""
        evaluated = {row.env for node in self.nodes for row in node.evaluations}
        return tuple(sorted(evaluated | {env for node in self.nodes for env in node.curriculum}))

    @property
    def minutes(self) -> float:
        """From the first step to the end."""
        return max(0.0, self.ended_at_s - (self.first_step_at_s or self.began_at_s)) / 60

    @property
    def tokens_generated(self) -> int:
        """Response tokens of all nodes."""
        return sum(node.tokens_generated for node in self.nodes)


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """A simulation, with another run to compare it with when one was asked for.

    Example:
        SimulationResult(title="two nodes", swarm=swarm, invariants=tuple(invariants.verdicts()))
    """

    title: str
    swarm: SwarmResult
    invariants: tuple[InvariantVerdict, ...]
    rival: SwarmResult | None = None
    rival_kind: str = "silo"  # a key of RIVALS
    options: dict[str, Any] = field(default_factory=dict[str, Any])  # what was run, for the reader
    num_tries: int = 0  # at each problem of an evaluation, sampled; 0: one greedy try

    @property
    def tries_words(self) -> str:
        """How problems were tried at an evaluation."""
        return f"sampled, mean of {self.num_tries} tries" if self.num_tries else "greedy"

    @property
    def holds(self) -> bool:
        """True when every invariant held."""
        return all(verdict.holds for verdict in self.invariants)


def node_result(
    name: str,
    node_id: NodeId,
    curriculum: Sequence[str],
    events: Sequence[Event],
    status: JsonDict,
    num_starts: int = 1,
    trains: bool = True,
    episodes: Sequence[ShownEpisode] = (),
) -> NodeResult:
    """Reads a node's events (in order) and its last status.

    Args:
        name: of the node, for people.
        node_id: hex; taken from the NodeStarted event when empty.
        curriculum: environments that it generates for; empty: learned from its GroupPut events.
        events: as `read_events` gives them, with the marks of the simulation among them.
        status: `Daemon.status()` as JSON, or an empty dict.
        num_starts: how often its process was started.
        trains: whether it has a learner.
        episodes: to show, of its first and newest evaluation.
    """
    draws = {draw.draw_step: draw for draw in events_of(GroupsDrawn, events)}
    puts, admitted = events_of(GroupPut, events), events_of(GroupAdmitted, events)
    steps, started = events_of(StepMade, events), events_of(NodeStarted, events)
    step_of = {step.draw_step: step for step in steps}
    consumed = [group for draw in draws.values() for group in groups_learned_from(draw, step_of.get(draw.draw_step))]
    origins = Counter(group.origin for group in consumed)
    own_id = node_id or (started[-1].node_id if started else "")
    return NodeResult(
        name=name,
        node_id=own_id,
        curriculum=tuple(curriculum) or tuple(sorted({put.env for put in puts})),
        steps=_steps(steps),
        evaluations=_evaluations(events_of(PolicyEvaluated, events)),
        num_local=origins["local"] + origins["follower"],
        num_from_followers=origins["follower"],
        num_external=origins["external"],
        num_set_aside=sum(len(draw.groups) for draw in draws.values()) - len(consumed),
        num_zero_variance=sum(draw.num_zero_variance for draw in draws.values()),
        sources=dict(Counter(group.producer for group in consumed)),
        ages=_histogram(group.age_steps for group in consumed),
        ages_in_flight=_histogram(group.in_flight_steps for group in consumed),
        ages_in_queue=_histogram(group.age_steps - group.in_flight_steps for group in consumed),
        refusals=dict(count_refusals(events).most_common()),
        seconds=_seconds(steps),
        tokens_generated=sum(put.num_tokens for put in puts),
        first_group_at_s=puts[0].at_s if puts else 0.0,
        num_generated=len(puts),
        num_admitted=len(admitted),
        bytes_received=int(status.get("bytes_received", 0)),
        bytes_sent=int(status.get("bytes_sent", 0)),
        bytes_useful=sum(group.size_bytes for group in admitted),
        edges_kl={edge.source: edge.mismatch_kl for step in steps for edge in step.edges},
        num_starts=num_starts,
        trains=trains,
        versions=tuple(
            VersionRow(
                step=version.step,
                at_s=version.at_s,
                num_bytes=version.num_bytes,
                seconds=version.seconds,
                mismatch_nats=version.mismatch_nats,
            )
            for version in events_of(VersionApplied, events)
        ),
        num_not_taken=len(events_of(ApplyFailed, events)),
        stepped_at_s={step.step: step.at_s - step.seconds.get("publish", 0.0) for step in steps},
        num_failures=len(events_of(LoopFailed, events)) + len(events_of(WorkerDied, events)),
        learned_from=_learned_from(consumed, [*puts, *admitted]),
        episodes=tuple(episodes),
        by_turns=_by_turns(
            [*puts, *(event for event in admitted if event.policy_id == own_id)], draws.values(), consumed
        ),
        exchange=dict(status.get("environments", {})),
        marks=tuple((event.at_s, kind_of(event)) for event in events if isinstance(event, MARKS)),
    )


def _learned_from(consumed: Sequence[GroupUse], stored: Sequence[GroupStored]) -> dict[str, tuple[int, int]]:
    """Environment -> groups learned from, of the own policy and of others, where the events say where they are from."""
    env_of = {event.digest: event.env for event in stored}
    counts = Counter((env_of[use.digest], use.is_own_policy) for use in consumed if use.digest in env_of)
    return {env: (counts[env, True], counts[env, False]) for env in sorted({env for env, _ in counts})}


def _by_turns(
    made: Sequence[GroupStored], draws: Iterable[GroupsDrawn], consumed: Sequence[GroupUse]
) -> tuple[TurnsRow, ...]:
    turns_of = {event.digest: event.num_turns for event in made}
    learned_from, without_signal, too_old = {use.digest for use in consumed}, set[str](), set[str]()
    for draw in draws:
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


def _histogram(values: Iterable[int]) -> dict[int, int]:
    return dict(sorted(Counter(values).items()))


def _steps(steps: Sequence[StepMade]) -> tuple[StepRow, ...]:
    rows: dict[int, StepRow] = {}
    for step in steps:
        figures = step.diagnostics
        rows[step.draw_step] = StepRow(
            draw=step.draw_step,
            step=step.step,
            at_s=step.at_s,
            reward=_measured(figures.get("reward_mean")),
            loss=_measured(step.loss),
            grad_norm=_measured(step.grad_norm),
            num_tokens=step.num_tokens,
            was_skipped=step.was_skipped,
            age_mean_steps=_measured(figures.get("age_mean_steps")),
            ess_share=_measured(figures.get("ess_share")),
            mismatch_kl=_measured(figures.get("mismatch_kl_k3")),
            num_local=step.num_local,
            num_external=step.num_external,
        )
    return tuple(rows[draw] for draw in sorted(rows))


def _measured(figure: float | None) -> float | None:
    """None for NaN: a figure that was not finite when it was logged."""
    return None if figure is None or math.isnan(figure) else figure


def _evaluations(evaluations: Sequence[PolicyEvaluated]) -> tuple[EvaluationRow, ...]:
    rows = {
        (entry.step, entry.env, entry.split): EvaluationRow(
            step=entry.step,
            at_s=entry.at_s,
            env=entry.env,
            split=entry.split,
            accuracy=entry.accuracy,
            num_problems=entry.num_problems,
            majority_baseline=entry.majority_baseline,
        )
        for entry in evaluations
    }
    return tuple(rows[key] for key in sorted(rows))


def _seconds(steps: Sequence[StepMade]) -> dict[str, float]:
    totals: Counter[str] = Counter()
    for step in steps:
        totals.update({phase: _measured(value) or 0.0 for phase, value in step.seconds.items()})
    return dict(totals)
