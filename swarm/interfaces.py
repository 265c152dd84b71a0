"""Every seam of the system, on one page: what is injected, and what each side promises.

Invariant: modules of one layer know each other only through these protocols. What talks to
a disk, a network or another process has a second form in memory, in `swarm.simulate.virtual` or `swarm.testing`.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np

from swarm.activity import Activity
from swarm.addresses import split_relayed
from swarm.episode import Action, Actions, EpisodeOutcome, Message, Transition
from swarm.types import (
    Advert,
    Advice,
    ApplyReport,
    Attempt,
    Canary,
    Credit,
    Cursor,
    Digest,
    Draw,
    DrawPlace,
    Evaluation,
    FinishReason,
    FloatArray,
    LoadReport,
    NodeId,
    NodeReport,
    PatchChain,
    PolicyVersion,
    Rollout,
    RolloutGroup,
    Sampling,
    ScoredGroup,
    SealedGroup,
    SealedManifest,
    StepReport,
    StreamFilter,
    Task,
    VersionSpan,
)

Result = TypeVar("Result")

Prompts = Sequence[Sequence[int]]  # token ids of each


class Observation(NamedTuple):
    """Tokens that come before the next action of an episode."""

    token_ids: Sequence[int]
    conversation: int = 0  # that they continue; the next unused number: they open one, and nothing is before them


Observe = Callable[[int, Sequence[int], bool], "Future[Observation | None]"]
"""(place of a rollout in a call, ids of its newest action, True if an end token ended it) -> tokens before its next
action, None where its episode is over. The future may be filled in any thread; it never fails.
"""
BeforeWrite = Callable[[int], None]  # bytes of a write to a store; raises OSError where a test makes the disk full


class Offload(Protocol):
    """Runs a blocking function without blocking the event loop.

    In production `asyncio.to_thread`, under the virtual event loop a plain call.
    """

    async def __call__(self, function: Callable[..., Result], /, *arguments: object) -> Result:
        """Result of the function with these arguments; its errors are raised."""
        ...


# --- tasks and their verification -------------------------------------------------------------


class Episode(Protocol):
    """One try at a task: a state machine over actions, the same on every machine."""

    def step(self, action: Action) -> Transition:
        """The environment's answer; not called again after an end. May run hostile text: in the sandbox only."""
        ...


@runtime_checkable
class Environment(Protocol):
    """A source of problems that every node can rebuild from a number, and replay the answers to.

    One that needs more than 0.05 s of CPU for an action says how much as `answer_cpu_s`; the time of the slowest
    right one times ten is a good choice, and sandbox.timeout_s bounds it.
    """

    name: str
    verifier: str  # "name/version": two nodes with equal strings give equal observations and rewards
    num_tasks: int  # tasks are numbered 0..num_tasks-1
    max_turns: int  # most actions of an episode; 1: a single answer

    def task(self, task_id: int) -> Task:
        """The problem with that number; the same on every machine. Raises LookupError outside its range."""
        ...

    def episode(self, task_id: int) -> Episode:
        """A new try at that problem; a function of configuration, number and actions. Raises LookupError."""
        ...

    def reference(self, task_id: int) -> str:
        """The right answer as text, for the majority baseline; it is never sent."""
        ...


