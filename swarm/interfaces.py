"""Protocols between the parts of the system, and the values that only their methods exchange.

Invariant: each protocol for a disk, a network or another process has a second implementation in memory, in
`swarm.simulate.virtual` or `swarm.testing`.
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
    WarmUpReport,
)

Result = TypeVar("Result")

Prompts = Sequence[Sequence[int]]  # token ids of each


class Observation(NamedTuple):
    """Tokens that come before the next action of an episode."""

    token_ids: Sequence[int]
    conversation: int = 0  # that the tokens continue; the next unused number opens an empty one


Observe = Callable[[int, Sequence[int], bool], "Future[Observation | None]"]
"""(index of a rollout in a call, token ids of its newest action, True if an end token ended the action) -> the tokens
before its next action, or None if its episode is over. Any thread may set the future's result; it never fails.
"""
BeforeWrite = Callable[[int], None]  # bytes of a write to a store; raises OSError where a test makes the disk full


class Offload(Protocol):
    """Runs a blocking function without blocking the event loop.

    `asyncio.to_thread` in production; a plain call under the virtual event loop.
    """

    async def __call__(self, function: Callable[..., Result], /, *arguments: object) -> Result:
        """Calls the function with these arguments and returns its result; an error of the function propagates."""
        ...


# --- tasks and their verification -------------------------------------------------------------


class Episode(Protocol):
    """One try at a task: a state machine over actions, the same on every machine."""

    def step(self, action: Action) -> Transition:
        """Plays the next action; not called after a transition with `is_end`. Hostile actions run in the sandbox."""
        ...


@runtime_checkable
class Environment(Protocol):
    """A source of numbered problems: every node rebuilds a problem from its number, and replays answers to it.

    An environment that needs more than 0.05 s of CPU for an action declares the seconds as an attribute `answer_cpu_s`;
    ten times the CPU time of the slowest right action is a good choice. sandbox.timeout_s bounds `answer_cpu_s`.
    """

    name: str
    verifier: str  # "name/version": two nodes with equal strings give equal observations and rewards
    num_tasks: int  # tasks are numbered 0..num_tasks-1
    max_turns: int  # most actions of an episode; 1: a single answer

    def task(self, task_id: int) -> Task:
        """The problem with this number, the same on every machine. Raises LookupError outside of 0..num_tasks-1."""
        ...

    def episode(self, task_id: int) -> Episode:
        """Begins a new try at a problem: a pure function of configuration, number and actions. Raises LookupError."""
        ...

    def reference(self, task_id: int) -> str:
        """The right answer to a problem as text, for the majority baseline; never sent. Raises LookupError."""
        ...


class EnvironmentShape(NamedTuple):
    """Verifier and turn limit of an environment, for code that has no instance of the environment."""

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
    """Another node whose answers are scored, and its standing here."""

    node_id: NodeId  # signer of the answers
    is_known: bool  # its reputation is above 0
    origin: str = ""  # party or subnet that is charged for a newcomer's scoring time; empty: the key
    is_relayed: bool = False  # `origin` is that of the node that relayed the answers; the signer's is not known
    is_established: bool = False  # an established party, which counts in full; not every known peer is one


class Verifier(Protocol):
    """Replays episodes in a restricted process, so that no answer can run code on the node."""

    async def verify(
        self, env: str, task_id: int, episodes: Sequence[Actions], producer: Producer | None = None
    ) -> Verdict:
        """Rebuilds the task and replays each episode.

        Args:
            env: name of the environment.
            task_id: number of the task.
            episodes: actions of each episode; may be hostile.
            producer: author of the actions; None: this node, which never waits for other producers.

        Raises:
            LookupError: unknown environment or task.
            RolloutFailed: the verifier crashed, or ran out of memory or time, on these actions; as OverBudget, the
                producer's party has used up its scoring time.
            TooLarge: the actions exceed the size of a request to the verifier.
        """
        ...

    async def step(self, env: str, task_id: int, actions: Actions) -> EpisodeOutcome:
        """Outcome so far of an episode of this node, given all its actions, the newest last. Raises as `verify`."""
        ...


# --- text and tokens ---------------------------------------------------------------------------


class Tokenizer(Protocol):
    """The tokenizer, as admission and scoring use it."""

    digest: Digest
    vocab_size: int
    eos_ids: frozenset[int]

    def encode_prompt(self, task: Task) -> list[int]:
        """Token ids of the task's chat up to the first generated token, an assistant prefix included."""
        ...

    def encode_observation(self, messages: Sequence[Message], is_ended: bool) -> list[int]:
        """Token ids between a turn of the model and its next turn; a function of the arguments alone.

        In order: the end token if the model did not draw it (`is_ended` False), the rest of the turn's end, the
        messages as plain text between the template's markers, and the opening of the next turn. A last message of
        role `assistant` is a prefix of that turn. Raises ConfigError if this tokenizer supports single turns only.
        """
        ...

    def encode_response(self, text: str) -> list[int]:
        """Token ids of a response text, EOS appended; for rollouts of another tokenizer or of text alone."""
        ...

    def byte_lengths(self, text: str) -> list[int]:
        """Number of UTF-8 bytes of `text` for each token of `encode_response(text)`; 0 for the end token.

        If several tokens share a character, all its bytes count for the first of them.
        """
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of response tokens: every token is visible except an end token in the last position.

        A special token elsewhere appears as its literal text, and an id without text as U+FFFD.
        """
        ...


TaskOf = Callable[[str, int], Task]
"""(environment, number) -> the task as this node builds it. Raises LookupError."""
AnswerOf = Callable[[str, int], str]
"""(environment, number) -> the right answer to the task, from this node's environment. Raises LookupError."""


