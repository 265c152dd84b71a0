"""One run of the sharing benchmark: some nodes in one process, in rounds, with the parts a real node has.

Invariant: in a round every node generates with the weights it had at its start, then all learn; each node
counts every token it generated, used or not. No network: a group is drawn by its receivers as it was made.
"""

import asyncio
import hashlib
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch

from benchmarks._scored import scored_groups
from benchmarks._sharing_start import specialist_weights, warm_weights
from swarm.config import EnvironmentConfig, LearnerConfig, ReplayConfig
from swarm.environments.char_tasks import KINDS
from swarm.environments.curriculum import TaskMixture, evaluation_tasks
from swarm.environments.load import build_environments
from swarm.environments.replay import replay
from swarm.exchange.external_sampler import Candidate, sample
from swarm.generation.produce import evaluate
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.learn.learner import PolicyLearner
from swarm.model.network import tiny_network
from swarm.model.tokenizer import CharTokenizer
from swarm.model.version_digest import PublishedTensors, load_published
from swarm.objectives.methods import load_recipe
from swarm.testing.builders import InlineVerifier
from swarm.types import Draw, DrawnGroup, EpisodeLimits, Sampling, ScoredGroup

GROUP_SIZE: Final = 8
MAX_NEW_TOKENS: Final = 9
LEARNING_RATE: Final = 1e-4
MODES: Final = ("heteroq", "spec", "homo")
_EVALUATION_SEED: Final = 7  # the same problems in every run
_MAX_ROWS: Final = 512  # decoded together; changes time, not results


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """How a node's training batch is put together each round."""

    name: str
    num_generated: int  # own groups made
    num_local: int  # most own groups with signal that are learned from
    num_external: int  # most groups of others
    external: Literal["all", "positive"] = "all"