class EnvironmentShape(NamedTuple):
    """Facts about an environment that a node did not build itself."""

    verifier: str
    max_turns: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Result of the sandboxed verifier for one group: the task as rebuilt here, and each episode as replayed."""

    task: Task
    outcomes: tuple[EpisodeOutcome, ...]  # [G]
    verifier: str
    reference: str
    rewards: FloatArray = field(init=False, compare=False)  # [G], in [0, 1], read-only

    def __post_init__(self) -> None:
        rewards = np.array([outcome.reward for outcome in self.outcomes], np.float32)
        rewards.flags.writeable = False
        object.__setattr__(self, "rewards", rewards)


@dataclass(frozen=True, kw_only=True, slots=True)
class Producer:
    """Another node whose answers are scored."""

    node_id: NodeId  # who signed them
    is_known: bool  # groups of it were admitted before, more of them than were refused
    origin: str = ""  # whom the time counts against that newcomers take: party or subnet; empty: the key
    is_relayed: bool = False  # the origin is that of who passed the answers on: of their signer's nothing is known
    is_established: bool = False  # counts in full, where that is not true of everybody who is known


class Verifier(Protocol):
    """Replays episodes in a restricted process, so that no answer can run code on the node."""

    async def verify(
        self, env: str, task_id: int, episodes: Sequence[Actions], producer: Producer | None = None
    ) -> Verdict:
        """Rebuilds the task and replays each episode.

        Args:
            env: name of the environment.
            task_id: number of the task.
            episodes: actions of each episode; hostile.
            producer: author of the actions; None: this node, which waits for no other producer.

        Raises:
            LookupError: unknown environment or task.
            RolloutFailed: the verifier crashed, ran out of memory or out of time on these actions.
        """
        ...

    async def step(self, env: str, task_id: int, actions: Actions) -> EpisodeOutcome:
        """An episode of this node after its newest action, the last of `actions`. Raises as `verify`."""
        ...


# --- text and tokens ---------------------------------------------------------------------------


class Tokenizer(Protocol):
    """The tokenizer as admission and scoring see it."""

    digest: Digest
    vocab_size: int
    eos_ids: frozenset[int]

    def encode_prompt(self, task: Task) -> list[int]:
        """Token ids of the chat up to where generation begins (an assistant prefix included)."""
        ...

    def encode_observation(self, messages: Sequence[Message], is_ended: bool) -> list[int]:
        """Token ids between a turn of the model and its next one: a function of the arguments alone.

        The end token where it was not drawn (`is_ended` False), what else the turn's end has, the messages as plain
        text between the template's markers, and the opening of the next turn. A last message of role `assistant`
        begins that turn. Raises ConfigError where several turns are not possible with this tokenizer.
        """
        ...

    def encode_response(self, text: str) -> list[int]:
        """Token ids of a response text, EOS appended; for rollouts whose tokens are not ours."""
        ...

    def byte_lengths(self, text: str) -> list[int]:
        """UTF-8 bytes of `text` that each token of `encode_response(text)` stands for; the end token for none.

        Where tokens share a character, all of its bytes count for the first of them.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of response tokens in which every token shows, but for an end token in the last place.

        A marker elsewhere shows as it is written, an id that stands for no text as U+FFFD.
        """
        ...


TaskOf = Callable[[str, int], Task]
"""The task of an environment and number, as this node builds it. Raises LookupError."""
AnswerOf = Callable[[str, int], str]
"""The right answer to a task, from the environment of this node. Raises LookupError."""


# --- generation --------------------------------------------------------------------------------


class PromptChooser(Protocol):
    """Adaptive curriculum: chooses prompts, and how often, by the rewards of own groups; memory is plain JSON.

    See `swarm.objectives.part.PromptPart`, which recipes implement it with.
    """

    def initial(self) -> Mapping[str, Any]:
        """Memory before the first group."""
        ...

    def odds(self, memory: Mapping[str, Any], keys: Sequence[str]) -> list[float]:
        """Weight >= 0 of each candidate; where all are 0 any may be asked."""
        ...

    def counts(self, memory: Mapping[str, Any], keys: Sequence[str], group_size: int, largest: int) -> list[int]:
        """Number of responses that each prompt gets at first: in [2, largest]."""
        ...

    def missing(self, rewards: Sequence[float], group_size: int, largest: int) -> int:
        """Number of further responses that a prompt gets after these, at most `largest` in all."""
        ...

    def seen(self, memory: Mapping[str, Any], key: str, rewards: Sequence[float]) -> Mapping[str, Any]:
        """Memory after the rewards of one more group."""
        ...


class Generator(Protocol):
    """A local engine that samples from known weights.

    Contract: log-probs are those of the sampled tokens at the sampling temperature, the same numbers
    alone or in a batch; EOS is kept; `version` names the weights that produced every token.
    """

    @property
    def version(self) -> PolicyVersion:
        """The weights that the next token comes from."""
        ...

    @property
    def compute_dtype(self) -> str:
        """The dtype of its passes; empty where it is not known."""
        ...

    def generate(
        self,
        prompts: Prompts,
        num_samples: int,
        sampling: Sampling,
        numbers: Sequence[int] | None = None,
        observe: Observe | None = None,
    ) -> list[list[Rollout]]:
        """`num_samples` rollouts for each prompt (blocking; run it in a thread). Rewards are NaN.

        Args:
            prompts: token ids of each.
            num_samples: of each prompt.
            sampling: how tokens are drawn; `max_new_tokens` is the limit of one action.
            numbers: one per prompt, how many questions this node asked before it: the samples then depend on nothing
                but seed, weights, prompt, number and observations, so that a restarted node makes them again.
            observe: asked after each action; None: a rollout is one action.
        """
        ...

    def greedy(self, prompts: Prompts, max_new_tokens: int, observe: Observe | None = None) -> list[Actions]:
        """The texts of the greedy actions for each prompt (blocking); `observe` as of `generate`."""
        ...

    def score(self, sequences: Prompts) -> list[FloatArray]:
        """[T] log-probs at temperature 1 of each token given all before it, the first NaN (blocking)."""
        ...

    def load(
        self, version: PolicyVersion, weights: object, *, canaries: Sequence[Canary] = (), in_flight: bool = False
    ) -> LoadReport:
        """Replaces the weights: all or nothing (blocking).

        Generation pauses. `version` changes only when the new weights score the canaries as the publisher says, within
        this engine's mismatch.

        Args:
            version: name of the weights.
            weights: published tensors by name.
            canaries: samples of the version's manifest.
            in_flight: a running call of generate continues with the new weights from its next token (its spans say
                where); else it ends first.

        Raises:
            ConfigError: they do not fit this model.
            WeightsRefused: the engine did not become that version. In both cases the old weights serve on.
        """
        ...

    def cancel(self) -> None:
        """Ends a call of generate in progress soon (from any thread); unfinished rollouts come back ABORTED."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """One continuation of a prompt that somebody asks of an engine."""

    prompt_ids: Sequence[int]  # not empty
    sampling: Sampling  # temperature 0: the likeliest token each time
    seed: int
    num_top: int = 0  # how many of the likeliest tokens to give with each one
    end_ids: frozenset[int] = frozenset()  # tokens that end it beside the model's own


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """An engine's result for a request, T tokens."""

    token_ids: Sequence[int]  # [T], the end token kept
    logprobs: Sequence[float] | None  # [T] at the sampling temperature (at 1 of greedy ones); None: not known
    top: Sequence[Sequence[tuple[int, float]]]  # [T] of the likeliest tokens and their log-probs; empty: not known
    spans: Sequence[VersionSpan]  # which weights made which tokens
    finish: FinishReason


