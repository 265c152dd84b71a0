"""Values that cross modules: frozen, with the shape or unit on each field.

Invariant: this module imports only numpy, `swarm.episode` and the standard library, and does no I/O.
Shape letters: G rollouts of a group, P prompt tokens, T response tokens (all after the shared prompt).
"""

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from swarm.episode import Actions, EpisodeOutcome, Message, TurnStatus

IntArray = NDArray[np.int32]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float32]

NodeId = str  # lower-case hex SHA-256 of the node's Ed25519 public key (64 characters)
Digest = bytes  # SHA-256, 32 bytes
TaskName = tuple[str, int]  # environment, number of the task in it
RUN_ID_PATTERN = r"^[A-Za-z0-9._-]{1,40}$"  # that the name of a run matches


def short(identity: str | bytes) -> str:
    """The first eight hex characters of an id or digest, for logs and tables."""
    return (identity.hex() if isinstance(identity, bytes) else identity)[:8]


class Role(StrEnum):
    """Role of a node: a loop that the node runs."""

    TRAINER = "trainer"
    GENERATOR = "generator"
    RELAY = "relay"


class Correction(StrEnum):
    """Kind of importance ratio that a consumer can form for a rollout."""

    EXACT = "exact"  # same tokenizer, behaviour log-probs at a known temperature, nothing truncated
    NO_LOGPROBS = "no_logprobs"  # same tokenizer, no usable behaviour log-probs
    TEXT_ONLY = "text_only"  # other tokenizer: the text is re-encoded, no true ratio exists


class FinishReason(StrEnum):
    """Cause that ended the generation of a rollout."""

    STOP = "stop"  # the model drew an end token (EOS kept in the trace)
    LENGTH = "length"  # max_new_tokens reached
    ABORTED = "aborted"  # cancelled from outside; never trained on


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyVersion:
    """Name of exact weights: a training lineage, the optimizer steps made in it, and the weights' digest.

    Example:
        PolicyVersion(policy_id="3fa1...", step=12, digest=b"...")
    """

    policy_id: str  # one training lineage; in swarm sampling the node id of its owner
    step: int  # optimizer steps since the lineage began, >= 0
    digest: Digest = b""  # of the published tensors; empty if not known (yet)


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionSpan:
    """Run of tokens that `version` generated: from `start` to the start of the next span, or to the end."""

    start: int  # index into the T response tokens
    version: PolicyVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Sampling parameters of generation. Log-probs are exact only for pure temperature sampling (`is_exact`)."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = off
    repetition_penalty: float = 1.0
    max_new_tokens: int = 16

    @property
    def is_exact(self) -> bool:
        """True if log-probs at `temperature` are those of the distribution that is sampled."""
        return self.temperature > 0 and self.top_p == 1.0 and self.top_k == 0 and self.repetition_penalty == 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """A problem that any node can rebuild from its environment and number alone.

    The task does not hold its reference answer: each verifier rebuilds the answer itself.
    """

    env: str  # name of the environment in the run manifest
    task_id: int  # >= 0
    messages: tuple[Message, ...]
    is_held_out: bool = False  # by a hash of the problem: evaluated, never trained on
    max_turns: int = 1  # most actions of an episode
    drawn: str = ""  # digest of the drawn problem, if the messages do not show all of it

    @property
    def problem(self) -> tuple[str, tuple[Message, ...], str]:
        """Key of the problem: equal for two numbers that draw the same problem."""
        return self.env, self.messages, self.drawn