# --- generation --------------------------------------------------------------------------------


class PromptChooser(Protocol):
    """Adaptive curriculum: chooses prompts and their numbers of responses by the rewards of this node's own groups.

    Its memory is plain JSON. Recipes implement it through `swarm.objectives.part.PromptPart`.
    """

    def initial(self) -> Mapping[str, Any]:
        """Returns the memory before the first group."""
        ...

    def odds(self, memory: Mapping[str, Any], keys: Sequence[str]) -> list[float]:
        """Sampling weight >= 0 of each candidate prompt, by key; if all are 0, any candidate may be chosen."""
        ...

    def counts(self, memory: Mapping[str, Any], keys: Sequence[str], group_size: int, largest: int) -> list[int]:
        """Number of responses that each prompt, by key, gets at first: in [2, largest]."""
        ...

    def missing(self, rewards: Sequence[float], group_size: int, largest: int) -> int:
        """Number of further responses for a prompt after these rewards; at most `largest` responses in all."""
        ...

    def seen(self, memory: Mapping[str, Any], key: str, rewards: Sequence[float]) -> Mapping[str, Any]:
        """Returns the memory after the rewards of one more group of the prompt `key`."""
        ...


class Generator(Protocol):
    """A local engine that samples from known weights.

    Contract: log-probs are those of the sampled tokens at the sampling temperature, and do not depend on the
    batch; EOS is kept; the spans of a rollout name the weights that produced each token.
    """

    @property
    def version(self) -> PolicyVersion:
        """The weights that the next token comes from."""
        ...

    @property
    def compute_dtype(self) -> str:
        """The dtype of the engine's forward passes; "" if it is not known."""
        ...

    def generate(
        self,
        prompts: Prompts,
        num_samples: int,
        sampling: Sampling,
        numbers: Sequence[int] | None = None,
        observe: Observe | None = None,
    ) -> list[list[Rollout]]:
        """Samples `num_samples` rollouts for each prompt (blocking; run it in a thread). Their rewards are NaN.

        Args:
            prompts: token ids of each prompt.
            num_samples: number of rollouts of each prompt.
            sampling: sampling parameters; `max_new_tokens` is the limit of one action.
            numbers: for each prompt, the number of questions that this node asked before it. The samples then depend
                only on seed, weights, prompt, number and observations, so that a restarted node repeats them.
            observe: called after each action; None: each rollout is one action.
        """
        ...

    def greedy(self, prompts: Prompts, max_new_tokens: int, observe: Observe | None = None) -> list[Actions]:
        """Texts of the greedy actions for each prompt (blocking); `observe` is as in `generate`."""
        ...

    def score(self, sequences: Prompts) -> list[FloatArray]:
        """Log-probs [T] at temperature 1 of each sequence's tokens given those before; the first is NaN (blocking)."""
        ...

    def load(
        self, version: PolicyVersion, weights: object, *, canaries: Sequence[Canary] = (), in_flight: bool = False
    ) -> LoadReport:
        """Replaces the weights, all or nothing (blocking); generation pauses.

        `version` changes only if the new weights reproduce the publisher's log-probs of the canaries, within this
        engine's tolerance.

        Args:
            version: name of the weights.
            weights: published tensors by name.
            canaries: texts with log-probs, from the version's manifest.
            in_flight: True: a running call of `generate` continues with the new weights from its next token, which its
                spans record; False: the call ends first.

        Raises:
            ConfigError: the tensors do not fit this model.
            WeightsRefused: the engine did not become this version. After either error the engine serves the old
                weights.
        """
        ...

    def cancel(self) -> None:
        """Ends a running call of `generate` soon (from any thread); its unfinished rollouts are returned as ABORTED."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """Request for one continuation of a prompt."""

    prompt_ids: Sequence[int]  # not empty
    sampling: Sampling  # temperature 0: the likeliest token each time
    seed: int
    num_top: int = 0  # number of likeliest tokens to return for each position
    end_ids: frozenset[int] = frozenset()  # tokens that end the completion besides the model's own end tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """An engine's result for a request, T tokens."""

    token_ids: Sequence[int]  # [T], the end token kept
    logprobs: Sequence[float] | None  # [T] at the sampling temperature (greedy: at 1); None: not known
    top: Sequence[Sequence[tuple[int, float]]]  # [T], the likeliest tokens and their log-probs; empty: not known
    spans: Sequence[VersionSpan]  # the weights that made each token
    finish: FinishReason


