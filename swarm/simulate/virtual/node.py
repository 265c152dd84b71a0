"""Scripted learner, generator and worker of a virtual node, in place of models and disks.

Invariant: everything here is a function of its seed and its inputs; a disk outlives the node that used it.
"""

import asyncio
import hashlib
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from coordinator.core import CoordinatorCore
from swarm.environments.curriculum import TaskMixture
from swarm.episode import Actions
from swarm.exchange.admission import Admission
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.interfaces import Environment, LocalExchange, Observe, Result, Tokenizer
from swarm.loops import Worker
from swarm.loops.reach import Reach
from swarm.relay.reservation_table import ReservationTable
from swarm.simulate.coordinator_history import CoordinatorHistory
from swarm.simulate.virtual.adversaries import Adversary
from swarm.simulate.virtual.author import Author
from swarm.simulate.virtual.episode_generator import EpisodeEngine
from swarm.simulate.virtual.episode_plan import EpisodePlan
from swarm.simulate.virtual.faults import DiskFault, Turncoat
from swarm.simulate.virtual.forged_episodes import EPISODE_ATTACKS, forged
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.simulate.virtual.seam_faults import SeamFaults
from swarm.types import (
    Canary,
    Draw,
    Evaluation,
    FinishReason,
    FloatArray,
    LoadReport,
    PolicyVersion,
    Rollout,
    RolloutGroup,
    Sampling,
    StepReport,
    Task,
    TokenTrace,
    VersionSpan,
)

GENERATE_S = 2.0  # virtual seconds of one generation call of a node of speed 1
STEP_S = 2.0  # virtual seconds of one optimizer step
MOST_SKILL = 0.6  # share of right answers that a node reaches: there is something to learn to the end
MAX_ANSWERS = 8192  # answers whose arrays are cached
FLOOD_PACE = 0.1  # of a node that sends as much as it can
NUM_HEARD = 64  # groups that a plagiarist chooses from
SPACING = 8  # questions between two appearances of one, for the mixture of a node


class ScriptedLearner:
    """A learner whose weights are a hash of everything it learned from; it resumes from `checkpoints` after a crash."""

    def __init__(self, policy_id: str, checkpoints: "Checkpoints", judge: Callable[[Draw], bytes]) -> None:
        self._checkpoints, self._judge = checkpoints, judge
        self.version, self.next_draw = checkpoints.read() or (
            PolicyVersion(policy_id=policy_id, step=0, digest=hashlib.sha256(b"initial").digest()),
            1,
        )

    def step(self, draw: Draw) -> StepReport:
        """Makes the next version: its digest hashes the old digest, the drawn groups and the bytes of `judge`."""
        computed = self._judge(draw)
        digests = b"".join(drawn.scored.digest for drawn in draw.groups)
        self.version = PolicyVersion(
            policy_id=self.version.policy_id,
            step=self.version.step + 1,
            digest=hashlib.sha256(self.version.digest + digests + computed).digest(),
        )
        self.next_draw = draw.step + 1
        local = sum(drawn.scored.is_own_policy(self.version.policy_id) for drawn in draw.groups)
        return StepReport(
            version=self.version,
            loss=0.0,
            grad_norm=0.0,
            num_tokens=len(digests),
            was_skipped=False,
            diagnostics={},
            seconds={},
            ages_steps=tuple(drawn.age_steps for drawn in draw.groups),
            num_local=local,
            num_external=len(draw.groups) - local,
            draw_step=draw.step,
        )

    def dry_run(self, draw: Draw) -> None:
        """Does nothing: no draw can end a virtual process."""

    def snapshot(self) -> tuple[PolicyVersion, object]:
        """The newest version, and None in place of tensors."""
        return self.version, None

    def evaluated(self, evaluations: Sequence[Evaluation]) -> None:
        """Ignores the evaluations."""

    def save(self) -> None:
        self._checkpoints.write(self.version, self.next_draw)


