"""Events of a node: one frozen type per kind, and their form as one line of JSON.

Invariant: an event holds figures and digests only, never a prompt, an answer or a key; the events alone are enough to
check every invariant of a run. KINDS lists every kind; `from_json(to_json(event)) == event` for finite figures.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar, cast, get_args, get_origin, get_type_hints

from swarm.episode import OUTCOME, free_text_share
from swarm.types import (
    Digest,
    Draw,
    DrawnGroup,
    EdgeReport,
    Evaluation,
    FloatArray,
    JsonDict,
    NodeId,
    PolicyVersion,
    ScoredGroup,
    StepReport,
    WarmUpReport,
)

if TYPE_CHECKING:
    from swarm.config import ReplayConfig

MAX_AT_S: Final = 1e11  # of a line that is read: a year of four digits
MAX_COUNT: Final = 2**63  # of a line that is read, exclusive
NODE: Final = "node"  # name of the failed loop where the node itself ended
VersionName = tuple[int, str]  # step, digest as `digest_text`


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Base of all events of a node."""

    at_s: float = 0.0  # wall clock when the event was logged; 0 until then


Emit = Callable[[Event], None]
Kind = TypeVar("Kind", bound=Event)
Value = TypeVar("Value")


# --- a process --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStarted(Event):
    """A node has started and serves its peers."""

    node_id: NodeId
    endpoints: tuple[str, ...] = ()  # host:port
    pid: int = 0
    release: str = ""  # of the program: version and commit; empty: an older event


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRestored(Event):
    """A node found groups of an earlier run in its store.

    The held groups are listed again, since a kill can come after a group is stored and before its event is logged.
    """

    num_groups: int = 0
    num_draws: int = 0
    held: tuple[tuple[str, bool], ...] = ()  # digest of each group; True if this node made it


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFinished(Event):
    """A node made all its steps."""

    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeKilled(Event):
    """A simulation killed this node."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeStopped(Event):
    """A simulation froze this node with SIGSTOP."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeRestarted(Event):
    """A simulation started this node again after a kill."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerDied(Event):
    """The worker process ended by itself; the node starts it again."""

    exit_code: int | None


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopFailed(Event):
    """An unexpected exception ended one round of a loop, or the whole node."""

    loop: str  # a loop with one peer has the peer's id after a space; NODE if the node ended
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class DiskFull(Event):
    """A write failed because the disk or its byte budget was full."""

    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreDamaged(Event):
    """The group store was damaged: it was moved aside, and the node goes on with an empty one."""

    moved_to: str  # name of the file, in the node's directory


# --- groups -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupStored(Event):
    """A scored group is in the store: base of GroupPut and GroupAdmitted."""

    digest: str  # hex
    producer: NodeId
    policy_id: str  # the lineage that generated it
    env: str
    oldest_step: int  # of its tokens
    size_bytes: int
    reward_mean: float
    num_turns: int = 1  # of its longest episode
    versions: tuple[VersionName, ...] = ()  # that made its tokens, oldest first
    compute_dtype: str = ""  # of the forward passes that made its tokens, as its producer claims
    free_text_share: float = 0.0  # mean `free_text_share` of its episodes with a reward above the mean


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupPut(GroupStored):
    """A group that this node generated, scored and stored."""

    num_tokens: int
    reward_parts: dict[str, float] = field(default_factory=dict[str, float])  # name -> mean; {}: outcome only
    finishes: dict[str, int] = field(default_factory=dict[str, int])  # FinishReason -> responses; {}: an older event

    @classmethod
    def of(cls, scored: ScoredGroup) -> Self:
        """Builds the event of a scored group of this node."""
        return cls(
            **_group_fields(scored),
            num_tokens=scored.group.num_tokens,
            reward_parts=_part_means(scored),
            finishes=dict(Counter(str(rollout.finish) for rollout in scored.group.rollouts)),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupAdmitted(GroupStored):
    """A peer's group that passed admission and was stored."""

    via: NodeId  # neighbour that sent it
    age_s: float  # since its producer made it, by two clocks: may be negative

    @classmethod
    def of(cls, scored: ScoredGroup, via: NodeId, now_s: float) -> Self:
        """Builds the event of a group that `via` sent; `now_s` is this node's wall clock."""
        return cls(**_group_fields(scored), via=via, age_s=now_s - scored.group.created_at_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupRefused(Event):
    """A peer's group that was not admitted; in a log file, `count` such groups."""

    reason: str  # a RefusalReason
    producer: NodeId = ""  # empty: not known, or several
    via: NodeId = ""
    count: int = 1
    digest: str = ""  # hex; empty: not known, or several


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlierRefusals(Event):
    """First event of a log file after a rotation: all refusals in earlier files."""

    refused: dict[str, int]  # reason -> groups


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupUnscored(Event):
    """A group of this node was dropped: its engine or verifier failed, or it is too large to send."""

    env: str
    error: str


# --- learning ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupUse:
    """A drawn group, with its age and number of use."""

    digest: str
    producer: NodeId
    policy_id: str
    age_steps: int
    in_flight_steps: int = 0  # the part of the age that passed during generation
    use: int = 1  # 1 for the first
    is_own_policy: bool
    is_established: bool = True  # False: it counted in the share of all newcomers

    @property
    def origin(self) -> str:
        """Origin of the group: `local`, `follower` (the own policy, on another node) or `external`."""
        if not self.is_own_policy:
            return "external"
        return "local" if self.producer == self.policy_id else "follower"

    @classmethod
    def of(cls, drawn: DrawnGroup, policy_id: str) -> Self:
        """Builds the entry of a drawn group; `policy_id` is the learner's lineage."""
        scored = drawn.scored
        return cls(
            digest=scored.digest.hex(),
            producer=scored.group.producer,
            policy_id=scored.group.policy_id,
            age_steps=drawn.age_steps,
            in_flight_steps=drawn.in_flight_steps,
            use=drawn.use,
            is_own_policy=scored.is_own_policy(policy_id),
            is_established=drawn.is_established,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupsDrawn(Event):
    """A draw: groups for one step to learn from, and the bounds in force."""

    draw_step: int  # draws of one node are numbered without gaps
    groups: tuple[GroupUse, ...]
    zero_variance: tuple[str, ...] = ()  # digests of own groups without signal that the draw used up
    num_zero_variance: int = 0
    too_old: tuple[str, ...] = ()  # digests of groups of the own lineage that no draw took in time
    max_age_steps: int
    max_reuse: int
    num_places: int = 0  # for others' groups, filled or not, since the draw before; 0 in a private run

    @classmethod
    def of(cls, draw: Draw, bounds: "ReplayConfig", policy_id: str) -> Self:
        """Builds the event of a draw; `policy_id` is the learner's lineage."""
        return cls(
            draw_step=draw.step,
            groups=tuple(GroupUse.of(drawn, policy_id) for drawn in draw.groups),
            zero_variance=tuple(digest.hex() for digest in draw.zero_variance_digests),
            num_zero_variance=draw.num_zero_variance,
            too_old=tuple(digest.hex() for digest in draw.too_old_digests),
            max_age_steps=bounds.max_age_steps,
            max_reuse=bounds.max_reuse,
            num_places=len(draw.places),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawsAbandoned(Event):
    """A resume found draws whose groups are lost: these draws are not made again, and their numbers stay used."""

    from_step: int  # at which the resume began
    first: int  # first draw lost
    last: int


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupGivenUp(Event):
    """A group that ended the learner's process when tried alone; its draw and all later draws are made without it."""

    digest: str  # hex
    producer: NodeId  # empty if the store has lost the group
    draw_step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMade(Event):
    """One optimizer step; a skipped step keeps the old version."""

    step: int  # of the version afterwards
    draw_step: int  # equals `step` until a step is skipped
    digest: str  # of the version, `digest_text`
    loss: float
    grad_norm: float
    num_tokens: int  # trained
    was_skipped: bool = False
    diagnostics: dict[str, float] = field(default_factory=dict[str, float])
    seconds: dict[str, float] = field(default_factory=dict[str, float])  # phase -> seconds
    ages_steps: tuple[int, ...] = ()  # one per group consumed
    num_local: int = 0
    num_external: int = 0
    num_from_followers: int = 0
    edges: tuple[EdgeReport, ...] = ()

    @classmethod
    def of(cls, report: StepReport) -> Self:
        """Builds the event of a step from the learner's report."""
        return cls(
            step=report.version.step,
            draw_step=report.draw_step or report.version.step,
            digest=digest_text(report.version.digest),
            loss=report.loss,
            grad_norm=report.grad_norm,
            num_tokens=report.num_tokens,
            was_skipped=report.was_skipped,
            diagnostics=report.diagnostics,
            seconds=report.seconds,
            ages_steps=report.ages_steps,
            num_local=report.num_local,
            num_external=report.num_external,
            num_from_followers=report.num_from_followers,
            edges=report.edges,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyEvaluated(Event):
    """Accuracy of the policy on one environment and split, of greedy or sampled answers."""

    step: int
    env: str
    split: str  # held_out or all
    accuracy: float
    num_problems: int
    majority_baseline: float  # accuracy of always giving the commonest right answer
    num_right: tuple[int, ...] = ()  # as in `Evaluation`
    num_tries: int = 1
    rewards: tuple[float, ...] = ()
    problems: str = ""  # empty: an older event

    @classmethod
    def of(cls, evaluation: Evaluation) -> Self:
        """Builds the event of an evaluation."""
        return cls(
            step=evaluation.step,
            env=evaluation.env,
            split=evaluation.split,
            accuracy=evaluation.accuracy,
            num_problems=evaluation.num_problems,
            majority_baseline=evaluation.majority_baseline,
            num_right=evaluation.num_right,
            num_tries=evaluation.num_tries,
            rewards=evaluation.rewards,
            problems=evaluation.problems,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmedUp(Event):
    """A supervised warm-up made version 0; earlier evaluations of step 0 measured the model before the warm-up.

    A node that starts again at step 0 repeats the event.
    """

    report: WarmUpReport


@dataclass(frozen=True, kw_only=True, slots=True)
class OthersSetAside(Event):
    """The learner sets sources aside, newest first, since held-out accuracy fell, or (`is_over`) uses all again."""

    step: int
    is_over: bool = False


# --- policy versions --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionPublished(Event):
    """A new version of this node's lineage exists."""

    policy_id: str
    step: int
    digest: str

    @classmethod
    def of(cls, version: PolicyVersion) -> Self:
        """Builds the event of a new version."""
        return cls(policy_id=version.policy_id, step=version.step, digest=digest_text(version.digest))


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionUnpublished(Event):
    """A version of this node's lineage exists, but its weights cannot be offered to followers."""

    step: int
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionApplied(Event):
    """This node's engine loaded a version of the trainer that the node follows."""

    policy_id: str
    step: int
    digest: str
    num_bytes: int = 0  # manifests and payloads
    seconds: dict[str, float] = field(default_factory=dict[str, float])  # stage, load, and pause, a part of load
    mismatch_nats: float = 0.0  # mean difference of the canaries' log-probs from the publisher's


@dataclass(frozen=True, kw_only=True, slots=True)
class ApplyFailed(Event):
    """This node's engine did not load a version; it still serves the previous version."""

    policy_id: str
    step: int
    digest: str
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnerEquivocated(Event):
    """The trainer that this node follows signed two versions of one step; the node stops following it."""

    policy_id: str
    step: int
    first: str  # digests of the two manifests
    second: str


@dataclass(frozen=True, kw_only=True, slots=True)
class UnknownEvent(Event):
    """An event of a newer release, or a damaged event; it is kept unchanged and not counted."""

    kind: str
    fields: JsonDict


# --- as JSON ----------------------------------------------------------------------------------------------

KINDS: Final[dict[str, type[Event]]] = {
    "started": NodeStarted,
    "restored": NodeRestored,
    "finished": NodeFinished,
    "killed": NodeKilled,
    "stopped": NodeStopped,
    "restarted": NodeRestarted,
    "worker_died": WorkerDied,
    "failure": LoopFailed,
    "disk_full": DiskFull,
    "store_damaged": StoreDamaged,
    "put": GroupPut,
    "admitted": GroupAdmitted,
    "refused": GroupRefused,
    "earlier": EarlierRefusals,
    "unscored": GroupUnscored,
    "draw": GroupsDrawn,
    "abandoned": DrawsAbandoned,
    "given_up": GroupGivenUp,
    "step": StepMade,
    "evaluation": PolicyEvaluated,
    "warmed_up": WarmedUp,
    "others_set_aside": OthersSetAside,
    "published": VersionPublished,
    "unpublished": VersionUnpublished,
    "applied": VersionApplied,
    "apply_failed": ApplyFailed,
    "equivocated": OwnerEquivocated,
}
_KIND_OF: Final = {cls: kind for kind, cls in KINDS.items()}


def events_of(kind: type[Kind], events: Iterable[Event]) -> list[Kind]:
    """Events of one type, in order."""
    return [event for event in events if isinstance(event, kind)]


def groups_learned_from(draw: GroupsDrawn, step: StepMade | None) -> Iterable[GroupUse]:
    """Groups of a draw that its step learned from; all of them if `step` is None, none if it was skipped.

    If the guard left groups out, the step reports only the numbers of kept groups by origin, and the kept sources. The
    kept groups are then inferred: groups of kept sources first, then the youngest.
    """
    if step is None:
        return draw.groups
    if step.was_skipped:
        return ()
    if not step.diagnostics.get("guard_groups_left_out"):
        return draw.groups
    left = Counter(
        local=step.num_local - step.num_from_followers, follower=step.num_from_followers, external=step.num_external
    )
    sources = {edge.source for edge in step.edges}
    kept: list[GroupUse] = []
    for group in sorted(draw.groups, key=lambda group: (group.producer not in sources, group.age_steps)):
        if left[group.origin] > 0:
            left[group.origin] -= 1
            kept.append(group)
    return kept


def kind_of(event: Event) -> str:
    """The key of an event's type in KINDS; the recorded kind of an UnknownEvent."""
    return event.kind if isinstance(event, UnknownEvent) else _KIND_OF[type(event)]


def to_json(event: Event) -> JsonDict:
    """Converts an event to `{"kind": ..., "at_s": ..., <fields>}` of JSON values; NaN and infinity become None."""
    if isinstance(event, UnknownEvent):
        return {"kind": event.kind, "at_s": event.at_s, **finite(event.fields)}
    return {"kind": _KIND_OF[type(event)], **finite(asdict(event))}


def from_json(data: JsonDict) -> Event:
    """Converts a parsed line back to its event; unknown fields are dropped, null figures become NaN.

    A line that cannot be converted becomes an UnknownEvent; no error is raised.
    """
    kind = str(data.get("kind", ""))
    try:
        return _build(KINDS[kind], data)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
        at_s = data.get("at_s")
        is_time = isinstance(at_s, float) and abs(at_s) < MAX_AT_S
        others = {key: value for key, value in data.items() if key not in ("kind", "at_s")}
        return UnknownEvent(kind=kind, at_s=cast("float", at_s) if is_time else 0.0, fields=others)


def finite(value: Any) -> Any:
    """A copy of a JSON value with NaN and infinities, which JSON cannot hold, replaced by None; tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in cast("JsonDict", value).items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in cast("list[Any]", value)]
    return value


@cache
def _hints(cls: type) -> dict[str, Any]:
    """Type of each field by name, in order."""
    hints = get_type_hints(cls)
    return {entry.name: hints[entry.name] for entry in fields(cast("Any", cls))}


def _build(cls: type[Value], data: JsonDict) -> Value:
    if abs(data.get("at_s") or 0.0) >= MAX_AT_S:
        raise ValueError("at_s is no time of a clock")
    return cls(**{name: _read(hint, data[name]) for name, hint in _hints(cls).items() if name in data})


def _read(hint: Any, value: Any) -> Any:
    """Converts a JSON value to the type `hint`."""
    if hint is float:
        return math.nan if value is None else float(value)
    if hint is int or hint is str or hint is bool:
        if type(value) is not hint or (isinstance(value, int) and abs(value) >= MAX_COUNT):
            raise TypeError(f"{value!r:.40} is no {hint.__name__}")
        return value
    if get_origin(hint) is UnionType:  # with None
        return None if value is None else _read(get_args(hint)[0], value)
    if get_origin(hint) is tuple:
        item, *more = get_args(hint)
        if more == [...]:
            return tuple(_read(item, entry) for entry in value)
        return tuple(_read(each, entry) for each, entry in zip([item, *more], value, strict=True))
    if get_origin(hint) is dict:
        return {key: _read(get_args(hint)[1], entry) for key, entry in value.items()}
    if is_dataclass(hint):
        return _build(cast("type[Any]", hint), value)
    return value


# --- figures ----------------------------------------------------------------------------------------------


def mean_and_std(rewards: FloatArray) -> tuple[float, float]:
    """Mean and population standard deviation of a group's rewards [G]; G > 0."""
    mean = _mean(rewards)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in rewards.tolist()) / len(rewards))


def digest_text(digest: Digest) -> str:
    """Short form of a digest of weights in events: its first 16 hex characters."""
    return digest.hex()[:16]


def _mean(rewards: FloatArray) -> float:
    """Mean of [G] rewards; plain Python is several times faster than numpy for a handful of numbers."""
    values: list[float] = rewards.tolist()
    return math.fsum(values) / len(values)


def _part_means(scored: ScoredGroup) -> dict[str, float]:
    """Mean of each named reward over the episodes that have it; empty if `outcome` is the only one."""
    parts: dict[str, list[float]] = {}
    for outcome in scored.outcomes:
        for name, value in outcome.rewards.items():
            parts.setdefault(name, []).append(value)
    return {} if parts.keys() == {OUTCOME} else {name: math.fsum(of) / len(of) for name, of in parts.items()}


def _group_fields(scored: ScoredGroup) -> dict[str, Any]:
    group = scored.group
    return {
        "digest": scored.digest.hex(),
        "producer": group.producer,
        "policy_id": group.policy_id,
        "env": group.env,
        "oldest_step": group.oldest_step,
        "size_bytes": scored.size_bytes,
        "reward_mean": _mean(scored.rewards),
        "num_turns": max([len(rollout.actions) for rollout in group.rollouts], default=0),
        "versions": tuple([(version.step, digest_text(version.digest)) for version in group.versions]),
        "compute_dtype": group.compute_dtype,
        "free_text_share": _free_text_share(scored),
    }


def _free_text_share(scored: ScoredGroup) -> float:
    """Mean share over the episodes with a reward above the mean, which a learner reinforces; 0 without any."""
    mean, outcomes = _mean(scored.rewards), scored.outcomes
    shares = [
        free_text_share(rollout.actions, outcomes[place].transitions if outcomes else ())
        for place, rollout in enumerate(scored.group.rollouts)
        if scored.rewards[place] > mean
    ]
    return round(math.fsum(shares) / len(shares), 4) if shares else 0.0