OnTokens = Callable[[Sequence[int], Sequence[float], Sequence[Sequence[tuple[int, float]]]], bool]
"""(new tokens, their log-probs, the likeliest tokens at each, as in `Completion`) -> True to continue the completion.

The engine calls it in its own thread while it makes a completion; it must not block. False ends the completion with
these tokens, as an end token would.
"""


class Completer(Protocol):
    """An engine that completes prompts for many callers at once, besides its node's own generation."""

    @property
    def version(self) -> PolicyVersion:
        """The weights that the next token comes from."""
        ...

    def complete(self, request: CompletionRequest, on_tokens: OnTokens | None = None) -> "Future[Completion]":
        """Begins a completion (from any thread); cancelling the future ends the completion soon.

        An engine that cannot stream tokens never calls `on_tokens`. The future fails with Unavailable if the engine
        failed or was closed.
        """
        ...

    def score(self, sequences: Prompts) -> list[FloatArray]:
        """As `Generator.score`."""
        ...


# --- exchange between nodes --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerAddress:
    """Address of a node, and the node id that it must prove there."""

    node_id: NodeId
    endpoint: str  # host:port; behind a relay: the relay's host:port, "/" and the relay's node id

    @property
    def relay(self) -> "PeerAddress | None":
        """The relay through which the node is reached; None if the node is dialled directly."""
        endpoint, relay_id = split_relayed(self.endpoint)
        return PeerAddress(node_id=relay_id, endpoint=endpoint) if relay_id else None

    @property
    def location(self) -> str:
        """Unique location of a node: its endpoint; behind a relay, followed by "/" and the node id."""
        return f"{self.endpoint}/{self.node_id}" if "/" in self.endpoint else self.endpoint


@dataclass(frozen=True, kw_only=True, slots=True)
class DialBack:
    """Result of a peer's attempt to dial us."""

    host: str  # from which our call came, as the peer saw it; IPv6 in brackets
    is_reached: bool
    detail: str  # reason if the peer did not reach us


@dataclass(frozen=True, kw_only=True, slots=True)
class StreamItem:
    """One entry of a subscription: a whole group, or (`sealed` is None) the notice of a group to fetch by digest.

    An entry with an empty digest is neither: it only holds commitments to groups that follow.
    """

    cursor: Cursor
    digest: Digest
    size_bytes: int
    sealed: SealedGroup | None
    commitments: tuple[Digest, ...] = ()  # to answers of this group, or of groups that follow
    producer: NodeId = ""  # of the announced group, as claimed by the sender; empty if the sender names none


class ExchangeHandler(Protocol):
    """Service of a node to its peers. Every argument from a peer is hostile until checked."""

    def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        """Yields held groups after `cursor` that the peer wants, then new ones, until the peer stops reading.

        Raises Unavailable as soon as the peer's reputation is below the floor, also in the middle of the stream.
        """
        ...

    async def fetch(self, peer: NodeId, digest: Digest) -> SealedGroup:
        """The held group with this digest. Raises NotHeld; Unavailable for a peer below the reputation floor."""
        ...

    def watch(self, peer: NodeId, policy_id: str, window: int) -> AsyncIterator[SealedManifest | Credit]:
        """Yields the held manifests of a lineage, oldest first, then each new one for as long as the peer reads.

        If this node trains the lineage, it also grants the peer credit to start groups, with up to `window` of them
        outstanding; a window of 0 asks for no credit. Raises NotHeld if this node holds nothing of the lineage, and
        Unavailable for a peer whose reputation is below the floor.
        """
        ...

    async def chunk(self, peer: NodeId, digest: Digest) -> bytes:
        """A held chunk of weights, at most 1 MiB. Raises NotHeld; Unavailable for a peer below the reputation floor."""
        ...