OnTokens = Callable[[Sequence[int], Sequence[float], Sequence[Sequence[tuple[int, float]]]], bool]
"""(new tokens, their log-probs, the likeliest tokens at each, as in `Completion`) -> True if the completion goes on.

Called in the engine's thread while a completion is made; it must not block. False ends the completion with these
tokens, as if an end token had come.
"""


class Completer(Protocol):
    """An engine that completes prompts for many callers at once, beside the calls of its node."""

    @property
    def version(self) -> PolicyVersion:
        """The weights that the next token comes from."""
        ...

    def complete(self, request: CompletionRequest, on_tokens: OnTokens | None = None) -> "Future[Completion]":
        """Begins a completion (from any thread); cancelling the future ends it soon.

        An engine that has no tokens before the end does not call `on_tokens`. The future fails with Unavailable where
        the engine failed or was closed.
        """
        ...

    def score(self, sequences: Prompts) -> list[FloatArray]:
        """As `Generator.score`."""
        ...


# --- exchange between nodes --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerAddress:
    """Address of a node, and the id that it must prove."""

    node_id: NodeId
    endpoint: str  # host:port; of a node behind a relay the relay's, and "/" and its node id

    @property
    def relay(self) -> "PeerAddress | None":
        """The relay through which the node is reached; None where it is dialled itself."""
        endpoint, relay_id = split_relayed(self.endpoint)
        return PeerAddress(node_id=relay_id, endpoint=endpoint) if relay_id else None

    @property
    def location(self) -> str:
        """Unique location of a node: its endpoint, and behind a relay its name there."""
        return f"{self.endpoint}/{self.node_id}" if "/" in self.endpoint else self.endpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class DialBack:
    """Result of a peer's attempt to dial us."""

    host: str  # that our call came from, as the peer saw it; IPv6 in brackets
    is_reached: bool
    detail: str  # why not


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamItem:
    """One entry of a subscription: a whole group, or (sealed None) the notice of one to be fetched by digest.

    Without a digest it is neither: only commitments to groups that follow.
    """

    cursor: Cursor
    digest: Digest
    size_bytes: int
    sealed: SealedGroup | None
    commitments: tuple[Digest, ...] = ()  # of its group, or of those that follow
    producer: NodeId = ""  # of the group of a notice, as the sender says; empty where it does not