@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeLimits:
    """Token limits that can end an episode before its environment does."""

    max_new_tokens: int  # of one action
    max_episode_tokens: int = 2048  # of all actions and observations after the prompt

    def has_room(self, num_tokens: int, num_observed: int) -> bool:
        """True if a whole action fits after `num_tokens` tokens so far and an observation of `num_observed` tokens."""
        return num_tokens + num_observed + self.max_new_tokens <= self.max_episode_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenTrace:
    """The tokens of one response, with the generator's log-probs, mask, turns and policy versions.

    `logprobs[t]` is the log-probability of token t given all before it, at the sampling temperature;
    outside `action_mask` it is NaN on purpose, so that a forgotten mask shows at once.
    """

    token_ids: IntArray  # [T], everything after the shared prompt, EOS included
    action_mask: BoolArray  # [T], True where the model chose the token
    logprobs: FloatArray | None  # [T] nats, or None
    turn_ids: NDArray[np.int16]  # [T], index of the turn; 0 for a single answer
    spans: tuple[VersionSpan, ...]  # ordered, first start 0
    byte_lengths: IntArray | None = None  # [T], UTF-8 bytes of the text that each token stands for; None: not given

    def __post_init__(self) -> None:
        num_tokens = self.token_ids.shape[0]
        assert self.action_mask.shape == (num_tokens,) and self.turn_ids.shape == (num_tokens,)
        assert self.logprobs is None or self.logprobs.shape == (num_tokens,)
        assert self.byte_lengths is None or self.byte_lengths.shape == (num_tokens,)
        assert self.spans and self.spans[0].start == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ClaimedTurn:
    """A producer's claim about the result of a turn; a consumer trusts only its own replay."""

    reward: float
    status: TurnStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One response to a task: a single answer, or an episode of several turns."""

    actions: Actions  # text of each turn: decode(its action tokens)
    trace: TokenTrace | None  # None: the group was sent as texts only
    sampling: Sampling
    finish: FinishReason
    claimed_reward: float  # by the producer; a consumer trusts only its own replay
    claimed_turns: tuple[ClaimedTurn, ...] = ()  # of an episode of several turns, as the producer played it

    @property
    def text(self) -> str:
        """Text of the last turn; "" if there is no turn."""
        return self.actions[-1] if self.actions else ""

    @property
    def oldest_step(self) -> int | None:
        """Step of the oldest policy version that generated a token; None without a trace."""
        if self.trace is None:
            return None
        spans = self.trace.spans
        return spans[0].version.step if len(spans) == 1 else min(span.version.step for span in spans)


@dataclass(frozen=True, kw_only=True, slots=True, weakref_slot=True)
class RolloutGroup:
    """G responses to one task by one producer: the unit that is signed, exchanged and learned from."""

    run_id: str
    producer: NodeId
    policy_id: str  # the lineage that generated it
    env: str
    task_id: int
    tokenizer_digest: Digest
    prompt_ids: IntArray  # [P], shared by every rollout
    rollouts: tuple[Rollout, ...]  # G
    verifier: str  # name/version of the verifier that made the claimed rewards
    created_at_s: float  # producer's wall clock
    compute_dtype: str = ""  # of the forward passes that made the tokens, as the producer claims; empty: not given
    versions: tuple[PolicyVersion, ...] = field(init=False, compare=False)  # of its tokens, each once, oldest first

    def __post_init__(self) -> None:
        traces = [rollout.trace for rollout in self.rollouts if rollout.trace is not None]
        found = {span.version for trace in traces for span in trace.spans}
        versions = tuple(sorted(found, key=lambda version: (version.step, version.digest)))
        object.__setattr__(self, "versions", versions)  # once: a node asks for it many times

    @property
    def oldest_step(self) -> int:
        """Step of the policy version of the oldest token in the group; 0 if no rollout has a trace."""
        return self.versions[0].step if self.versions else 0

    @property
    def newest_step(self) -> int:
        """Step of the policy version of the newest token in the group; 0 if no rollout has a trace."""
        return self.versions[-1].step if self.versions else 0

    @property
    def num_tokens(self) -> int:
        """Number of response tokens of all rollouts with a trace."""
        return sum(0 if r.trace is None else int(r.trace.token_ids.shape[0]) for r in self.rollouts)


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedGroup:
    """A rollout group as it is sent: the exact bytes, their digest, and their signature.

    Digest and signature cover `body` as it was sent, never a re-serialisation.
    """

    digest: Digest  # SHA-256 of body
    producer: NodeId
    public_key: bytes  # Ed25519, 32 bytes; hashes to producer
    signature: bytes  # Ed25519 over domain tag, codec and digest, 64 bytes
    is_compressed: bool  # body is one zstd frame of the serialised GroupBody
    body: bytes

    @property
    def size_bytes(self) -> int:
        """Size of the body as it is sent, bytes."""
        return len(self.body)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredGroup:
    """A group that passed admission (or is our own), with rewards computed on this node."""

    digest: Digest
    group: RolloutGroup
    rewards: FloatArray  # [G], from the local verifier
    correction: Correction
    is_made_here: bool  # generated by this node; `is_own_policy` is about the policy instead
    first_seen_s: float  # this node's wall clock
    size_bytes: int
    outcomes: tuple[EpisodeOutcome, ...] = ()  # [G] as replayed here; empty if they add nothing to the rewards

    @property
    def has_signal(self) -> bool:
        """True if the rewards differ, or those of any role do; otherwise all group-relative advantages are zero."""
        rewards = self.rewards.tolist()
        if max(rewards) > min(rewards):
            return True
        roles = {turn.role for outcome in self.outcomes for turn in outcome.transitions if turn.role}
        return any(len({outcome.rewards.get(role, 0.0) for outcome in self.outcomes}) > 1 for role in roles)

    @property
    def has_turn_signal(self) -> bool:
        """True if the turns of the group's episodes have different rewards, whatever the rewards of the episodes."""
        return len({turn.reward for outcome in self.outcomes for turn in outcome.transitions}) > 1

    def is_own_policy(self, policy_id: str) -> bool:
        """True if the lineage `policy_id`, this node's own, generated the group, on any machine.

        Draws and objectives call such a group `local`: its ages are exact, and its policy is the learner's own. Trust,
        storage, serving and counts by producer depend on the machine instead (`is_made_here`).
        """
        return self.group.policy_id == policy_id


