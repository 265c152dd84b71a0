"""Result of a run, finished or not: plain values that a report shows.

Invariant: every figure of a report comes from here, and everything here comes from an event, a status or a group that a
node wrote (`swarm.report.tally` and `swarm.report.node_directory` read them).
"""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from swarm.events import PolicyEvaluated, VersionApplied
from swarm.report.invariants import InvariantVerdict
from swarm.telemetry.shown_episodes import ShownEpisode
from swarm.trained.learning_evidence import LearningEvidence, learning_evidence
from swarm.trained.samples import SampledGroup
from swarm.types import NodeId

RIVALS = {
    "control": "the directories of --compare",
    "silo": "the same nodes without sharing",
    "colocated": "one node that generates for itself",
}  # what a run can be compared with


@dataclass(frozen=True, kw_only=True, slots=True)
class StepRow:
    """Result of one draw: an optimizer step, or the old version again where the step was skipped."""

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
    entropy_nats: float | None  # per token
    learning_rate: float | None
    response_tokens: float | None  # mean, of what the model chose
    cut_off_share: float | None
    num_local: int
    num_external: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeRow:
    """Groups that a node made in one minute."""

    minute: int  # since 1970
    num_groups: int
    reward: float  # mean
    num_tokens: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnsRow:
    """Fates of a node's own groups whose longest episode has this number of turns."""

    num_turns: int
    num_made: int  # here, and by followers
    num_learned_from: int
    num_without_signal: int
    num_too_old: int  # before a draw took them

    @property
    def too_old_share(self) -> float:
        return self.num_too_old / self.num_made


@dataclass(frozen=True, kw_only=True, slots=True)
class ContributionRow:
    """Groups of one producer at a node, and their fates."""

    producer: NodeId  # empty: refused groups that the log names no producer of
    num_brought: int = 0  # groups that were made here, or admitted
    num_bytes: int = 0  # of these
    compute_dtype: str = ""  # that the newest of them names; empty: none
    free_text_share: float = 0.0  # mean over the groups brought: characters of better answers beside what is paid
    num_learned_from: int = 0  # uses
    num_set_aside: int = 0  # drawn and not learned from
    num_without_signal: int = 0  # of the own lineage, used up by draws
    num_too_old: int = 0  # of the own lineage, before a draw took them
    refused: dict[str, int] = field(default_factory=dict[str, int])  # reason -> groups

    @property
    def num_refused(self) -> int:
        return sum(self.refused.values())


@dataclass(frozen=True, kw_only=True)
class NodeResult:
    """Result of one node: steps, evaluations, groups, bytes and failures."""

    name: str
    node_id: NodeId
    curriculum: tuple[str, ...]  # environments that it generates for
    steps: tuple[StepRow, ...]
    evaluations: tuple[PolicyEvaluated, ...]
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
    generating_s: float = 0.0  # from its first group to its last event, without the time in which it did not run
    num_generated: int  # groups
    num_admitted: int
    bytes_received: int  # sealed groups from peers since the process started last
    bytes_sent: int
    bytes_useful: int  # of admitted groups
    edges_kl: dict[NodeId, float]  # source -> newest mismatch KL, nats per token
    num_starts: int
    num_failures: int
    trains: bool = True
    versions: tuple[VersionApplied, ...] = ()  # taken from a trainer, in order
    num_not_taken: int = 0  # versions that the engine refused
    stepped_at_s: dict[int, float] = field(default_factory=dict[int, float])  # step -> wall clock at its end
    marks: tuple[tuple[float, str], ...] = ()  # (wall clock, killed or restarted ...)
    aside_at: tuple[tuple[int, int], ...] = ()  # (step, groups that were drawn and not learned from)
    release: str = ""  # of the program, as it was started last
    first_weights: str = ""  # digest of its first version
    learned_from: dict[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])  # env -> own, others'
    episodes: tuple[ShownEpisode, ...] = ()  # of its first and newest evaluation
    by_turns: tuple[TurnsRow, ...] = ()
    exchange: dict[str, str] = field(default_factory=dict[str, str])  # environment -> class of its episodes
    contributions: tuple[ContributionRow, ...] = ()  # by producer, those that were learned from most first
    refused_at: dict[str, dict[int, int]] = field(
        default_factory=dict[str, dict[int, int]]
    )  # reason -> minute -> groups
    made: tuple[MadeRow, ...] = ()  # in order
    num_responses: int = 0  # of its own groups, where events say how these ended
    num_cut_off: int = 0  # those of them that the limit of tokens ended
    began_at_s: float = 0.0  # wall clock of its first event; 0: there is none
    ended_at_s: float = 0.0  # of its last one
    is_whole: bool = True  # False: the beginning of its log is gone
    state: str = ""  # such as `running`, for people
    problems: tuple[str, ...] = ()  # why it makes no progress
    samples: tuple[SampledGroup, ...] = ()  # its newest groups
    samples_remark: str = ""  # why there are none

    @cached_property
    def learning(self) -> LearningEvidence:
        """Evidence of learning from all its evaluations."""
        return learning_evidence(self.evaluations)


@dataclass(frozen=True, kw_only=True)
class SwarmResult:
    """Results of all nodes of one run."""

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
        """Minutes from the first step, or from the beginning if there was no step, to the end."""
        return max(0.0, self.ended_at_s - (self.first_step_at_s or self.began_at_s)) / 60

    @property
    def tokens_generated(self) -> int:
        """Response tokens of all nodes."""
        return sum(node.tokens_generated for node in self.nodes)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """Result of one or more nodes, and of the run that they are compared with if there is one.

    Example:
        RunResult(title="two nodes", swarm=swarm, invariants=tuple(invariants.verdicts()))
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
        """Description of the tries at a problem of an evaluation."""
        return f"sampled, mean of {self.num_tries} tries" if self.num_tries else "greedy"

    @property
    def holds(self) -> bool:
        """True when every invariant held."""
        return all(verdict.holds for verdict in self.invariants)