class ExchangeHandler(Protocol):
    """Service of a node to its peers. Every argument from a peer is hostile until checked."""

    def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        """Groups after `cursor` that the peer wants, then live ones for as long as it reads.

        Raises Unavailable for a peer whose reputation is too low, also in the middle.
        """
        ...

    async def fetch(self, peer: NodeId, digest: Digest) -> SealedGroup:
        """The held group of that digest. Raises NotHeld; Unavailable for a peer whose reputation is too low."""
        ...

    def watch(self, peer: NodeId, policy_id: str, window: int) -> AsyncIterator[SealedManifest | Credit]:
        """Held manifests of a lineage, oldest first, then each new one for as long as the peer reads.

        Where this node trains that lineage it also grants the peer credit: groups that it may start, up to `window`
        that have not arrived yet; 0 asks for none. Raises NotHeld for a lineage of which nothing is held, Unavailable
        for a peer whose reputation is too low.
        """
        ...

    async def chunk(self, peer: NodeId, digest: Digest) -> bytes:
        """A held chunk of weights, at most 1 MiB. Raises NotHeld; Unavailable for a peer of low reputation."""
        ...


class PeerClient(Protocol):
    """An authenticated connection to one peer."""

    @property
    def node_id(self) -> NodeId:
        """The peer that proved its identity."""
        ...

    def subscribe(self, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        """The peer's groups after `cursor`, as wanted; not reading holds it back. Raises Unavailable when it ends."""
        ...

    async def fetch(self, digest: Digest, max_bytes: int, timeout_s: float) -> SealedGroup:
        """One group by digest, resumed where a stream, or the last call for it on another connection, broke off.

        Raises NotHeld, TooLarge (more than `max_bytes`), and Unavailable where no whole group came within `timeout_s`.
        """
        ...

    def watch(self, policy_id: str, window: int) -> AsyncIterator[SealedManifest | Credit]:
        """Manifests that the peer holds of a lineage, then new ones; and credit, where it trains the lineage.

        Nothing in a manifest was checked. Raises NotHeld, Unavailable when it ends.
        """
        ...

    async def fetch_chunk(self, digest: Digest, timeout_s: float) -> bytes:
        """One chunk of weights, at most 1 MiB, that hashes to `digest`; resumed as in `fetch`.

        Raises NotHeld, Forged where something else arrived, and Unavailable where nothing came within `timeout_s`.
        """
        ...

    async def close(self) -> None:
        """Ends the connection and its streams."""
        ...


class Transport(Protocol):
    """The data plane: gRPC over TLS in production, a faulty in-memory network in simulation."""

    async def serve(self, handler: ExchangeHandler) -> tuple[str, ...]:
        """Starts answering peers; returns the endpoints to advertise (host:port)."""
        ...

    async def connect(self, address: PeerAddress, timeout_s: float) -> PeerClient:
        """A mutually authenticated connection. Raises Unavailable, Unauthenticated."""
        ...

    async def stop(self) -> None:
        """Stops answering and closes every connection."""
        ...


class Reservation(Protocol):
    """A reservation at a relay, through which others reach us."""

    @property
    def endpoint(self) -> str:
        """Endpoint to advertise while the reservation is held."""
        ...

    @property
    def held(self) -> asyncio.Event:
        """Set while the relay holds it."""
        ...

    async def hold(self) -> None:
        """Holds it and takes connections until it is lost. Raises Unavailable."""
        ...


class Reachability(Protocol):
    """Means of a transport to find out and improve whether others reach this node."""

    is_dialable: bool
    """True if others can dial it, as far as is known; who cannot be dialled relays nothing."""

    async def dial_back(self, peer: PeerAddress, timeout_s: float) -> DialBack:
        """Asks a peer to dial the address that our call comes from. Raises Unavailable."""
        ...

    def reservation_at(self, relay: PeerAddress) -> Reservation:
        """A reservation at a relay, not held yet."""
        ...

    async def check_reservation(self, reservation: Reservation, timeout_s: float) -> None:
        """Connects to ourselves through a reservation that we hold. Raises Unavailable where nobody gets through."""
        ...

    async def announce_at(self, relay: PeerAddress, advert: bytes) -> None:
        """Hands a relay our signed advert, to be put into the directory. Raises Unavailable."""
        ...

    async def records_at(self, relay: PeerAddress) -> list[bytes]:
        """Signed adverts that a relay knows, which nobody checked. Raises Unavailable."""
        ...

    async def renew_connections(self) -> None:
        """Ends every connection that we opened: they broke with the network they were of."""
        ...


class Discovery(Protocol):
    """Directory of the swarm: signed adverts with an expiry, in a DHT or in memory."""

    async def announce(self, advert: Advert) -> None:
        """Publishes this node's own advert, replacing the last. Raises Unavailable."""
        ...

    async def lookup(self) -> list[Advert]:
        """Verified, unexpired adverts of the run, own included when stored; partial views are normal."""
        ...

    async def maintain(self) -> None:
        """One round of repair: probe, rejoin after a partition, persist known peers."""
        ...

    async def stop(self) -> None:
        """Stops taking part in the directory."""
        ...


class RecordKeeper(Protocol):
    """A directory that takes and gives adverts as their authors signed them, for nodes that cannot reach it."""

    async def pass_on(self, data: bytes) -> bool:
        """Checks a signed advert and stores it as its author would; False where it is none of this run, or older than
        the newest."""
        ...

    async def records(self) -> list[bytes]:
        """The signed adverts of the run that have not expired."""
        ...


class GroupStore(Protocol):
    """Durable, content-addressed groups of one node with an append-only log of arrival."""

    async def put(self, scored: ScoredGroup, sealed: SealedGroup) -> Cursor:
        """Stores both before anything else sees them; idempotent by digest. Raises StorageFull."""
        ...

    async def get(self, digest: Digest) -> SealedGroup | None:
        """The sealed group, or None."""
        ...

    async def contains(self, digest: Digest) -> bool:
        """True also for groups that were deleted after use (so that a replay is a duplicate)."""
        ...

    async def since(self, cursor: Cursor, limit: int, own_only: bool) -> list[tuple[Cursor, SealedGroup]]:
        """Up to `limit` entries after `cursor`, oldest first; from the start when the epoch differs."""
        ...

    async def head(self) -> Cursor:
        """Position of the newest entry."""
        ...

    async def record_draw(self, draw: Draw) -> None:
        """Journals a draw before its step is made; the same step again replaces it. Raises StorageFull."""
        ...

    async def journal(self, from_step: int) -> list[tuple[int, tuple[Digest, ...]]]:
        """Journalled draws from a step on, in order."""
        ...

    async def draws(self, from_step: int) -> list[Draw]:
        """Journalled draws from a step on, with their groups; ends before the first that lost one."""
        ...

    async def places(self, limit: int) -> list[DrawPlace]:
        """The newest places of the journalled draws, oldest first, however old the groups that took them."""
        ...

    async def abandon(self, first_step: int, last_step: int) -> None:
        """Notes that these draws will not be made again: their groups count as used up. Raises StorageFull.

        `draws` returns them empty, also those that the journal did not hold (any more).
        """
        ...

    async def give_up(self, step: int, digest: Digest) -> None:
        """Takes a group out of a journalled draw, for good: `uses` counts it as used up. Raises StorageFull."""
        ...

    async def put_note(self, key: str, text: str) -> None:
        """Stores a short text of the journal under a key; an empty text deletes it. Raises StorageFull."""
        ...

    async def notes(self) -> dict[str, str]:
        """Every stored text by key."""
        ...

    async def uses(self) -> dict[Digest, int]:
        """Number of draws of each group (local groups without signal: used up), from the journal."""
        ...

    async def load_scored(self, limit: int, max_bytes: float = math.inf) -> list[ScoredGroup]:
        """The newest stored groups, oldest first, to refill the replay buffer after a restart.

        As many as take `max_bytes` of memory: what lies in the store as 400 bytes may take a megabyte.
        """
        ...

    async def forget(
        self, before_s: float, max_bytes: int, keep_from_step: int | None = None, keep: Collection[Digest] = ()
    ) -> int:
        """Deletes bodies first seen before a time or beyond a byte budget, oldest first; returns how many.

        Groups drawn for `keep_from_step` or later stay for a resume from there, and those of `keep` for draws.
        """
        ...

    async def close(self) -> None:
        """Flushes to disk and closes the store."""
        ...


class CoordinatorClient(Protocol):
    """The control plane as a node sees it. Every call may raise Unavailable; a node goes on without it."""

    async def heartbeat(self, report: NodeReport) -> Advice:
        """Renews the lease and reports figures."""
        ...

    async def record_versions(self, versions: Sequence[PolicyVersion]) -> None:
        """Adds up to MAX_RECORDED versions, oldest first, to the ledger in one transaction.

        One that would fork or go back is refused, which raises nothing.
        """
        ...

    def watch_versions(self, policy_id: str) -> AsyncIterator[PolicyVersion]:
        """The head of a lineage as the ledger has it, then each new one. Raises Unavailable when it breaks."""
        ...

    async def leave(self) -> None:
        """Ends the lease at once."""
        ...

    async def close(self) -> None:
        """Ends the connection to the coordinator."""
        ...


# --- the agent as trainer and generator see it -------------------------------------------------


class LocalExchange(Protocol):
    """The agent as its own worker sees it: in process, or over a local gRPC socket with the same meaning."""

    async def wait_capacity(self) -> int:
        """Waits until groups may be started without becoming too old to use (admission capacity); how many, > 0."""
        ...

    async def num_asked(self) -> int:
        """Questions this node asked before, also before a restart: the number of the next one.

        A node alone counts its groups exactly; in a swarm a restart may skip numbers, and never goes back.
        """
        ...

    async def put(self, group: RolloutGroup) -> float:
        """Scores, seals, stores and publishes one of our groups; returns its mean reward."""
        ...

    async def draw(self, head: PolicyVersion) -> Draw:
        """Waits for I local groups, takes up to J external ones without waiting, journals, and returns them."""
        ...

    async def redraw(self, from_step: int) -> list[Draw]:
        """The journalled draws from a step on, rebuilt from the store (resume).

        Raises ConfigError where the learner has none of the checkpoints that it reported.
        """
        ...

    async def begin_again(self, step: int, passed: Digest | None = None) -> Attempt:
        """First task before a journalled step is made again: its process may have ended in the middle.

        `passed` is the group that the answer before asked to try alone, and that did not end the process.
        """
        ...

    async def publish(self, version: PolicyVersion, manifests: Sequence[bytes] = ()) -> None:
        """A new version of our own lineage exists: updates the head, the advert and the ledger.

        `manifests` are the unsigned bodies of manifests that lead to it. Their chunks lie in the node's weight store
        already; they are signed and served.
        """
        ...

    async def next_update(self, held: PolicyVersion | None, *, wait: bool) -> PatchChain | None:
        """The patch chain from `held` (None: nothing of the followed lineage) to the newest version of that lineage.

        Every manifest was checked, and every chunk is in the node's weight store. With `wait` it waits for a newer
        version than `held`; else it returns None where none is known.
        """
        ...

    async def report_update(self, report: ApplyReport) -> None:
        """Reports that the engine loaded a version, or refused it."""
        ...

    async def report_step(self, report: StepReport) -> None:
        """Reports one optimizer step."""
        ...

    async def report_checkpoint(self, next_draw: int, error: str = "") -> None:
        """Reports a checkpoint by the first draw that is not in it, or why it could not be written."""
        ...

    async def report_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        """Reports an evaluation."""
        ...

    async def report_activity(self, activity: Activity) -> None:
        """Reports what the worker does now, about once a second while that advances."""
        ...

    async def verify(self, env: str, task_id: int, episodes: Sequence[Actions]) -> Verdict:
        """The sandboxed verifier (for evaluation)."""
        ...

    async def step(self, env: str, task_id: int, actions: Actions) -> EpisodeOutcome:
        """As `Verifier.step`."""
        ...


class Learner(Protocol):
    """One policy in training. `version` and `snapshot` may be called while `step` runs in another thread."""

    @property
    def version(self) -> PolicyVersion:
        """Newest version of the policy in training."""
        ...

    def step(self, draw: Draw) -> StepReport:
        """One optimizer step (blocking; run it in a thread). A non-finite step is skipped and reported."""
        ...

    def dry_run(self, draw: Draw) -> None:
        """Computes the gradient of a draw and forgets it (blocking): a group that ends the process ends it here."""
        ...

    @property
    def next_draw(self) -> int:
        """Number of the first draw that is not yet learned from (1 for a new learner); part of the checkpoint."""
        ...

    def snapshot(self) -> tuple[PolicyVersion, object]:
        """The newest version and its published tensors, for Generator.load. Never changes under the caller."""
        ...

    def save(self) -> None:
        """Writes a checkpoint that reproduces the learner (blocking). Raises OSError where the disk refuses it."""
        ...

    def evaluated(self, evaluations: Sequence[Evaluation]) -> None:
        """Takes in the evaluations of the newest version; called before the checkpoint of that version is written."""
        ...
