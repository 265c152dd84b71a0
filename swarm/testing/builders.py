"""Builders of test values and fakes of the protocols, shipped so that plug-in authors can test with them.

Invariant: a default group passes admission at a node that uses `ToyTokenizer` and `ScriptedVerifier`. A test names only
the fields that matter to the test.
"""

import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from swarm.environments.replay import LiveEpisodes, replay
from swarm.episode import OUTCOME, Actions, EpisodeOutcome, Message, Transition
from swarm.errors import NotHeld, RolloutFailed, Unavailable
from swarm.identity import Identity
from swarm.interfaces import Environment, ExchangeHandler, Producer, StreamItem, Tokenizer, Verdict
from swarm.types import (
    Advert,
    Correction,
    Credit,
    Cursor,
    Digest,
    FinishReason,
    NodeId,
    NodeReport,
    PolicyVersion,
    Role,
    Rollout,
    RolloutGroup,
    Sampling,
    ScoredGroup,
    SealedGroup,
    SealedManifest,
    StreamFilter,
    Task,
    TokenTrace,
    VersionSpan,
)
from swarm.wire.envelopes import seal_group

TOY_RUN_ID: Final = "local"
TOY_ENV: Final = "digits"
TOY_NOW_S: Final = 1_700_000_000.0  # where ManualClock starts