class ScriptedGenerator:
    """A generator whose share of right answers grows with the step of its version, up to MOST_SKILL."""

    def __init__(
        self,
        version: PolicyVersion,
        tokenizer: Tokenizer,
        environments: Mapping[str, Environment],
        seed: str,
    ) -> None:
        self.version = version
        self._tokenizer = tokenizer
        self._environments = environments
        self._rng = random.Random(seed)

    def load(
        self, version: PolicyVersion, weights: object, *, canaries: Sequence[Canary] = (), in_flight: bool = False
    ) -> LoadReport:
        """Sets the version at once and ignores the weights."""
        self.version = version
        return LoadReport()

    def score(self, sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Raises AssertionError: the virtual swarm has no weights to compare."""
        raise AssertionError("the scripted generator has no model")

    compute_dtype = ""  # there are no passes

    def cancel(self) -> None:
        """Does nothing: an answer is made at once, so no call is ever in progress."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        sampling: Sampling,
        numbers: Sequence[int] | None = None,
        observe: Observe | None = None,
    ) -> list[list[Rollout]]:
        """Raises AssertionError: a prompt does not show the right answer; `rollouts` takes a task."""
        raise AssertionError("the scripted generator answers tasks, not prompts")

    def greedy(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, observe: Observe | None = None
    ) -> list[Actions]:
        """Raises AssertionError: the virtual swarm does not evaluate."""
        raise AssertionError("the virtual swarm does not evaluate")

    def rollouts(self, task: Task, count: int, sampling: Sampling) -> tuple[Rollout, ...]:
        """`count` rollouts of one task; the right answers come first, and their number is rounded at random."""
        skill = min(MOST_SKILL, 0.3 + 0.01 * self.version.step)
        right = self._environments[task.env].reference(task.task_id)
        num_right = int(count * skill + self._rng.random())  # stratified, so that most groups have signal
        spans = (VersionSpan(start=0, version=self.version),)
        made: list[Rollout] = []
        for index in range(count):
            text = right if index < num_right else right[::-1] + "#"
            made.append(
                Rollout(
                    actions=(text,),
                    trace=TokenTrace(**_tokens(self._tokenizer, text), spans=spans),
                    sampling=sampling,
                    finish=FinishReason.STOP,
                    claimed_reward=float("nan"),
                )
            )
        return tuple(made)


@lru_cache(maxsize=MAX_ANSWERS)
def _tokens(tokenizer: Tokenizer, text: str) -> dict[str, Any]:
    """Arrays of every trace of an answer; the traces share them, so that they are read-only."""
    ids = np.asarray(tokenizer.encode_response(text), dtype=np.int32)
    count = len(ids)
    arrays = {
        "token_ids": ids,
        "action_mask": np.ones(count, dtype=np.bool_),
        "logprobs": np.full(count, -0.5, dtype=np.float32),
        "turn_ids": np.zeros(count, dtype=np.int16),
    }
    for array in arrays.values():
        array.flags.writeable = False
    return arrays