ARMS: Final = (
    Arm(name="4/0", num_generated=4, num_local=4, num_external=0),
    Arm(name="2/2", num_generated=2, num_local=2, num_external=2),
    Arm(name="1/3", num_generated=1, num_local=1, num_external=3),
    Arm(name="2/2 positive", num_generated=2, num_local=2, num_external=2, external="positive"),
    Arm(name="4/0 of 12", num_generated=12, num_local=4, num_external=0),
)
BASELINE: Final = ARMS[0].name
FILTERED: Final = ARMS[4].name  # no sharing, but zero-variance groups replaced, as by a draw from others


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What all runs of a table share."""

    num_nodes: int = 4
    num_rounds: int = 75
    evaluate_every: int = 5  # rounds
    num_problems: int = 40  # held out, per task
    num_warm: int = 3  # warm starts; run seed s takes number s modulo this


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One run: which cell of the table, and which seed."""

    setting: Setting
    mode: str
    arm: str
    seed: int

    @property
    def warm_seed(self) -> int:
        """The warm start that its nodes begin from."""
        return self.seed % self.setting.num_warm


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What one run gave; every count is a sum over nodes and rounds."""

    job: Job
    rounds: tuple[int, ...]  # at which nodes were evaluated
    accuracy: tuple[float, ...]  # held-out greedy on the full mix, mean over nodes, at each of them
    tokens_at: tuple[int, ...]  # generated until then
    final_by_task: dict[str, float]
    cumulative_reward: float  # sum over rounds of the mean reward of own rollouts, mean over nodes
    generated_tokens: int
    trained_tokens: int
    num_generated: int  # groups
    num_local: int  # groups learned from
    num_external: int
    num_zero_variance: int  # own groups without signal
    num_skipped: int  # rounds in which a node had nothing to learn from
    seconds: float

    @property
    def auc(self) -> float:
        """Mean of the curve."""
        return float(np.mean(self.accuracy))

    @property
    def final(self) -> float:
        """Last point of the curve."""
        return self.accuracy[-1]


@dataclass(slots=True)
class _Counts:
    reward: float = 0.0
    generated_tokens: int = 0
    trained_tokens: int = 0
    num_generated: int = 0
    num_local: int = 0
    num_external: int = 0
    num_zero_variance: int = 0
    num_skipped: int = 0


@dataclass(slots=True)
class _Node:
    number: int
    name: str
    seed: int
    learner: PolicyLearner
    generator: TransformersGenerator
    mixture: TaskMixture
    counts: _Counts = field(default_factory=_Counts)


def own_tasks(node: int, num_nodes: int) -> tuple[str, ...]:
    """Names of the tasks that a node owns: an equal share, dealt in turn as `swarm simulate` does."""
    kinds = tuple(KINDS)
    return kinds[node::num_nodes] or (kinds[node % len(kinds)],)


def find_arm(name: str) -> Arm:
    """The arm of that name. Raises LookupError."""
    for arm in ARMS:
        if arm.name == name:
            return arm
    raise LookupError(f"arm {name!r} is unknown; known: {', '.join(arm.name for arm in ARMS)}")


def starting_weights(job: Job, node: int) -> PublishedTensors:
    """What a node starts from: its specialist in mode `spec`, else the common warm start."""
    if job.mode == "spec":
        return specialist_weights(job.warm_seed, node, own_tasks(node, job.setting.num_nodes))
    return warm_weights(job.warm_seed)


def run(job: Job) -> Outcome:
    """One run (blocking; sets torch to one thread). Nothing of it stays on disk but starting weights."""
    assert job.mode in MODES, job.mode
    torch.set_num_threads(1)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(job, [starting_weights(job, node) for node in range(job.setting.num_nodes)], Path(folder))
        return asyncio.run(swarm.train(start_s))


class Swarm:
    """The nodes of one run and the rounds they make together."""

    def __init__(self, job: Job, weights: Sequence[PublishedTensors], folder: Path) -> None:
        """`weights`: one per node. `folder` is for the learners, which write nothing unless asked to."""
        self.job = job
        self.arm = find_arm(job.arm)
        self._environments = build_environments(
            EnvironmentConfig(name=kind, kind="char", dataset=kind, seed=1) for kind in KINDS
        )
        self._verifier = InlineVerifier(self._environments)
        self._problems = [
            (environment, task)
            for environment in self._environments.values()
            for task in evaluation_tasks(environment, "held_out", job.setting.num_problems, _EVALUATION_SEED)
        ]
        self.nodes = [self._node(number, start, folder) for number, start in enumerate(weights)]

    def _node(self, number: int, weights: PublishedTensors, folder: Path) -> _Node:
        seed = 1000 * self.job.seed + number
        name = hashlib.sha256(f"sharing/{seed}".encode()).hexdigest()
        tokenizer, network, engine = CharTokenizer(), tiny_network(), tiny_network()
        load_published(network, weights)
        learner = PolicyLearner(
            network,
            tokenizer,
            load_recipe("sapo_swarm"),
            LearnerConfig(learning_rate=LEARNING_RATE),
            ReplayConfig(
                local_groups=self.arm.num_local, external_groups=self.arm.num_external, external=self.arm.external
            ),
            name,
            folder / str(number),
        )
        generator = TransformersGenerator(engine, tokenizer, learner.version, seed=self.job.seed, max_rows=_MAX_ROWS)
        generator.load(*learner.snapshot())
        curriculum = own_tasks(number, self.job.setting.num_nodes) if self.job.mode == "heteroq" else tuple(KINDS)
        mixture = TaskMixture(self._environments, dict.fromkeys(curriculum, 1.0), seed)
        return _Node(number=number, name=name, seed=seed, learner=learner, generator=generator, mixture=mixture)

    async def train(self, start_s: float) -> Outcome:
        """All rounds, evaluated at the beginning, every few rounds, and at the end."""
        setting = self.job.setting
        rounds: list[int] = []
        tables: list[dict[str, float]] = []
        tokens_at: list[int] = []
        for number in range(setting.num_rounds + 1):
            if number:
                await self.play(number)
            if number % setting.evaluate_every == 0 or number == setting.num_rounds:
                rounds.append(number)
                tables.append(self.accuracies())
                tokens_at.append(sum(node.counts.generated_tokens for node in self.nodes))
        counts = [node.counts for node in self.nodes]
        return Outcome(
            job=self.job,
            rounds=tuple(rounds),
            accuracy=tuple(float(np.mean(list(table.values()))) for table in tables),
            tokens_at=tuple(tokens_at),
            final_by_task=tables[-1],
            cumulative_reward=float(np.mean([count.reward for count in counts])),
            generated_tokens=tokens_at[-1],
            trained_tokens=sum(count.trained_tokens for count in counts),
            num_generated=sum(count.num_generated for count in counts),
            num_local=sum(count.num_local for count in counts),
            num_external=sum(count.num_external for count in counts),
            num_zero_variance=sum(count.num_zero_variance for count in counts),
            num_skipped=sum(count.num_skipped for count in counts),
            seconds=time.monotonic() - start_s,
        )

    async def play(self, number: int) -> list[Draw]:
        """One round: every node generates, then every node learns from its draw. Rounds are numbered from 1."""
        made = [await self._generate(node, number) for node in self.nodes]
        draws: list[Draw] = []
        for node in self.nodes:
            others = [group for groups in made for group in groups if group.group.producer != node.name]
            draws.append(self._draw(node, number, made[node.number], others))
        for node, draw in zip(self.nodes, draws, strict=True):
            if not draw.groups:
                node.counts.num_skipped += 1
                continue
            report = node.learner.step(draw)
            node.counts.trained_tokens += report.num_tokens
            node.counts.num_local += report.num_local
            node.counts.num_external += report.num_external
            node.generator.load(*node.learner.snapshot())
        return draws

    async def _generate(self, node: _Node, number: int) -> list[ScoredGroup]:
        """The node's groups of a round, with their rewards."""
        scored = await scored_groups(
            node.generator,
            CharTokenizer(),
            self._verifier,
            [node.mixture.next_task() for _ in range(self.arm.num_generated)],
            GROUP_SIZE,
            Sampling(max_new_tokens=MAX_NEW_TOKENS),
            producer=node.name,
            label=f"{node.name}/{number}",
        )
        node.counts.generated_tokens += sum(group.group.num_tokens for group in scored)
        node.counts.num_generated += len(scored)
        node.counts.num_zero_variance += sum(not group.has_signal for group in scored)
        node.counts.reward += float(np.mean([group.rewards.mean() for group in scored]))
        return scored

    def _draw(self, node: _Node, number: int, own: Sequence[ScoredGroup], others: Sequence[ScoredGroup]) -> Draw:
        """Own groups with signal, in order, and a uniform sample of the others' groups with signal of this round."""
        local = [group for group in own if group.has_signal][: self.arm.num_local]
        held = {group.digest: group for group in others if group.has_signal}
        candidates = [
            Candidate(digest=digest, source=group.group.producer, age_steps=0, first_seen_s=0.0)
            for digest, group in held.items()
        ]
        chosen = sample("uniform", candidates, self.arm.num_external, seed=node.seed, step=number, source_weights={})
        groups = [*local, *(replace(held[candidate.digest], is_made_here=False) for candidate in chosen)]
        return Draw(
            step=number,
            groups=tuple(DrawnGroup(scored=group, age_steps=0, use=1) for group in groups),
            num_zero_variance=sum(not group.has_signal for group in own),
        )

    def accuracies(self) -> dict[str, float]:
        """Held-out greedy accuracy of each task, mean over nodes."""
        totals: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for node in self.nodes:
            limits = EpisodeLimits(max_new_tokens=MAX_NEW_TOKENS)
            episodes = evaluate(node.generator, CharTokenizer(), [task for _, task in self._problems], limits)
            for (environment, task), actions in zip(self._problems, episodes, strict=True):
                totals[environment.name].append(replay(environment, task.task_id, actions).reward)
        return {kind: float(np.mean(values)) for kind, values in totals.items()}
