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
from swarm.clock import Clock
from swarm.config import NodeConfig
from swarm.environments.curriculum import TaskMixture
from swarm.episode import Actions
from swarm.exchange.admission import Admission
from swarm.exchange.replay_buffer import ReplayBuffer
from swarm.interfaces import Environment, LocalExchange, Observe, Result, Tokenizer
from swarm.loops import Worker
from swarm.loops.reach import Reach
from swarm.loops.worker import Ask
from swarm.relay.reservation_table import ReservationTable
from swarm.simulate.virtual.adversaries import Adversary
from swarm.simulate.virtual.episode_generator import EpisodeEngine
from swarm.simulate.virtual.episode_plan import EpisodePlan
from swarm.simulate.virtual.faults import DiskFault, Turncoat
from swarm.simulate.virtual.forged_episodes import EPISODE_ATTACKS, forged
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.simulate.virtual.seam_faults import SeamFaults
from swarm.testing.builders import ToyTokenizer
from swarm.types import (
    Canary,
    Draw,
    Evaluation,
    FinishReason,
    FloatArray,
    LoadReport,
    NodeId,
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
MAX_ANSWERS = 8192  # answers of which the arrays are remembered
FLOOD_PACE = 0.1  # of a node that sends as much as it can
NUM_HEARD = 64  # groups that a plagiarist chooses from
SPACING = 8  # questions between two appearances of one, for the mixture of a node


class ScriptedLearner:
    """A learner whose weights are the hash of everything it learned from; its checkpoints survive a crash."""

    def __init__(self, policy_id: str, checkpoints: "Checkpoints", judge: Callable[[Draw], bytes]) -> None:
        self._checkpoints, self._judge = checkpoints, judge
        self.version, self.next_draw = checkpoints.read() or (
            PolicyVersion(policy_id=policy_id, step=0, digest=hashlib.sha256(b"initial").digest()),
            1,
        )

    def step(self, draw: Draw) -> StepReport:
        """Mixes the drawn digests into the version's digest."""
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
        """Nothing ends a virtual process but its swarm."""

    def snapshot(self) -> tuple[PolicyVersion, object]:
        """The version is all there is."""
        return self.version, None

    def evaluated(self, evaluations: Sequence[Evaluation]) -> None:
        """Learns nothing from them."""

    def save(self) -> None:
        self._checkpoints.write(self.version, self.next_draw)


class ScriptedGenerator:
    """Answers a share of its samples rightly that grows with the version's step."""

    def __init__(
        self,
        version: PolicyVersion,
        tokenizer: ToyTokenizer,
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
        """Takes the version, at no cost."""
        self.version = version
        return LoadReport()

    def score(self, sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
        """Never called: the virtual swarm has no weights to compare."""
        raise AssertionError("the scripted generator has no model")

    compute_dtype = ""  # there are no passes

    def cancel(self) -> None:
        """Nothing is ever under way: an answer is made at once."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int,
        sampling: Sampling,
        numbers: Sequence[int] | None = None,
        observe: Observe | None = None,
    ) -> list[list[Rollout]]:
        """Never called: `group` knows the task, a prompt alone does not tell the right answer."""
        raise AssertionError("the scripted generator answers tasks, not prompts")

    def greedy(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, observe: Observe | None = None
    ) -> list[Actions]:
        """Never called: the virtual swarm does not evaluate."""
        raise AssertionError("the virtual swarm does not evaluate")

    def rollouts(self, task: Task, count: int, sampling: Sampling) -> tuple[Rollout, ...]:
        """`count` answers, some right."""
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
    """What every trace of that answer has; no two nodes change an array that both hold."""
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
    """The newest two checkpoints of one node, as `swarm.learn.checkpoint` keeps them: each with the digest of it."""

    def __init__(self) -> None:
        self._saved: list[tuple[PolicyVersion, int, bytes]] = []  # oldest first

    def write(self, version: PolicyVersion, next_draw: int) -> None:
        """Whole or not at all; one of a later step is damaged, or of another branch."""
        earlier = [saved for saved in self._saved if saved[0].step < version.step]
        self._saved = [*earlier, (version, next_draw, version.digest)][-2:]

    def read(self) -> tuple[PolicyVersion, int] | None:
        """The newest that is as it was written, with the draw after it; None where there is none."""
        whole = [saved[:2] for saved in self._saved if self.is_whole(saved[0], saved[2])]
        return whole[-1] if whole else None

    def is_whole(self, version: PolicyVersion, digest: bytes) -> bool:
        """Whether the weights are as they were written."""
        return version.digest == digest

    def rot(self) -> None:
        """Flips a byte of the newest, where there is another: without any, only its operator can help a node."""
        if len(self._saved) == 2:
            version, next_draw, digest = self._saved.pop()
            changed = replace(version, digest=bytes([version.digest[0] ^ 1]) + version.digest[1:])
            self._saved.append((changed, next_draw, digest))


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the nodes are built of; a test puts a broken one here to see that an invariant turns red."""

    replay: Callable[..., ReplayBuffer] = ReplayBuffer
    admission: type[Admission] = Admission
    store: type[MemoryGroupStore] = MemoryGroupStore
    checkpoints: type[Checkpoints] = Checkpoints
    coordinator: type[CoordinatorCore] = CoordinatorCore
    reach: type[Reach] = Reach
    reservations: type[ReservationTable] = ReservationTable


@dataclass
class Disk:
    """What survives a crash of one node."""

    open_store: Callable[[str], MemoryGroupStore]  # an empty one, whose log has this epoch
    checkpoints: Checkpoints
    num_stores: int = 0

    def __post_init__(self) -> None:
        self.begin_store()

    def begin_store(self) -> None:
        """An empty store in place of the one that was there."""
        self.num_stores += 1
        self.store = self.open_store(f"store {self.num_stores}")

    def damage(self, fault: DiskFault, rng: random.Random) -> None:
        """What the disk does while its node is down."""
        match fault:
            case DiskFault.POWER_CUT:
                self.store.cut_power(rng)
            case DiskFault.ROTTEN_GROUPS:
                self.store.rot(rng)
            case DiskFault.ROTTEN_CHECKPOINT:
                self.checkpoints.rot()
            case DiskFault.LOST_STORE:
                self.begin_store()


def scripted_worker(
    exchange: LocalExchange,
    node_id: NodeId,
    config: NodeConfig,
    disk: Disk,
    tokenizer: ToyTokenizer,
    environments: Mapping[str, Environment],
    clock: Clock,
    paces: Sequence[float],
    incarnation: str,
    seams: SeamFaults,
    judge: Callable[[Draw], bytes],
    turncoat: Turncoat | None = None,
    episodes: EpisodePlan | None = None,
) -> Worker:
    """Learner and generator of a node of one of the `paces`.

    Args:
        incarnation: seeds its answers until the next restart.
        judge: sees every draw that the learner is given; what it computes of it enters the weights.
        episodes: what is played in place of single answers.
        turncoat: whose groups are those of an attack, from some moment on.
    """
    learner = ScriptedLearner(node_id, disk.checkpoints, judge)
    generator = ScriptedGenerator(learner.version, tokenizer, environments, incarnation)
    mixture = TaskMixture(environments, dict.fromkeys(environments, 1.0), seed=config.seed, spacing=SPACING)
    sampling = Sampling(temperature=config.generator.temperature, max_new_tokens=config.generator.max_new_tokens)
    pace = random.Random(f"pace {config.seed}").choice(paces)
    adversary = None
    if turncoat is not None and turncoat.attack not in EPISODE_ATTACKS:
        pace = FLOOD_PACE if turncoat.attack == "flood" else pace
        adversary = Adversary(
            attack=turncoat.attack,
            node_id=node_id,
            config=config,
            tokenizer=tokenizer,
            environments=environments,
            clock=clock,
            rng=random.Random(f"adversary {incarnation}"),
            heard=lambda: [scored.group for scored in disk.store.newest(NUM_HEARD)],
        )

    def produce(first_number: int, count: int) -> list[RolloutGroup]:
        if adversary is not None and turncoat is not None and clock.monotonic_s() >= turncoat.honest_s:
            return adversary.groups(mixture.tasks(first_number, count), generator.version)
        return [
            RolloutGroup(
                run_id=config.run_id,
                producer=node_id,
                policy_id=node_id,
                env=task.env,
                task_id=task.task_id,
                tokenizer_digest=tokenizer.digest,
                prompt_ids=np.asarray(tokenizer.encode_prompt(task), dtype=np.int32),
                rollouts=generator.rollouts(task, config.generator.group_size, sampling),
                verifier="unscored",
                created_at_s=clock.now_s(),
            )
            for task in mixture.tasks(first_number, count)
        ]

    ask: Ask | None = None
    if episodes is not None:

        def version() -> PolicyVersion:
            if episodes.loads_in_flight:
                generator.load(*learner.snapshot())
            return generator.version

        engine = EpisodeEngine(
            exchange=exchange,
            node_id=node_id,
            config=config,
            plan=episodes,
            tokenizer=tokenizer,
            environments=dict(environments),
            clock=clock,
            tasks=mixture.tasks,
            version=version,
            seed=incarnation,
            pace=pace,
        )

        async def play(first: int, count: int) -> list[RolloutGroup]:
            if turncoat is None or clock.monotonic_s() < turncoat.honest_s:
                return await engine.ask(first, count)
            if turncoat.attack in EPISODE_ATTACKS:
                played = await engine.ask(first, count)
                rng = random.Random(f"forged {incarnation} {first}")
                return [forged(turncoat.attack, group, tokenizer, environments, rng) for group in played]
            await asyncio.sleep(GENERATE_S * pace)
            return produce(first, count)

        ask = play

    async def take_time(function: Callable[..., Result], /, *arguments: object) -> Result:
        seconds = {"produce": GENERATE_S, "step": STEP_S}.get(getattr(function, "__name__", ""), 0.0)
        if seconds:
            await asyncio.sleep(seconds * pace)
        if function == learner.save:
            seams.before_save()
        return function(*arguments)

    return Worker(
        config=config,
        exchange=exchange,
        generator=generator,
        produce=produce,
        evaluate=lambda tasks: [],
        learner=learner,
        tokenizer=tokenizer,
        evaluation_tasks={},
        clock=clock,
        offload=take_time,
        ask=ask,
    )