class Checkpoints:
    """The newest two checkpoints of one node, each with its digest, as `swarm.learn.checkpoint` keeps them."""

    def __init__(self) -> None:
        self._saved: list[tuple[PolicyVersion, int, bytes]] = []  # oldest first

    def write(self, version: PolicyVersion, next_draw: int) -> None:
        """Adds a checkpoint and keeps the newest two; drops any of the same or a later step (damaged or abandoned)."""
        earlier = [saved for saved in self._saved if saved[0].step < version.step]
        self._saved = [*earlier, (version, next_draw, version.digest)][-2:]

    def read(self) -> tuple[PolicyVersion, int] | None:
        """Version and next draw of the newest checkpoint that is whole; None if there is none."""
        whole = [saved[:2] for saved in self._saved if self.is_whole(saved[0], saved[2])]
        return whole[-1] if whole else None

    def is_whole(self, version: PolicyVersion, digest: bytes) -> bool:
        """True if the version still has the digest that was written with it."""
        return version.digest == digest

    def rot(self) -> None:
        """Flips a bit of the newest of two checkpoints; leaves a single one, without which the node could not start."""
        if len(self._saved) == 2:
            version, next_draw, digest = self._saved.pop()
            changed = replace(version, digest=bytes([version.digest[0] ^ 1]) + version.digest[1:])
            self._saved.append((changed, next_draw, digest))


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Classes of which a virtual swarm is built; a test replaces one by a broken one to see an invariant fail."""

    replay: Callable[..., ReplayBuffer] = ReplayBuffer
    admission: type[Admission] = Admission
    store: type[MemoryGroupStore] = MemoryGroupStore
    checkpoints: type[Checkpoints] = Checkpoints
    coordinator: type[CoordinatorCore] = CoordinatorCore
    reach: type[Reach] = Reach
    reservations: type[ReservationTable] = ReservationTable
    judge_coordinator: Callable[[CoordinatorHistory], Sequence[str]] | None = None  # finds answers that cannot be


@dataclass
class Disk:
    """State of one node that survives a crash of the node."""

    open_store: Callable[[str], MemoryGroupStore]  # an empty one, whose log has this epoch
    checkpoints: Checkpoints
    num_stores: int = 0

    def __post_init__(self) -> None:
        self.begin_store()

    def begin_store(self) -> None:
        """Replaces the store by an empty one with a new log epoch."""
        self.num_stores += 1
        self.store = self.open_store(f"store {self.num_stores}")

    def damage(self, fault: DiskFault, rng: random.Random) -> None:
        """Applies a fault to the disk; call it while the node is down."""
        match fault:
            case DiskFault.POWER_CUT:
                self.store.cut_power(rng)
            case DiskFault.ROTTEN_GROUPS:
                self.store.rot(rng)
            case DiskFault.ROTTEN_CHECKPOINT:
                self.checkpoints.rot()
            case DiskFault.LOST_STORE:
                self.begin_store()


@dataclass(kw_only=True)
class ScriptedNode:
    """Learner and generator of one node, and the time that they take.

    Args:
        paces: choices for the pace of the node; pace 1 is middling, a higher one is slower.
        incarnation: seeds the node's answers until the next restart.
        judge: called with every draw of the learner; the bytes that it returns enter the weights.
        turncoat: attack that the node begins at some moment; None: none.
        episodes: plan of the episodes that are played in place of single answers; None: single answers.
    """

    exchange: LocalExchange
    author: Author
    disk: Disk
    paces: Sequence[float]
    incarnation: str
    seams: SeamFaults
    judge: Callable[[Draw], bytes]
    turncoat: Turncoat | None
    episodes: EpisodePlan | None

    def __post_init__(self) -> None:
        author, seed = self.author, self.author.config.seed
        self._learner = ScriptedLearner(author.node_id, self.disk.checkpoints, self.judge)
        self._generator = ScriptedGenerator(
            self._learner.version, author.tokenizer, author.environments, self.incarnation
        )
        weights = dict.fromkeys(author.environments, 1.0)
        self._mixture = TaskMixture(author.environments, weights, seed=seed, spacing=SPACING)
        is_flood = self.turncoat is not None and self.turncoat.attack == "flood"
        self._pace = FLOOD_PACE if is_flood else random.Random(f"pace {seed}").choice(self.paces)
        self._adversary = self._make_adversary()
        self._engine = None if self.episodes is None else self._make_engine(self.episodes)

    def worker(self) -> Worker:
        """The worker that the node's loops run."""
        return Worker(
            config=self.author.config,
            exchange=self.exchange,
            generator=self._generator,
            produce=self.produce,
            evaluate=lambda tasks: [],
            learner=self._learner,
            tokenizer=self.author.tokenizer,
            evaluation_tasks={},
            clock=self.author.clock,
            offload=self._take_time,
            ask=None if self._engine is None else self._ask,
        )

    def produce(self, first_number: int, count: int) -> list[RolloutGroup]:
        """Groups of single answers to `count` tasks from number `first_number` on, or the attack once turned."""
        tasks = self._mixture.tasks(first_number, count)
        if self._adversary is not None and self._has_turned:
            return self._adversary.groups(tasks, self._generator.version)
        size, sampling = self.author.config.generator.group_size, self.author.sampling
        return [self.author.group(task, self._generator.rollouts(task, size, sampling)) for task in tasks]

    @property
    def _has_turned(self) -> bool:
        return self.turncoat is not None and self.author.clock.monotonic_s() >= self.turncoat.honest_s

    async def _ask(self, first: int, count: int) -> list[RolloutGroup]:
        """Groups of episodes, in place of `Worker.ask`, or the attack once turned."""
        assert self._engine is not None
        if self.turncoat is None or not self._has_turned:
            return await self._engine.ask(first, count)
        if self._adversary is not None:
            await asyncio.sleep(GENERATE_S * self._pace)
            return self.produce(first, count)
        played = await self._engine.ask(first, count)
        rng = random.Random(f"forged {self.incarnation} {first}")
        return [
            forged(self.turncoat.attack, group, self.author.tokenizer, self.author.environments, rng)
            for group in played
        ]

    async def _take_time(self, function: Callable[..., Result], /, *arguments: object) -> Result:
        seconds = {"produce": GENERATE_S, "step": STEP_S}.get(getattr(function, "__name__", ""), 0.0)
        if seconds:
            await asyncio.sleep(seconds * self._pace)
        if function == self._learner.save:
            self.seams.before_save()
        return function(*arguments)

    def _make_adversary(self) -> Adversary | None:
        if self.turncoat is None or self.turncoat.attack in EPISODE_ATTACKS:
            return None
        return Adversary(
            attack=self.turncoat.attack,
            author=self.author,
            rng=random.Random(f"adversary {self.incarnation}"),
            heard=lambda: [scored.group for scored in self.disk.store.newest(NUM_HEARD)],
        )

    def _make_engine(self, episodes: EpisodePlan) -> EpisodeEngine:
        def version() -> PolicyVersion:
            if episodes.loads_in_flight:
                self._generator.load(*self._learner.snapshot())
            return self._generator.version

        return EpisodeEngine(
            exchange=self.exchange,
            author=self.author,
            plan=episodes,
            tasks=self._mixture.tasks,
            version=version,
            seed=self.incarnation,
            pace=self._pace,
        )
