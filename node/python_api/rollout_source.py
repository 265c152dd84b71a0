"""A run as a source of rollouts for a Python program: groups of its nodes, checked here, with tokens and log-probs.

Invariant: what comes out went through the admission of an ordinary node: signed, fresh, its rewards computed here, and
of this node's tokenizer with the generator's log-probs (`Correction.EXACT`). The node neither trains nor generates; it
passes on to others what it admitted (role `relay`).
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from node.daemon import Daemon
from node.join import join_swarm
from node.python_api.background import Background, run_apart
from swarm.config import NODE_FILE, NodeConfig, load_config
from swarm.environments.load import build_environments
from swarm.episode import Message
from swarm.errors import Unavailable
from swarm.events import Event, GroupAdmitted
from swarm.interfaces import Environment, Tokenizer
from swarm.model.tokenizer import load_tokenizer
from swarm.trained.newest_groups import group_of, reading
from swarm.trained.samples import STORE
from swarm.types import BoolArray, Correction, FloatArray, IntArray, NodeId, Role, Rollout, ScoredGroup

_POLL_S: Final = 0.5  # within which a Ctrl-C, and the end of the node, is seen


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcedRollout:
    """One response. T tokens after the prompt: all of an answer, or actions and observations of an episode."""

    text: str  # of the last action
    completion_ids: IntArray  # int32 [T]
    logprobs: FloatArray  # float32 [T] nats at the run's temperature, when the token was drawn; NaN off the mask
    action_mask: BoolArray  # [T], True where the model chose the token
    steps: IntArray  # int32 [T], policy version (optimizer step of `policy_id`) that made each token
    finish: str  # stop or length
    reward: float  # computed on this machine


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcedGroup:
    """Responses to one task, by one node."""

    digest: str
    env: str
    task_id: int
    messages: tuple[Message, ...]  # what was asked
    prompt_ids: IntArray  # int32 [P], shared by all
    producer: NodeId  # who generated it
    policy_id: str  # whose weights did
    age_steps: int  # newest version known of that policy, less the one of the oldest token, when it was admitted
    rollouts: tuple[SourcedRollout, ...]

    @property
    def rewards(self) -> FloatArray:
        """float32 [G]."""
        return np.array([each.reward for each in self.rollouts], np.float32)


class RolloutSource:
    """Iterates over the groups of a run as they are admitted; the oldest are dropped where nobody takes them.

    Example:
        with swarm.connect("swarm://10.0.0.1:7800/demo#3fa1...") as source:
            for group in source:
                train_on(group.prompt_ids, [each.completion_ids for each in group.rollouts], group.rewards)
    """

    def __init__(self, config: NodeConfig, max_waiting: int) -> None:
        """Use `connect`."""
        self.config = config
        self.num_dropped = 0  # that waited behind `max_waiting` younger ones
        self.num_inexact = 0  # without log-probs, or of another tokenizer
        self.tokenizer: Tokenizer = load_tokenizer(config.model)
        self._environments: dict[str, Environment] = dict(build_environments(config.environments))
        self._waiting = deque[tuple[str, int]](maxlen=max_waiting)  # digest, age
        self._arrived = threading.Condition()
        self._daemon: Daemon | None = None
        self._error: Exception | None = None
        self._is_over = False
        self._background = Background[None](self._run)

    def __enter__(self) -> "RolloutSource":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leaves the run (blocking); its directory stays, and `connect` goes on with its key."""
        self._background.__exit__()

    def start(self) -> None:
        """Starts the node, and returns when it runs (blocking). Raises what it could not start for."""
        self._background.__enter__()
        with self._arrived:
            while self._daemon is None and not self._is_over:
                self._arrived.wait(_POLL_S)
        self._require_running()

    @property
    def peers(self) -> list[NodeId]:
        """The peers whose groups are streamed now."""
        return sorted(self._daemon.agent.peers.connected) if self._daemon is not None else []

    @property
    def refusals(self) -> dict[str, int]:
        """Groups that were not admitted, by reason."""
        counts = self._daemon.agent.ingest.refusals if self._daemon is not None else {}
        return {str(reason): count for reason, count in dict(counts).items()}

    def __iter__(self) -> Iterator[SourcedGroup]:
        """Each group, as it comes, for as long as the node runs (blocking)."""
        while True:
            yield self._next(None)

    def take(self, count: int, timeout_s: float | None = None) -> list[SourcedGroup]:
        """The next groups (blocking).

        Raises:
            Unavailable: they did not come in time; with what is known about why. What came is taken by the next call.
        """
        end_s = None if timeout_s is None else time.monotonic() + timeout_s
        found: list[SourcedGroup] = []
        try:
            while len(found) < count:
                found.append(self._next(end_s))
        except Unavailable:
            with self._arrived:
                assert self._waiting.maxlen is not None
                kept = found[max(0, len(found) + len(self._waiting) - self._waiting.maxlen) :]  # others have come since
                self.num_dropped += len(found) - len(kept)
                self._waiting.extendleft((each.digest, each.age_steps) for each in reversed(kept))
            raise
        return found

    # --- inside -------------------------------------------------------------------------------------

    async def _run(self, _: object) -> None:
        try:
            async with Daemon(self.config, self._see) as daemon:
                with self._arrived:
                    self._daemon = daemon
                    self._arrived.notify_all()
                await daemon.run()
        except Exception as error:
            self._error = error
            raise
        finally:
            with self._arrived:
                self._is_over = True
                self._arrived.notify_all()

    def _see(self, event: Event) -> None:
        if not isinstance(event, GroupAdmitted) or self._daemon is None:
            return
        head = self._daemon.agent.peers.head_of(event.policy_id)
        age = 0 if head is None else max(0, head.step - event.oldest_step)
        with self._arrived:
            self.num_dropped += len(self._waiting) == self._waiting.maxlen
            self._waiting.append((event.digest, age))
            self._arrived.notify_all()

    def _next(self, end_s: float | None) -> SourcedGroup:
        while True:
            with self._arrived:
                while not self._waiting:
                    self._require_running()
                    if end_s is not None and time.monotonic() >= end_s:
                        raise Unavailable(self._why_none())
                    self._arrived.wait(_POLL_S)
                digest, age = self._waiting.popleft()
            with reading(self.config.dir / STORE) as connection:
                scored = group_of(connection, bytes.fromhex(digest))
            if scored is not None and scored.correction is not Correction.EXACT:
                self.num_inexact += 1
            elif scored is not None:  # else the store made room
                return _sourced(scored, self._environments[scored.group.env], age)

    def _require_running(self) -> None:
        if self._is_over:
            raise self._error or Unavailable("this source was closed; connect again")

    def _why_none(self) -> str:
        refused = ", ".join(f"{count} {reason}" for reason, count in self.refusals.items())
        return (
            f"not enough groups came in time; {len(self.peers)} nodes are connected, refused: {refused or 'none'}; "
            f"`swarm why {self.config.dir}` says more"
        )


