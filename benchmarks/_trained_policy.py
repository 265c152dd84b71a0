"""A policy that a benchmark trains in its own process: a learner, the engine that follows it, and its questions.

Invariant: same weights, tasks and seeds, same groups; digests are unique within a run and mean nothing else.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from torch import nn

from swarm.clock import SystemClock
from swarm.config import EnvironmentConfig, LearnerConfig, ReplayConfig
from swarm.environments.char_tasks import KINDS
from swarm.environments.curriculum import TaskMixture, evaluation_tasks
from swarm.environments.load import build_environments
from swarm.environments.replay import replay
from swarm.episode import EpisodeOutcome
from swarm.generation.produce import evaluate, produce
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.interfaces import Environment, Tokenizer
from swarm.learn.learner import PolicyLearner
from swarm.learn.ranks import Ranks
from swarm.model.network import tiny_network
from swarm.model.tokenizer import CharTokenizer
from swarm.model.version_digest import PublishedTensors, load_published
from swarm.objectives.recipe import Recipe
from swarm.testing.builders import InlineVerifier, make_scored
from swarm.types import Draw, DrawnGroup, EpisodeLimits, RolloutGroup, Sampling, ScoredGroup

GROUP_SIZE: Final = 8
MAX_NEW_TOKENS: Final = 9  # of an answer to a character task
MAX_ROWS: Final = 512  # decoded together; changes time, not results
EVALUATION_SEED: Final = 7  # the same problems in every run
CHAR_ENVIRONMENTS: Final = tuple(EnvironmentConfig(name=kind, kind="char", dataset=kind, seed=1) for kind in KINDS)


class TrainedPolicy:
    """One lineage: the learner's weights, and an engine that generates with those of the last `follow`."""

    def __init__(
        self,
        node_id: str,
        networks: tuple[nn.Module, nn.Module],
        tokenizer: Tokenizer,
        recipe: Recipe,
        learner: LearnerConfig,
        replay_config: ReplayConfig,
        folder: Path,
        *,
        environments: Mapping[str, Environment],
        curriculum: Sequence[str] = (),
        seed: int,
        engine_seed: int | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        ranks: Ranks | None = None,
    ) -> None:
        """A policy at step 0.

        Args:
            networks: the learner's, which holds the starting weights, and the engine's.
            folder: of the learner, which writes nothing unless asked to.
            curriculum: names of the environments that it is asked; empty: all.
            engine_seed: None takes `seed`.
        """
        self.node_id, self.tokenizer, self.environments = node_id, tokenizer, environments
        self.sampling = Sampling(max_new_tokens=max_new_tokens)
        self.learner = PolicyLearner(
            networks[0], tokenizer, recipe, learner, replay_config, node_id, folder, ranks=ranks
        )
        engine_seed = seed if engine_seed is None else engine_seed
        version = self.learner.version
        self.generator = TransformersGenerator(networks[1], tokenizer, version, seed=engine_seed, max_rows=MAX_ROWS)
        self.follow()
        self._mixture = TaskMixture(environments, dict.fromkeys(curriculum or environments, 1.0), seed)
        self._verifier = InlineVerifier(environments)

    def follow(self) -> None:
        """Lets the engine generate with the learner's newest weights."""
        self.generator.load(*self.learner.snapshot())

    async def make(self, num_groups: int, label: str) -> list[ScoredGroup]:
        """Own groups with their rewards; `label` is unique within the run."""
        tasks = [self._mixture.next_task() for _ in range(num_groups)]
        groups = produce(
            self.generator,
            self.tokenizer,
            tasks,
            GROUP_SIZE,
            self.sampling,
            run_id="benchmark",
            producer=self.node_id,
            clock=SystemClock(),
        )
        scored: list[ScoredGroup] = []
        for index, group in enumerate(groups):
            verdict = await self._verifier.verify(group.env, group.task_id, [each.actions for each in group.rollouts])
            scored.append(scored_group(group, f"{label}/{index}", verdict.rewards.tolist()))
        return scored

    def accuracies(
        self, num_problems: int, split: Literal["held_out", "all"] = "held_out", seed: int = EVALUATION_SEED
    ) -> dict[str, float]:
        """Greedy accuracy of each environment."""
        problems = [
            (environment, task)
            for environment in self.environments.values()
            for task in evaluation_tasks(environment, split, num_problems, seed)
        ]
        limits = EpisodeLimits(max_new_tokens=self.sampling.max_new_tokens)
        episodes = evaluate(self.generator, self.tokenizer, [task for _, task in problems], limits)
        rewards: dict[str, list[float]] = {name: [] for name in self.environments}
        for (environment, task), actions in zip(problems, episodes, strict=True):
            rewards[environment.name].append(replay(environment, task.task_id, actions).reward)
        return {name: float(np.mean(values)) for name, values in rewards.items()}


def char_policy(node_id: str, weights: PublishedTensors, *arguments: Any, **options: Any) -> TrainedPolicy:
    """A `TrainedPolicy` of the character model that starts from these weights."""
    networks = tiny_network(), tiny_network()
    load_published(networks[0], weights)
    environments = build_environments(CHAR_ENVIRONMENTS)
    return TrainedPolicy(node_id, networks, CharTokenizer(), *arguments, environments=environments, **options)


def scored_group(
    group: RolloutGroup, label: str, rewards: Sequence[float], outcomes: tuple[EpisodeOutcome, ...] = ()
) -> ScoredGroup:
    """An own group with its rewards, and in an environment of several turns with its outcomes."""
    digest = hashlib.sha256(label.encode()).digest()
    scored = make_scored(group, digest=digest, rewards=rewards, first_seen_s=group.created_at_s, size_bytes=1)
    return replace(scored, outcomes=outcomes)


def draw_of(step: int, groups: Iterable[ScoredGroup], *, age_steps: int = 0, num_zero_variance: int = 0) -> Draw:
    """A draw of all the groups, each used for the first time."""
    drawn = tuple(DrawnGroup(scored=group, age_steps=age_steps, use=1) for group in groups)
    return Draw(step=step, groups=drawn, num_zero_variance=num_zero_variance)