class ToyTokenizer:
    """A character tokenizer for printable ASCII and line feed, with start and end tokens; id 0 is unused.

    Example:
        tokenizer = ToyTokenizer()
        assert tokenizer.decode(tokenizer.encode_response("42")) == "42"
    """

    BOS_ID: Final = 1
    EOS_ID: Final = 2
    _FIRST_CHARACTER_ID: Final = 3
    _CHARACTERS: Final = "\n" + "".join(map(chr, range(32, 127)))

    def __init__(self, name: str = "toy") -> None:
        """Creates a tokenizer whose digest depends on `name`."""
        self.digest: Digest = hashlib.sha256(f"{name}\0{self._CHARACTERS}".encode()).digest()
        self.vocab_size = self._FIRST_CHARACTER_ID + len(self._CHARACTERS)
        self.eos_ids = frozenset({self.EOS_ID})
        self._ids = {character: self._FIRST_CHARACTER_ID + i for i, character in enumerate(self._CHARACTERS)}

    def encode_prompt(self, task: Task) -> list[int]:
        """Returns the start token and the contents of all messages, joined by line feeds."""
        return [self.BOS_ID, *self._encode("\n".join(message.content for message in task.messages))]

    def encode_observation(self, messages: Sequence[Message], is_ended: bool) -> list[int]:
        """Returns an end token unless `is_ended`, then a start token and all contents, joined by line feeds."""
        ids = [self.BOS_ID, *self._encode("\n".join(message.content for message in messages))]
        return ids if is_ended else [self.EOS_ID, *ids]

    def encode_response(self, text: str) -> list[int]:
        """Returns one id per character (that of `?` for a character outside the alphabet), then the end token."""
        return [*self._encode(text), self.EOS_ID]

    def byte_lengths(self, text: str) -> list[int]:
        """Returns the number of UTF-8 bytes of each character, then 0 for the end token."""
        return [*(len(character.encode()) for character in text), 0]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of the ids without a final end token; any other id below 3 becomes U+FFFD."""
        first = self._FIRST_CHARACTER_ID
        shown = token_ids[:-1] if token_ids[-1:] == [self.EOS_ID] else token_ids
        return "".join(self._CHARACTERS[token_id - first] if token_id >= first else "\ufffd" for token_id in shown)

    def _encode(self, text: str) -> list[int]:
        unknown = self._ids["?"]
        return [self._ids.get(character, unknown) for character in text]


def toy_task(env: str, task_id: int, is_held_out: bool = False) -> Task:
    """Toy task number `task_id` of `env`; the right answer is the last digit of the number."""
    return Task(
        env=env, task_id=task_id, messages=(Message(role="user", content=f"{task_id}="),), is_held_out=is_held_out
    )


def answers(*texts: str) -> list[Actions]:
    """Turns each text into an episode of one action."""
    return [(text,) for text in texts]


def answer_outcome(reward: float) -> EpisodeOutcome:
    """Outcome of a single answer that earned `reward`."""
    return EpisodeOutcome(reward=reward, transitions=(Transition(is_end=True, rewards={OUTCOME: reward}),))


@dataclass(slots=True)
class ScriptedVerifier:
    """A verifier without a sandbox: reward 1 if the answer is the last digit of the task number, else 0.

    Example:
        verdict = await ScriptedVerifier().verify("digits", 17, [("7",), ("8",)])  # rewards [1, 0]
    """

    environments: frozenset[str] = frozenset({TOY_ENV})
    num_tasks: int = 1_000_000
    held_out: frozenset[int] = frozenset()
    crashes_on: str | None = None  # an answer that contains it makes the verifier fail
    version: str = "digits/1"
    on_verify: Callable[[int], None] | None = None  # called with each task id that is scored
    num_scored: int = field(default=0, init=False)  # groups

    async def verify(
        self, env: str, task_id: int, episodes: Sequence[Actions], producer: Producer | None = None
    ) -> Verdict:
        """Scores the last action of each episode.

        Raises:
            LookupError: no such task.
            RolloutFailed: an action contains `crashes_on`.
        """
        if env not in self.environments or not 0 <= task_id < self.num_tasks:
            raise LookupError(f"no task {task_id} in {env}")
        if self.on_verify is not None:
            self.on_verify(task_id)
        if self.crashes_on is not None and any(self.crashes_on in text for actions in episodes for text in actions):
            raise RolloutFailed("the verifier crashed, as scripted")
        self.num_scored += 1
        reference = str(task_id % 10)
        return Verdict(
            task=toy_task(env, task_id, is_held_out=task_id in self.held_out),
            outcomes=tuple(answer_outcome(float(text == reference)) for *_, text in episodes),
            verifier=self.version,
            reference=reference,
        )

    async def step(self, env: str, task_id: int, actions: Actions) -> EpisodeOutcome:
        """Outcome of an episode that the last of `actions` ends. Raises the errors of `verify`."""
        return (await self.verify(env, task_id, [actions])).outcomes[0]


class InlineVerifier:
    """A verifier inside the calling process, for simulations and benchmarks in which every answer is our own.

    An external answer must go through `swarm.environments.sandbox.verifier`; the one exception is an environment of
    kind char, whose verifier only compares two strings.
    """

    def __init__(self, environments: Mapping[str, Environment]) -> None:
        """Takes the environments by name, as `build_environments` returns them."""
        self._environments = dict(environments)
        self._live = LiveEpisodes()

    async def verify(
        self, env: str, task_id: int, episodes: Sequence[Actions], producer: Producer | None = None
    ) -> Verdict:
        environment = self._environments.get(env)
        if environment is None:
            raise LookupError(f"environment {env!r} is not part of this run")
        return Verdict(
            task=environment.task(task_id),
            outcomes=tuple(replay(environment, task_id, actions) for actions in episodes),
            verifier=environment.verifier,
            reference=environment.reference(task_id),
        )

    async def step(self, env: str, task_id: int, actions: Actions) -> EpisodeOutcome:
        environment = self._environments.get(env)
        if environment is None:
            raise LookupError(f"environment {env!r} is not part of this run")
        return self._live.step(environment, task_id, actions)

    async def close(self) -> None:
        """Does nothing; exists so that this verifier can be closed like the sandboxed one."""


class HoldsNothing(ExchangeHandler):
    """An exchange handler without groups and weights; a fake peer overrides the methods that it supports."""

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        raise Unavailable("no groups")
        yield  # makes it a generator

    async def fetch(self, peer: NodeId, digest: Digest) -> SealedGroup:
        raise NotHeld("no groups")

    async def watch(self, peer: NodeId, policy_id: str, window: int) -> AsyncIterator[SealedManifest | Credit]:
        raise NotHeld("no weights")
        yield  # makes it a generator

    async def chunk(self, peer: NodeId, digest: Digest) -> bytes:
        raise NotHeld("no weights")


def make_identity(number: int = 0) -> Identity:
    """Test identity of a number: the same on every machine."""
    return Identity.from_seed(hashlib.sha256(f"swarm.testing identity {number}".encode()).digest())


def make_rollout(
    text: str,
    *,
    policy_id: str,
    step: int = 0,
    tokenizer: Tokenizer | None = None,
    reward: float = 0.0,
    logprob: float | None = -1.0,
    sampling: Sampling | None = None,
) -> Rollout:
    """A rollout of `text` and an end token, all trained, each with log-prob `logprob` (None: no log-probs)."""
    token_ids = np.array((tokenizer or ToyTokenizer()).encode_response(text), np.int32)
    trace = TokenTrace(
        token_ids=token_ids,
        action_mask=np.ones(token_ids.shape, np.bool_),
        logprobs=None if logprob is None else np.full(token_ids.shape, logprob, np.float32),
        turn_ids=np.zeros(token_ids.shape, np.int16),
        spans=(VersionSpan(start=0, version=PolicyVersion(policy_id=policy_id, step=step)),),
    )
    return Rollout(
        actions=(text,),
        trace=trace,
        sampling=sampling or Sampling(max_new_tokens=8),
        finish=FinishReason.STOP,
        claimed_reward=reward,
    )


def make_group(
    producer: NodeId | None = None,
    *,
    task_id: int = 7,
    texts: Sequence[str] | None = None,
    step: int = 0,
    tokenizer: Tokenizer | None = None,
    env: str = TOY_ENV,
    run_id: str = TOY_RUN_ID,
    created_at_s: float = TOY_NOW_S,
    logprob: float | None = -1.0,
    sampling: Sampling | None = None,
) -> RolloutGroup:
    """A group that an honest node could have made.

    Args:
        producer: node id, also the lineage of the policy; default: the first test identity.
        task_id: number of the `toy_task`.
        texts: answers; default: four right ones and four wrong ones.
        step: step of the policy that made every token.
        tokenizer: encodes prompt and answers; default: `ToyTokenizer`.
        env: name of the environment.
        run_id: id of the run.
        created_at_s: producer's wall clock, seconds since 1970.
        logprob: log-prob of every token, nats; None leaves log-probs out.
        sampling: sampling of every rollout; default: temperature 1 and 8 new tokens at most.
    """
    tokenizer = tokenizer or ToyTokenizer()
    producer = make_identity().node_id if producer is None else producer
    right, wrong = str(task_id % 10), str((task_id + 1) % 10)
    answers = [right] * 4 + [wrong] * 4 if texts is None else texts
    rollouts = tuple(
        make_rollout(
            text,
            policy_id=producer,
            step=step,
            tokenizer=tokenizer,
            reward=float(text == right),
            logprob=logprob,
            sampling=sampling,
        )
        for text in answers
    )
    return RolloutGroup(
        run_id=run_id,
        producer=producer,
        policy_id=producer,
        env=env,
        task_id=task_id,
        tokenizer_digest=tokenizer.digest,
        prompt_ids=np.array(tokenizer.encode_prompt(toy_task(env, task_id)), np.int32),
        rollouts=rollouts,
        verifier="digits/1",
        created_at_s=created_at_s,
    )


def make_sealed(group: RolloutGroup | None = None, identity: Identity | None = None) -> SealedGroup:
    """Seals `group` with `identity`. Defaults: a default group by that identity, and the first test identity."""
    identity = identity or make_identity()
    return seal_group(make_group(identity.node_id) if group is None else group, identity)


def make_scored(
    group: RolloutGroup | None = None,
    *,
    digest: Digest | None = None,
    rewards: Sequence[float] | None = None,
    is_made_here: bool = True,
    first_seen_s: float = TOY_NOW_S,
    size_bytes: int = 1000,
    correction: Correction = Correction.EXACT,
) -> ScoredGroup:
    """A scored group; the default digest is a hash of producer, task, oldest step and rewards."""
    group = make_group() if group is None else group
    values = [rollout.claimed_reward for rollout in group.rollouts] if rewards is None else list(rewards)
    name = f"{group.producer} {group.task_id} {group.oldest_step} {values}".encode()
    return ScoredGroup(
        digest=hashlib.sha256(name).digest() if digest is None else digest,
        group=group,
        rewards=np.array(values, np.float32),
        correction=correction,
        is_made_here=is_made_here,
        first_seen_s=first_seen_s,
        size_bytes=size_bytes,
    )


def make_advert(node_id: NodeId, **changes: Any) -> Advert:
    """Advert of a trainer in the toy run that has made no step and no group; `changes` replace its fields."""
    plain: dict[str, Any] = {
        "node_id": node_id,
        "run_id": TOY_RUN_ID,
        "endpoints": (f"{node_id[:8]}:1",),
        "roles": (Role.TRAINER,),
        "tokenizer_digest": bytes(32),
        "head": PolicyVersion(policy_id=node_id, step=0),
        "oldest_step": 0,
        "num_groups": 0,
        "reward_mean": 0.0,
        "reward_std": 0.0,
        "correction": Correction.EXACT,
        "held_bytes": 0,
        "cursor": Cursor(),
        "expires_at_s": 4e9,
    }
    return Advert(**{**plain, **changes})


def make_report(node_id: NodeId, **changes: Any) -> NodeReport:
    """Heartbeat report of a node that has made no step and no group; `changes` replace its fields."""
    plain: dict[str, Any] = {
        "node_id": node_id,
        "name": "ada",
        "roles": (),
        "endpoints": (),
        "head": PolicyVersion(policy_id=node_id, step=0, digest=bytes(32)),
        "tokens_per_s": 1.0,
        "reward_mean": 0.5,
        "num_local": 0,
        "num_external": 0,
        "num_refused": 0,
    }
    return NodeReport(**{**plain, **changes})