def connect(
    link: str,
    *,
    directory: str | Path = "swarm-rollouts",
    invitation: str = "",
    overrides: Sequence[str] = (),
    max_waiting: int = 256,
    say: Callable[[str], None] = print,
) -> RolloutSource:
    """Joins a run as a source of rollouts: no model is loaded, nothing is generated or trained here (blocking).

    Args:
        link: swarm://host:port/RUN#FINGERPRINT, as the coordinator prints it.
        directory: of this node: key, store, log; the same one goes on with its key.
        invitation: where the run asks for one.
        overrides: `key.path=value` on top of the run's manifest.
        max_waiting: groups kept for whoever iterates; beyond it the oldest are dropped.
        say: where lines for people go.

    Raises:
        ConfigError: the link, the manifest or the directory cannot be used.
        Unavailable: no address of the link answered.
    """
    folder, roles = Path(directory), (Role.RELAY,)

    async def join() -> None:
        await join_swarm(link, folder, [*overrides], False, say, roles, invitation)

    run_apart(join)
    source = RolloutSource(load_config(NodeConfig, folder / NODE_FILE), max_waiting)
    source.start()
    return source


def trl_columns(groups: Iterable[SourcedGroup]) -> dict[str, list[Any]]:
    """Rollouts as a `rollout_func` of TRL's GRPOTrainer returns them; `reward` is for a reward function to pass on.

    Returns:
        `prompt_ids`, `completion_ids`, `logprobs` (0 for tokens of the environment), `env_mask` (1 where the
        model did) and `reward`: one entry for each rollout, those of a group one after the other.
    """
    columns: dict[str, list[Any]] = {name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask")}
    columns["reward"] = []
    for group in groups:
        for each in group.rollouts:
            columns["prompt_ids"].append(group.prompt_ids.tolist())
            columns["completion_ids"].append(each.completion_ids.tolist())
            columns["logprobs"].append(np.where(each.action_mask, each.logprobs, 0.0).tolist())
            columns["env_mask"].append(each.action_mask.astype(int).tolist())
            columns["reward"].append(each.reward)
    return columns


def _sourced(scored: ScoredGroup, environment: Environment, age_steps: int) -> SourcedGroup:
    group = scored.group
    return SourcedGroup(
        digest=scored.digest.hex(),
        env=group.env,
        task_id=group.task_id,
        messages=environment.task(group.task_id).messages,
        prompt_ids=group.prompt_ids,
        producer=group.producer,
        policy_id=group.policy_id,
        age_steps=age_steps,
        rollouts=tuple(
            _rollout(each, float(reward)) for each, reward in zip(group.rollouts, scored.rewards, strict=True)
        ),
    )


def _rollout(rollout: Rollout, reward: float) -> SourcedRollout:
    trace = rollout.trace
    assert trace is not None and trace.logprobs is not None, "exact groups have them"
    steps = np.array([span.version.step for span in trace.spans], np.int32)
    starts = np.array([span.start for span in trace.spans])
    return SourcedRollout(
        text=rollout.text,
        completion_ids=trace.token_ids,
        logprobs=trace.logprobs,
        action_mask=trace.action_mask,
        steps=steps[np.searchsorted(starts, np.arange(len(trace.token_ids)), side="right") - 1],
        finish=str(rollout.finish),
        reward=reward,
    )
