"""One run of the sharing benchmark: some nodes in one process, in rounds, with the parts a real node has.

Invariant: in a round every node generates with the weights it had at its start, then all learn; each node
counts every token it generated, used or not. No network: a group is drawn by its receivers as it was made.
"""

import asyncio
import hashlib
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np
import torch

from benchmarks._sharing_start import specialist_weights, warm_weights
from benchmarks._trained_policy import TrainedPolicy, char_policy, draw_of
from swarm.config import LearnerConfig, ReplayConfig
from swarm.environments.char_tasks import KINDS
from swarm.exchange.external_sampler import Candidate, sample
from swarm.model.version_digest import PublishedTensors
from swarm.objectives.methods import load_recipe
from swarm.types import Draw, ScoredGroup

LEARNING_RATE: Final = 1e-4
MODES: Final = ("heteroq", "spec", "homo")


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """The composition of a node's training batch in each round."""

    num_generated: int  # own groups made
    num_local: int  # most own groups with signal that are learned from
    num_external: int  # most groups of others
    external: Literal["all", "positive"] = "all"


BASELINE: Final = "4/0"
FILTERED: Final = "4/0 of 12"  # no sharing, but zero-variance groups replaced, as by a draw from others
ARMS: Final = {
    BASELINE: Arm(num_generated=4, num_local=4, num_external=0),
    "2/2": Arm(num_generated=2, num_local=2, num_external=2),
    "1/3": Arm(num_generated=1, num_local=1, num_external=3),
    "2/2 positive": Arm(num_generated=2, num_local=2, num_external=2, external="positive"),
    FILTERED: Arm(num_generated=12, num_local=4, num_external=0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The parameters that all runs of a table share."""

    num_nodes: int = 4
    num_rounds: int = 75
    evaluate_every: int = 5  # rounds
    num_problems: int = 40  # held out, per task
    num_warm: int = 3  # warm starts; run seed s takes number s modulo this


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The cell of the table and the seed of one run."""

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
    """The figures of one run; every count is a sum over nodes and rounds."""

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
class _Node:
    number: int
    seed: int
    policy: TrainedPolicy
    reward: float = 0.0
    counts: Counter[str] = field(default_factory=Counter[str])  # by the names of the outcome's fields

    @property
    def name(self) -> str:
        return self.policy.node_id


def own_tasks(node: int, num_nodes: int) -> tuple[str, ...]:
    """Names of the tasks that a node owns: an equal share, dealt in turn as `swarm simulate` does."""
    kinds = tuple(KINDS)
    return kinds[node::num_nodes] or (kinds[node % len(kinds)],)


def starting_weights(job: Job, node: int) -> PublishedTensors:
    """The start of a node: its specialist in mode `spec`, else the common warm start."""
    if job.mode == "spec":
        return specialist_weights(job.warm_seed, node, own_tasks(node, job.setting.num_nodes))
    return warm_weights(job.warm_seed)


def run(job: Job) -> Outcome:
    """One run (blocking; sets torch to one thread). Nothing of it stays on disk but starting weights."""
    torch.set_num_threads(1)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        swarm = Swarm(job, [starting_weights(job, node) for node in range(job.setting.num_nodes)], Path(folder))
        return asyncio.run(swarm.train(start_s))


class Swarm:
    """The nodes of one run and the rounds they make together."""

    def __init__(self, job: Job, weights: Sequence[PublishedTensors], folder: Path) -> None:
        """`weights`: one per node."""
        self.job = job
        self.arm = ARMS[job.arm]
        self.nodes = [self._node(number, start, folder) for number, start in enumerate(weights)]

    def _node(self, number: int, weights: PublishedTensors, folder: Path) -> _Node:
        seed, arm = 1000 * self.job.seed + number, self.arm
        policy = char_policy(
            hashlib.sha256(f"sharing/{seed}".encode()).hexdigest(),
            weights,
            load_recipe("sapo_swarm"),
            LearnerConfig(learning_rate=LEARNING_RATE),
            ReplayConfig(local_groups=arm.num_local, external_groups=arm.num_external, external=arm.external),
            folder / str(number),
            curriculum=own_tasks(number, self.job.setting.num_nodes) if self.job.mode == "heteroq" else (),
            seed=seed,
            engine_seed=self.job.seed,
        )
        return _Node(number=number, seed=seed, policy=policy)

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
                tables.append(self._accuracies())
                tokens_at.append(sum(node.counts["generated_tokens"] for node in self.nodes))
        counts = sum((node.counts for node in self.nodes), Counter[str]())
        counted = ("trained_tokens", "num_generated", "num_local", "num_external", "num_zero_variance", "num_skipped")
        return Outcome(
            job=self.job,
            rounds=tuple(rounds),
            accuracy=tuple(float(np.mean(list(table.values()))) for table in tables),
            tokens_at=tuple(tokens_at),
            final_by_task=tables[-1],
            cumulative_reward=float(np.mean([node.reward for node in self.nodes])),
            generated_tokens=tokens_at[-1],
            seconds=time.monotonic() - start_s,
            **{name: counts[name] for name in counted},
        )

    async def play(self, number: int) -> list[Draw]:
        """One round: every node generates, then every node learns from its draw. Rounds are numbered from 1."""
        made = [await self.generate(node, number) for node in self.nodes]
        draws: list[Draw] = []
        for node in self.nodes:
            others = [group for groups in made for group in groups if group.group.producer != node.name]
            draws.append(self._draw(node, number, made[node.number], others))
        for node, draw in zip(self.nodes, draws, strict=True):
            if not draw.groups:
                node.counts["num_skipped"] += 1
                continue
            report = node.policy.learner.step(draw)
            node.counts["trained_tokens"] += report.num_tokens
            node.counts["num_local"] += report.num_local
            node.counts["num_external"] += report.num_external
            node.policy.follow()
        return draws

    async def generate(self, node: _Node, number: int) -> list[ScoredGroup]:
        """The node's groups of a round, with their rewards."""
        scored = await node.policy.make(self.arm.num_generated, f"{node.name}/{number}")
        node.counts["generated_tokens"] += sum(group.group.num_tokens for group in scored)
        node.counts["num_generated"] += len(scored)
        node.counts["num_zero_variance"] += sum(not group.has_signal for group in scored)
        node.reward += float(np.mean([group.rewards.mean() for group in scored]))
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
        external = [replace(held[candidate.digest], is_made_here=False) for candidate in chosen]
        return draw_of(number, [*local, *external], num_zero_variance=sum(not group.has_signal for group in own))

    def _accuracies(self) -> dict[str, float]:
        """Held-out greedy accuracy of each task, mean over nodes."""
        tables = [node.policy.accuracies(self.job.setting.num_problems) for node in self.nodes]
        return {kind: float(np.mean([table[kind] for table in tables])) for kind in KINDS}