@dataclass(frozen=True, kw_only=True, slots=True)
class Canary:
    """A text with the publisher's log-probs, which an engine with other weights does not reproduce."""

    token_ids: IntArray  # [T]
    logprobs: FloatArray  # [T] nats at temperature 1, of each token given all before it; the first is NaN


@dataclass(frozen=True, kw_only=True, slots=True)
class SealedManifest:
    """A signed manifest, of a patch or of a full version, as it is sent (`swarm.weights.manifest`)."""

    body: bytes
    public_key: bytes  # Ed25519, 32 bytes, of the owner of the lineage
    signature: bytes  # over a domain tag and the exact bytes of body, 64 bytes

    @property
    def digest(self) -> Digest:
        """SHA-256 of the body, which identifies the manifest."""
        return hashlib.sha256(self.body).digest()


@dataclass(frozen=True, kw_only=True, slots=True)
class Credit:
    """Credit to generate groups for a trainer, granted to one watcher of its lineage: a total that never falls."""

    head_step: int  # of the trainer
    granted: int  # groups that this watcher may have started since its stream was opened


PatchChain = tuple[SealedManifest, ...]
"""Manifests to apply in order, from the version that an engine holds (or from nothing) to a newer version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadReport:
    """Cost of loading a version into an engine."""

    pause_s: float = 0.0  # of generation: swap and canaries, not the wait for a call to end
    mismatch_nats: float = 0.0  # mean difference of the canaries' log-probs from the publisher's; 0 without canaries


@dataclass(frozen=True, kw_only=True, slots=True)
class ApplyReport:
    """Outcome of a weight update of this node's engine."""

    version: PolicyVersion
    error: str = ""  # why the engine still serves the previous version; empty: it serves this version
    is_unusable: bool = False  # the fetched payload does not yield the version on any engine
    num_bytes: int = 0  # manifests and payloads of the patch chain
    seconds: dict[str, float] = field(default_factory=dict[str, float])  # stage, load, and pause, a part of load
    mismatch_nats: float = 0.0  # mean difference of the canaries' log-probs from the publisher's