class PeerClient(Protocol):
    """An authenticated connection to one peer."""

    @property
    def node_id(self) -> NodeId:
        """Node id that the peer proved."""
        ...

    def subscribe(self, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        """Yields the peer's groups after `cursor` that `wanted` selects. Raises Unavailable when the stream ends."""
        ...

    async def fetch(self, digest: Digest, max_bytes: int, timeout_s: float) -> SealedGroup:
        """Fetches one group by digest; resumes a transfer that broke off on this or an earlier connection.

        Raises NotHeld, TooLarge (more than `max_bytes`), and Unavailable if no whole group came within `timeout_s`.
        """
        ...

    def watch(self, policy_id: str, window: int) -> AsyncIterator[SealedManifest | Credit]:
        """Yields the peer's manifests of a lineage, then new ones; also credit, if the peer trains the lineage.

        The manifests are unchecked. Raises NotHeld, and Unavailable when the stream ends.
        """
        ...

    async def fetch_chunk(self, digest: Digest, timeout_s: float) -> bytes:
        """Fetches one chunk of weights, at most 1 MiB, that hashes to `digest`; resumed as in `fetch`.

        Raises NotHeld, Forged if other data arrived, and Unavailable if no whole chunk came within `timeout_s`.
        """
        ...

    async def close(self) -> None:
        """Ends the connection and its streams."""
        ...


class Transport(Protocol):
    """The data plane: gRPC over TLS in production, a faulty in-memory network in simulation."""

    async def serve(self, handler: ExchangeHandler) -> tuple[str, ...]:
        """Starts answering peers through `handler`; returns the endpoints to advertise (host:port)."""
        ...

    async def connect(self, address: PeerAddress, timeout_s: float) -> PeerClient:
        """Opens a mutually authenticated connection to the node at `address`. Raises Unavailable, Unauthenticated."""
        ...

    async def stop(self) -> None:
        """Stops answering and closes every connection."""
        ...


class Reservation(Protocol):
    """A reservation at a relay, through which other nodes reach this one."""

    @property
    def endpoint(self) -> str:
        """Endpoint to advertise while the reservation is held."""
        ...

    @property
    def held(self) -> asyncio.Event:
        """Event that is set while the relay holds the reservation."""
        ...

    async def hold(self) -> None:
        """Holds the reservation and accepts connections; raises Unavailable when the reservation is lost."""
        ...


class Reachability(Protocol):
    """Transport operations that check if other nodes can reach this one, and make it reachable through relays."""

    is_dialable: bool
    """True if others can dial this node, as far as is known; a node that cannot be dialled relays nothing."""

    async def dial_back(self, peer: PeerAddress, timeout_s: float) -> DialBack:
        """Asks a peer to dial the address from which our call comes. Raises Unavailable."""
        ...

    def reservation_at(self, relay: PeerAddress) -> Reservation:
        """Creates an object for a reservation at a relay; `Reservation.hold` makes the reservation."""
        ...

    async def check_reservation(self, reservation: Reservation, timeout_s: float) -> None:
        """Connects to this node itself through a reservation that it holds. Raises Unavailable if that fails."""
        ...

    async def announce_at(self, relay: PeerAddress, advert: bytes) -> None:
        """Sends a relay our signed advert, which the relay stores in the directory. Raises Unavailable."""
        ...

    async def records_at(self, relay: PeerAddress) -> list[bytes]:
        """Signed adverts that a relay knows, unchecked. Raises Unavailable."""
        ...

    async def renew_connections(self) -> None:
        """Ends every connection that this node opened: they broke when its network changed."""
        ...


class Discovery(Protocol):
    """Directory of the swarm: signed adverts with an expiry, in a DHT or in memory."""

    async def announce(self, advert: Advert) -> None:
        """Publishes this node's own advert, which replaces its previous one. Raises Unavailable."""
        ...

    async def lookup(self) -> list[Advert]:
        """Verified, unexpired adverts of the run, this node's stored one included; some may be missing."""
        ...

    async def maintain(self) -> None:
        """Makes one round of repair: probes peers, rejoins after a partition, saves known peers."""
        ...

    async def stop(self) -> None:
        """Stops taking part in the directory."""
        ...


class RecordKeeper(Protocol):
    """A directory that stores and returns signed adverts for nodes that cannot reach the directory themselves."""

    async def pass_on(self, data: bytes) -> bool:
        """Checks a signed advert and stores it for its author.

        Returns False if it is no valid advert of this run, or older than the newest one of its author. Raises
        Unavailable.
        """
        ...

    async def records(self) -> list[bytes]:
        """The signed adverts of the run that have not expired."""
        ...


class GroupStore(Protocol):
    """Durable, content-addressed groups of one node, their append-only log of arrival, and the journal of draws."""

    async def put(self, scored: ScoredGroup, sealed: SealedGroup) -> Cursor:
        """Stores a group with its scores and appends it to the log; idempotent by digest. Raises StorageFull."""
        ...

    async def get(self, digest: Digest) -> SealedGroup | None:
        """The sealed group with this digest; None if it is not held, or damaged."""
        ...

    async def contains(self, digest: Digest) -> bool:
        """True for a held group, or a deleted one whose digest is still recorded, so that a replay is a duplicate."""
        ...

    async def since(self, cursor: Cursor, limit: int, own_only: bool) -> list[tuple[Cursor, SealedGroup]]:
        """Up to `limit` (own) log entries after `cursor`, or from the start for another epoch, oldest first."""
        ...

    async def head(self) -> Cursor:
        """Position of the newest log entry; deletions do not change it."""
        ...

    async def record_draw(self, draw: Draw) -> None:
        """Journals a draw before its step is made; a draw of the same step is replaced. Raises StorageFull."""
        ...

    async def journal(self, from_step: int) -> list[tuple[int, tuple[Digest, ...]]]:
        """Journalled draws from a step on, in order: number of the draw and digests of its groups."""
        ...

    async def draws(self, from_step: int) -> list[Draw]:
        """Journalled draws from a step on, with their groups; ends before the first draw with a lost group."""
        ...

    async def places(self, limit: int) -> list[DrawPlace]:
        """The newest `limit` places of the journalled draws, oldest first."""
        ...

    async def abandon(self, first_step: int, last_step: int) -> None:
        """Records that these draws will not be made again: their groups count as used up. Raises StorageFull.

        `draws` returns them without groups, also those that the journal does not hold.
        """
        ...

    async def give_up(self, step: int, digest: Digest) -> None:
        """Removes a group from a journalled draw for good: `uses` counts the group as used up. Raises StorageFull."""
        ...

    async def put_note(self, key: str, text: str) -> None:
        """Stores a short text of the journal under a key; an empty text deletes it. Raises StorageFull."""
        ...

    async def notes(self) -> dict[str, str]:
        """Every stored text by key."""
        ...

    async def uses(self) -> dict[Digest, int]:
        """Number of draws that took each group, with or without signal; `GIVEN_UP_USES` or more for one given up."""
        ...

    async def load_scored(self, limit: int, max_bytes: float = math.inf) -> list[ScoredGroup]:
        """The newest `limit` stored groups, oldest first, to refill the replay buffer after a restart.

        Fewer if they would take more than `max_bytes` of memory: 400 bytes in the store may decompress to a megabyte.
        """
        ...

    async def forget(
        self, before_s: float, max_bytes: int, keep_from_step: int | None = None, keep: Collection[Digest] = ()
    ) -> int:
        """Deletes groups first seen before `before_s` or beyond a byte budget, oldest first; returns their number.

        Groups drawn for step `keep_from_step` or later stay, for a resume from there, and so do the groups in `keep`.
        """
        ...

    async def close(self) -> None:
        """Flushes to disk and closes the store."""
        ...


class CoordinatorClient(Protocol):
    """A node's connection to the coordinator. Every call may raise Unavailable; a node works without a coordinator."""

    async def heartbeat(self, report: NodeReport) -> Advice:
        """Renews the node's lease, reports its figures, and returns the coordinator's advice."""
        ...

    async def record_versions(self, versions: Sequence[PolicyVersion]) -> None:
        """Adds up to MAX_RECORDED versions, oldest first, to the ledger in one transaction.

        The ledger refuses a version that would fork the lineage or lower its step; the call raises no error for that.
        """
        ...

    def watch_versions(self, policy_id: str) -> AsyncIterator[PolicyVersion]:
        """Yields the ledger's head of a lineage, then each new head. Raises Unavailable when the stream breaks."""
        ...

    async def leave(self) -> None:
        """Ends the lease at once."""
        ...

    async def close(self) -> None:
        """Ends the connection to the coordinator."""
        ...


# --- the agent as trainer and generator see it -------------------------------------------------


class LocalExchange(Protocol):
    """The agent, as its own worker uses it: in process, or with the same meaning over a local gRPC socket."""

    async def wait_capacity(self) -> int:
        """Waits until new groups would not become too old to use; returns how many may be started, > 0."""
        ...

    async def num_asked(self) -> int:
        """Number of the next question: the count of questions that this node asked so far, restarts included.

        A node that runs alone counts exactly; in a swarm, a restart may skip numbers but never repeats one.
        """
        ...

    async def put(self, group: RolloutGroup, outcomes: Sequence[EpisodeOutcome] = ()) -> float:
        """Scores, seals, stores and publishes a group that this node generated; returns its mean reward.

        `outcomes` [G] come from agent runs, which no node can replay: a group with outcomes never leaves this node, and
        storing it again changes nothing.

        Raises StorageFull if the store has no room for a group with `outcomes`; a group without them is dropped.
        """
        ...

    async def draw(self, head: PolicyVersion) -> Draw:
        """Waits for `replay.local_groups` local groups, adds held external ones, journals and returns the draw."""
        ...

    async def redraw(self, from_step: int) -> list[Draw]:
        """The journalled draws from a step on, rebuilt from the store, for a resume.

        Raises ConfigError if `from_step` precedes every reported checkpoint, which means that checkpoints were lost.
        """
        ...

    async def begin_again(self, step: int, passed: Digest | None = None) -> Attempt:
        """The next task in repeating a journalled step that may have ended the process: a trial, or the step itself.

        `passed` is the `trial` of the previous attempt if that trial did not end the process.
        """
        ...

    async def publish(self, version: PolicyVersion, manifests: Sequence[bytes] = ()) -> None:
        """Announces a new version of our own lineage: updates the head, the advert and the ledger.

        `manifests` are the unsigned bodies of the manifests that lead to the version; the agent signs and serves them.
        Their chunks must already be in the node's weight store.
        """
        ...

    async def next_update(self, held: PolicyVersion | None, *, wait: bool) -> PatchChain | None:
        """The patch chain from `held` (None: nothing of the followed lineage) to the newest version of that lineage.

        Every manifest is checked, and every chunk is in the node's weight store. With `wait`, the call waits for a
        version newer than `held`; without it, the call returns None if no newer version is known.
        """
        ...

    async def report_update(self, report: ApplyReport) -> None:
        """Reports that the engine loaded a version, or why it did not."""
        ...

    async def report_step(self, report: StepReport) -> None:
        """Reports one optimizer step."""
        ...

    async def report_checkpoint(self, next_draw: int, error: str = "") -> None:
        """Reports a checkpoint by the first draw that is not part of it, or an error that prevented the checkpoint."""
        ...

    async def report_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        """Reports the evaluations of a version."""
        ...

    async def report_warm_up(self, report: WarmUpReport) -> None:
        """Reports the supervised warm-up that version 0 comes from; called before that version is published."""
        ...

    async def report_activity(self, activity: Activity) -> None:
        """Reports the current activity of the worker; called about once a second while the activity advances."""
        ...

    async def verify(self, env: str, task_id: int, episodes: Sequence[Actions]) -> Verdict:
        """As `Verifier.verify` for actions of this node; for evaluation."""
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
        """Makes one optimizer step (blocking; run it in a thread). A non-finite step is skipped and reported."""
        ...

    def dry_run(self, draw: Draw) -> None:
        """Computes and discards the gradient of a draw (blocking), to find a group that ends the process."""
        ...

    @property
    def next_draw(self) -> int:
        """Number of the first draw that is not yet learned from (1 for a new learner); part of the checkpoint."""
        ...

    def snapshot(self) -> tuple[PolicyVersion, object]:
        """The newest version and its published tensors, for `Generator.load`; later steps do not change them."""
        ...

    def save(self) -> None:
        """Writes a checkpoint that reproduces the learner (blocking). Raises OSError if the disk refuses it."""
        ...

    def evaluated(self, evaluations: Sequence[Evaluation]) -> None:
        """Takes the evaluations of the newest version; called before the checkpoint of that version is written."""
        ...
