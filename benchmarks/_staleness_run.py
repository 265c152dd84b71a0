"""One run of the staleness benchmark: a policy that learns from batches of one exact age.

Invariant: a batch is generated with the weights of `age` updates ago (or the first ones), by the same
generator, verifier and learner as a node has; methods differ in the recipe and in nothing else.
"""

import asyncio
import hashlib
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch

from benchmarks._sharing_start import warm_weights
from benchmarks._trained_policy import char_policy, draw_of
from swarm.config import SAFE_RECIPE, GuardConfig, LearnerConfig, ReplayConfig
from swarm.learn.guarded_learner import GuardedLearner
from swarm.objectives.methods import load_recipe
from swarm.types import ScoredGroup, StepReport


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """A recipe with its parameters."""

    recipe: str
    params: Mapping[str, Any] = field(default_factory=dict[str, Any])
    is_guarded: bool = False


METHODS: Final = {
    "none": Method(recipe="reinforce"),
    "PPO-clip": Method(recipe="dapo", params={"weight.high": 0.2}),
    "GSPO": Method(recipe="gspo"),
    "GSPO .2/.28": Method(recipe="gspo", params={"weight.low": 0.2, "weight.high": 0.28}),
    "TIS": Method(recipe="tis"),
    "decoupled PPO": Method(recipe="decoupled_ppo"),
    "CISPO": Method(recipe="cispo"),
    "TOPR": Method(recipe="topr"),
    "MinPRO": Method(recipe="minpro"),
    "BAPO": Method(recipe="bapo"),
    "M2PO": Method(recipe="m2po"),
    "R2VPO": Method(recipe="r2vpo"),
    "none + guard": Method(recipe="reinforce", is_guarded=True),
    "PPO-clip + guard": Method(recipe="dapo", params={"weight.high": 0.2}, is_guarded=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The parameters that all runs of a table share."""

    num_updates: int = 192
    evaluate_every: int = 16  # updates
    num_problems: int = 40  # held out, per task
    num_warm: int = 3  # warm starts; run seed s takes number s modulo this


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The cell of the table and the seed of one run."""

    setting: Setting
    method: str
    schedule: Literal["one", "four"]  # updates for each batch: one of 8 groups, or four of 4 groups each
    source: Literal["own", "external"]  # all groups are the policy's own, or half are of another that learns alone
    age: int  # updates
    learning_rate: float
    seed: int

    @property
    def warm_seed(self) -> int:
        """The warm start that the policy begins from."""
        return self.seed % self.setting.num_warm

    @property
    def updates_per_batch(self) -> int:
        """1 or 4."""
        return 4 if self.schedule == "four" else 1

    @property
    def num_groups(self) -> int:
        """Groups of a batch."""
        return 16 if self.schedule == "four" else 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """The figures of one run."""

    job: Job
    updates: tuple[int, ...]  # at which the policy was evaluated
    accuracy: tuple[float, ...]  # held-out greedy over all tasks, at each of them
    mismatch_kl: tuple[float, ...]  # nats per token (k3) of the batch before it; the first is 0
    ess_share: tuple[float, ...]  # of that batch; the first is 1
    clip_share: float  # mean over batches: tokens clipped or capped
    final_by_task: dict[str, float]
    generated_tokens: int
    num_skipped: int  # batches without signal or with a non-finite update
    num_dropped: int  # groups that the guard's lag bound refused
    guard_level: float  # mean over batches
    max_age_steps: int  # lag bound at the end
    seconds: float

    @property
    def auc(self) -> float:
        """Mean of the curve."""
        return float(np.mean(self.accuracy))

    @property
    def final(self) -> float:
        """Last point of the curve."""
        return self.accuracy[-1]

    @property
    def collapse(self) -> int | None:
        """First update from which on the accuracy stays below half of its best until then; None if never."""
        best, since = 0.0, None
        for update, accuracy in zip(self.updates, self.accuracy, strict=True):
            is_low = accuracy < best / 2
            since = (since or update) if is_low else None
            best = max(best, accuracy)
        return since


def run(job: Job) -> Outcome:
    """One run (blocking; sets torch to one thread). Nothing of it stays on disk but warm starts."""
    torch.set_num_threads(1)
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(StaleRun(job, Path(folder)).train(start_s))


def build_start(job: Job) -> None:
    """Builds the warm start of a run (blocking) where it is not kept yet."""
    torch.set_num_threads(1)
    warm_weights(job.warm_seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Made:
    """A batch, and the update at which it was generated."""

    update: int
    groups: tuple[ScoredGroup, ...]


class _Policy:
    """One lineage under the guard, which does nothing unless the method is guarded."""

    def __init__(self, name: str, job: Job, method: Method, seed: int, folder: Path) -> None:
        self.policy = char_policy(
            hashlib.sha256(f"staleness/{name}/{seed}".encode()).hexdigest(),
            warm_weights(job.warm_seed),
            load_recipe(method.recipe, method.params),
            LearnerConfig(learning_rate=job.learning_rate, updates_per_step=job.updates_per_batch),
            ReplayConfig(external="all"),
            folder / name,
            seed=seed,
        )
        guard = GuardConfig(enabled=method.is_guarded)
        safe = load_recipe(SAFE_RECIPE)
        self.learner = GuardedLearner(self.policy.learner, safe, guard, max_age_steps=job.age)
        self.generated_tokens = 0
        self._num_made = 0  # batches

    async def make(self, num_groups: int) -> tuple[ScoredGroup, ...]:
        """Groups with the newest weights, rewards included."""
        self._num_made += 1
        groups = await self.policy.make(num_groups, f"{self.policy.node_id}/{self._num_made}")
        self.generated_tokens += sum(group.group.num_tokens for group in groups)
        return tuple(groups)

    def learn(self, number: int, groups: Sequence[ScoredGroup], age: int) -> StepReport | None:
        """One draw of those groups with signal; None where there is none."""
        drawn = [group for group in groups if group.has_signal]
        if not drawn:
            return None
        draw = draw_of(number, drawn, age_steps=age, num_zero_variance=len(groups) - len(drawn))
        report = self.learner.step(draw)
        self.policy.follow()
        return report


class StaleRun:
    """A policy, the batches that wait for it, and where external groups are wanted a second policy beside it."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job = job
        self.policy = _Policy("own", job, METHODS[job.method], 1000 * job.seed, folder)
        self.peer: _Policy | None = None
        if job.source == "external":
            self.peer = _Policy("peer", job, METHODS["PPO-clip"], 1000 * job.seed + 1, folder)
        self.waiting: deque[_Made] = deque()
        self.num_dropped = 0  # groups that the guard's lag bound refused

    async def train(self, start_s: float) -> Outcome:
        """All updates, evaluated at the beginning, every few updates, and at the end."""
        job, setting = self.job, self.job.setting
        tables, updates = [self._accuracies()], [0]
        kls, ess, clips, num_skipped = [0.0], [1.0], list[float](), 0
        figures: Mapping[str, float] = {}
        levels = list[float]()
        for number in range(1, setting.num_updates // job.updates_per_batch + 1):
            levels.append(float(self.policy.learner.state.level))
            report = await self.advance(number)
            if report is None or report.was_skipped:
                num_skipped += 1
            else:
                figures = report.diagnostics
                clips.append(figures["clip_share"])
            done = number * job.updates_per_batch
            if done % setting.evaluate_every == 0:
                tables.append(self._accuracies())
                updates.append(done)
                kls.append(figures.get("mismatch_kl_k3", 0.0))
                ess.append(figures.get("ess_share", 1.0))
        return Outcome(
            job=job,
            updates=tuple(updates),
            accuracy=tuple(float(np.mean(list(table.values()))) for table in tables),
            mismatch_kl=tuple(kls),
            ess_share=tuple(ess),
            clip_share=float(np.mean(clips)) if clips else 0.0,
            final_by_task=tables[-1],
            generated_tokens=self.policy.generated_tokens,
            num_skipped=num_skipped,
            num_dropped=self.num_dropped,
            guard_level=float(np.mean(levels)) if levels else 0.0,
            max_age_steps=self.policy.learner.state.max_age_steps,
            seconds=time.monotonic() - start_s,
        )

    async def advance(self, number: int) -> StepReport | None:
        """One batch: generated with today's weights, while the one of `age` updates ago is learned from."""
        update = (number - 1) * self.job.updates_per_batch
        bound = self.policy.learner.state.max_age_steps  # of the guard; the configured age without one
        while self.waiting and update - self.waiting[0].update > bound:
            self.num_dropped += len(self.waiting.popleft().groups)
        lag = bound // self.job.updates_per_batch
        while len(self.waiting) <= lag:
            self.waiting.append(_Made(update=update, groups=await self._batch()))
        made = self.waiting.popleft()
        if self.peer is not None:
            self.peer.learn(number, await self.peer.make(self.job.num_groups), 0)
        return self.policy.learn(number, made.groups, update - made.update)

    async def _batch(self) -> tuple[ScoredGroup, ...]:
        if self.peer is None:
            return await self.policy.make(self.job.num_groups)
        half = self.job.num_groups // 2
        others = [replace(group, is_made_here=False) for group in await self.peer.make(half)]
        return (*await self.policy.make(half), *others)

    def _accuracies(self) -> dict[str, float]:
        return self.policy.policy.accuracies(self.job.setting.num_problems)