class RefusalReason(StrEnum):
    """Reason why a group from a peer was not admitted; refusals are counted by reason."""

    TOO_LARGE = "too_large"
    MALFORMED = "malformed"  # protobuf, compression or schema
    WRONG_RUN = "wrong_run"
    WRONG_SIGNATURE = "wrong_signature"
    WRONG_DIGEST = "wrong_digest"
    FORGED_PRODUCER = "forged_producer"
    DUPLICATE = "duplicate"
    COPIED = "copied"  # repeats earlier answers of other nodes or of its producer; the original may arrive later
    TOO_OLD = "too_old"
    FROM_THE_FUTURE = "from_the_future"
    WRONG_GROUP_SIZE = "wrong_group_size"
    UNKNOWN_ENVIRONMENT = "unknown_environment"
    UNKNOWN_TASK = "unknown_task"
    HELD_OUT = "held_out"
    WRONG_PROMPT = "wrong_prompt"
    WRONG_EPISODE = "wrong_episode"  # observations or an end that a replay of its actions does not reproduce
    NOT_BELIEVED = "not_believed"  # the environment believes observations of listed nodes only (`scored_from`)
    OTHER_ENVIRONMENT = "other_environment"  # task or replay differ; the producer has another environment version
    TEXT_MISMATCH = "text_mismatch"
    BAD_TOKENS = "bad_tokens"  # ids outside the vocabulary, inconsistent lengths
    UNUSABLE_TEXT = "unusable_text"  # by this node's tokenizer; its producer cannot know that, so it costs nothing
    BAD_LOGPROBS = "bad_logprobs"  # positive, NaN or infinite
    BAD_SAMPLING = "bad_sampling"
    BAD_VERSION = "bad_version"  # spans out of order, or versions that never existed
    UNKNOWN_HEAD = "unknown_head"  # this node knows too little of the lineage; its producer cannot know that
    FALSE_REWARD = "false_reward"
    VERIFIER_FAILED = "verifier_failed"
    UNUSABLE_CORRECTION = "unusable_correction"  # the learner's recipe needs behaviour log-probs that are not there
    LOW_REPUTATION = "low_reputation"
    OVER_QUOTA = "over_quota"
    OVER_REPLAY_TIME = "over_replay_time"  # its party has used up its replay seconds
    TOO_MANY_ITEMS = "too_many_items"  # more items on a neighbour's streams than its quota
    NO_ENTRY = "no_entry"  # its producer has shown no credential that admits it to the run
    NO_CREDIT = "no_credit"  # a group of our own lineage beyond its producer's credit
    NO_ROOM = "no_room"


@dataclass(frozen=True, kw_only=True, slots=True)
class Refused:
    """Refusal of something that a peer sent: a value that is counted, not an exception."""

    reason: RefusalReason
    detail: str = ""  # gives the value and the bound; never prompt or answer text
    producer: NodeId | None = None
    digest: Digest | None = None
    created_at_s: float | None = None  # the producer's claim; None if the group was not opened


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """A position in a holder's append-only log of groups; `epoch` changes if entries may have been lost."""

    epoch: str = ""
    sequence: int = 0  # number of the last entry that was seen


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamFilter:
    """Entries that a subscriber wants besides a holder's own groups with signal."""

    relay: bool = False  # notices of groups that other nodes made
    wants_zero_variance: bool = False  # groups whose rewards are all equal
    wants_turn_signal: bool = False  # at least the zero-variance groups whose turns have different rewards
    wants_commitments: bool = False  # commitments ahead of the holder's own groups


@dataclass(frozen=True, kw_only=True, slots=True)
class Advert:
    """A node's record in the directory: small, signed, one per node."""

    node_id: NodeId
    run_id: str
    endpoints: tuple[str, ...]  # host:port of its exchange service, or `addresses.relayed_endpoint`; the best first
    roles: tuple[Role, ...]
    tokenizer_digest: Digest
    head: PolicyVersion  # newest of its own or followed lineage; with a digest only if it serves these weights
    oldest_step: int  # of the groups it holds
    num_groups: int  # of its own, still held
    reward_mean: float
    reward_std: float
    correction: Correction  # what it sends: EXACT, NO_LOGPROBS or TEXT_ONLY
    held_bytes: int
    cursor: Cursor  # newest entry of its log
    expires_at_s: float  # wall clock
    credential: bytes = b""  # proof of its right to take part, serialised
    equivocator: str = ""  # 16 hex digits of an owner that it can prove to have signed two versions of a step
    relay_reservations: int = 0  # free reservations for nodes that cannot be dialled; 0: it does not relay


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgeReport:
    """Distance of one source's groups from one learner's policy in a step."""

    source: NodeId
    num_groups: int
    age_mean_steps: float
    ess_share: float  # effective sample size / N, in [0, 1]
    mismatch_kl: float  # k3 estimate, nats per token
    reward_mean: float


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """Heartbeat of a node to the coordinator: figures, never rollouts or weights."""

    node_id: NodeId
    name: str
    roles: tuple[Role, ...]
    endpoints: tuple[str, ...]
    head: PolicyVersion
    tokens_per_s: float
    reward_mean: float
    num_local: int  # groups consumed so far
    num_external: int
    num_refused: int
    edges: tuple[EdgeReport, ...] = ()
    evaluations: dict[str, float] = field(default_factory=dict[str, float])  # env/split -> accuracy


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """Recommendations of the coordinator. Local limits always win."""

    max_age_steps: int | None = None  # None: no opinion
    source_weights: dict[NodeId, float] = field(default_factory=dict[NodeId, float])  # in [0, 1]
    state: str = "ok"  # ok, tightened, alarm
    lease_s: float = 90.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnGroup:
    """One group of a draw, with its age at the draw."""

    scored: ScoredGroup
    age_steps: int  # newest known head of its lineage minus oldest token
    use: int  # 1 for the first use, 2 for the second, ...
    is_established: bool = True  # its producer counted as established; decided at the draw and journalled

    @property
    def in_flight_steps(self) -> int:
        """The part of the age that passed during generation: newest token minus oldest token, at most the age."""
        return min(self.age_steps, self.scored.group.newest_step - self.scored.group.oldest_step)


@dataclass(frozen=True, slots=True)
class DrawPlace:
    """A place of a draw for another node's group, filled or free; shares of influence are counted in places."""

    producer: NodeId = ""  # of the group that took the place; empty: it stayed free
    is_newcomer: bool = False  # counted in the share of all newcomers together
    task: TaskName = ("", 0)  # of the group; ("", 0) if it is not known


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """Groups that one optimizer step learns from."""

    step: int  # the step it is for; draws of one node are numbered without gaps
    groups: tuple[DrawnGroup, ...]
    num_zero_variance: int  # local groups without signal that this draw used up
    source_weights: dict[NodeId, float] = field(default_factory=dict[NodeId, float])
    zero_variance_digests: tuple[Digest, ...] = ()  # of those groups; journalled: a restart skips them
    too_old_digests: tuple[Digest, ...] = ()  # of own-lineage groups that became too old since the draw before
    places: tuple[DrawPlace, ...] = ()  # for others' groups, since the draw before; none in a private run
    baselines: tuple[float, ...] = ()  # reward of the learner's greedy answer to each group's prompt, if wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """The next task in repeating a journalled step: a trial of one group, or the step itself."""

    trial: Digest | None = None  # a group to try alone first, without an update; None: make the step
    left_out: frozenset[Digest] = frozenset()  # groups to leave out of the step; if these are all, skip the step


@dataclass(frozen=True, kw_only=True, slots=True)
class StepReport:
    """Report of one optimizer step, made or skipped."""

    version: PolicyVersion
    loss: float
    grad_norm: float
    num_tokens: int  # trained tokens
    was_skipped: bool  # a non-finite step keeps the old weights
    diagnostics: dict[str, float]  # names listed in swarm/telemetry/metrics.py
    seconds: dict[str, float]  # per phase: score, backward, optimizer; the loop adds publish, draw_wait and others
    edges: tuple[EdgeReport, ...] = ()
    ages_steps: tuple[int, ...] = ()  # one per group consumed
    num_local: int = 0  # groups of the own lineage
    num_external: int = 0  # groups of other lineages
    num_from_followers: int = 0  # part of num_local: groups that other nodes made with our weights
    draw_step: int = 0  # Draw.step that it learned from; 0 settles any draw


SPLITS: Final = ("held_out", "all")  # of each environment's problems in an evaluation
MAX_OUTCOMES: Final = 4096  # problems of an evaluation whose outcomes are kept one by one


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Accuracy of a policy version on one environment and split, of greedy or sampled answers."""

    step: int
    env: str
    split: str  # "held_out" or "all"
    accuracy: float
    num_problems: int  # whose answers could be scored
    majority_baseline: float  # accuracy of always giving the commonest right answer
    at_s: float
    num_right: tuple[int, ...] = ()  # of the tries at each problem; -1: not scored; empty: more than MAX_OUTCOMES
    num_tries: int = 1  # at each problem
    rewards: tuple[float, ...] = ()  # mean of the tries at each problem; empty if all are 0 or 1, or as `num_right`
    problems: str = ""  # digest of problems, verifier and tries: if equal, evaluations compare problem by problem


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmUpReport:
    """Course of a supervised warm-up: what the model knew before it, and what it was shown."""

    num_steps: int  # supervised updates; 0: none were needed
    num_answers: int = 0  # distinct answers that were shown
    first_loss: float = 0.0  # nats per token of an answer, before the first update
    last_loss: float = 0.0  # as `first_loss`, before the last update
    num_groups: int  # tried before the warm-up, and again after it
    signal_before: int  # number of these groups with rewards that differ, before the warm-up
    signal_after: int
    accuracy: dict[str, float] = field(default_factory=dict[str, float])  # environment -> held-out success before it


JsonDict = dict[str, Any]
