"""Episodes and runs of the character model that the figures of recipes over turns are measured on.

Invariant: same weights, tasks and seed, same episodes; everything is in one process, and every reward is of the replay.
Shape letters: N rollouts, K most turns, L longest response in tokens.
"""

import functools
import hashlib
import json
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import count, islice
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from benchmarks._trained_policy import draw_of, scored_group
from swarm.clock import ManualClock
from swarm.config import EnvironmentConfig, LearnerConfig, ModelConfig, ReplayConfig
from swarm.environments.load import build_environment
from swarm.environments.replay import LiveEpisodes, replay
from swarm.episode import Actions, EpisodeOutcome
from swarm.generation.episode_player import player_of
from swarm.generation.produce import produce
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.interfaces import Environment
from swarm.learn.gradient import score_batch
from swarm.learn.learner import PolicyLearner
from swarm.learn.packing import pack
from swarm.learn.requested_scores import answer_probs, feedback_shifts
from swarm.model.network import load_model
from swarm.model.tokenizer import CharTokenizer
from swarm.model.version_digest import PublishedTensors, load_published
from swarm.objectives.batch import Batch
from swarm.objectives.draw_batch import make_batch
from swarm.objectives.methods import load_recipe
from swarm.types import EpisodeLimits, Sampling, ScoredGroup

TOKENIZER: Final = CharTokenizer()
MAX_EPISODE_TOKENS: Final = 110
LEARNING_RATE: Final = 5e-4
NUM_GROUPS: Final = 32
GROUP_SIZE: Final = 8
NUM_STEPS: Final = 20
NUM_STEP_GROUPS: Final = 4
NUM_TEST: Final = 32  # tasks
TRAJECTORY_LEVEL: Final = "grpo"
_NAME: Final = hashlib.sha256(b"turns").hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """An environment, and the weights that the character model starts from."""

    kind: str
    params: str  # JSON
    source: str = "tiny-agents"
    max_new_tokens: int = 6  # of a turn
    temperature: float = 1.0

    def but(self, **params: Any) -> "World":
        """With other parameters."""
        return replace(self, params=json.dumps(json.loads(self.params) | params))

    def build(self) -> Environment:
        """The environment."""
        given = {"name": self.kind, "kind": self.kind, "params": json.loads(self.params), "seed": 5}
        return build_environment(EnvironmentConfig.model_validate(given))


LOOK_UP: Final = World(kind="look_up", params='{"style": "char"}')
GRID: Final = World(kind="grid_world", params='{"style": "char", "max_turns": 6, "steps": 3}')
RETRY: Final = World(
    kind="retry",
    params='{"inner": {"name": "reverse", "kind": "char", "dataset": "reverse", "seed": 5}}',
    source="tiny",
    max_new_tokens=9,
)
MAXIMUM: Final = RETRY.but(inner={"name": "max", "kind": "char", "dataset": "max", "seed": 5})
ALWAYS: Final = MAXIMUM.but(ask="always", max_turns=2)


@dataclass(slots=True)
class Policy:
    """The character model with a learner, and an engine that plays with the learner's newest weights."""

    world: World
    recipe: str
    seed: int
    updates_per_step: int = 1
    weights: PublishedTensors | None = None  # that it starts from; None: those of the world
    _learner: PolicyLearner = field(init=False)
    _network: nn.Module = field(init=False)
    _generator: TransformersGenerator = field(init=False)
    _folder: tempfile.TemporaryDirectory[str] = field(init=False)

    def __post_init__(self) -> None:
        torch.set_num_threads(1)
        self._folder = tempfile.TemporaryDirectory()
        config = ModelConfig(source=self.world.source, dtype="float32")
        self._network, engine = load_model(config).network, load_model(config).network.eval()
        if self.weights is not None:
            load_published(self._network, self.weights)
            load_published(engine, self.weights)
        environment = self.world.build()
        self._learner = PolicyLearner(
            self._network,
            TOKENIZER,
            load_recipe(self.recipe),
            LearnerConfig(learning_rate=LEARNING_RATE, updates_per_step=self.updates_per_step),
            ReplayConfig(),
            _NAME,
            Path(self._folder.name),
            answer_of=lambda _, task_id: environment.reference(task_id),
        )
        self._generator = TransformersGenerator(engine, TOKENIZER, self._learner.version, seed=self.seed, max_rows=512)

    def play(
        self, environment: Environment, first: int, num_groups: int, group_size: int, is_held_out: bool = False
    ) -> list[ScoredGroup]:
        """Groups of the tasks from number `first` on that are, or are not, held out."""
        numbered = (environment.task(number) for number in count(first))
        tasks = list(islice((task for task in numbered if task.is_held_out == is_held_out), num_groups))
        live = LiveEpisodes()

        def step(_env: str, task_id: int, actions: Actions) -> "Future[EpisodeOutcome]":
            done: Future[EpisodeOutcome] = Future()
            done.set_result(live.step(environment, task_id, actions))
            return done

        limits = EpisodeLimits(max_new_tokens=self.world.max_new_tokens, max_episode_tokens=MAX_EPISODE_TOKENS)
        groups = produce(
            self._generator,
            TOKENIZER,
            tasks,
            group_size,
            Sampling(max_new_tokens=self.world.max_new_tokens, temperature=self.world.temperature),
            run_id="benchmark",
            producer=_NAME,
            clock=ManualClock(),
            numbers=[first + place for place in range(num_groups)],
            observe=player_of(TOKENIZER, limits, step, tasks, group_size),
        )
        scored: list[ScoredGroup] = []
        for place, group in enumerate(groups):
            outcomes = tuple(replay(environment, group.task_id, rollout.actions) for rollout in group.rollouts)
            rewards = [outcome.reward for outcome in outcomes]
            scored.append(scored_group(group, f"{self.seed}/{first}/{place}", rewards, outcomes))
        return scored

    def gradient_norm(self, groups: Sequence[ScoredGroup], step: int = 1) -> float:
        """Norm of the gradient of a step from all the groups, which is made."""
        return self._learner.step(draw_of(step, groups)).grad_norm

    @property
    def newest(self) -> PublishedTensors:
        """The weights after the steps so far."""
        return self._learner.snapshot()[1]

    def scores(self, groups: Sequence[ScoredGroup]) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [N, L] of the newest weights."""
        batch = batch_of(groups)
        measured = score_batch(self._network, batch, pack(batch, 4096))
        return measured.logprobs, measured.entropy

    def with_answers(self, groups: Sequence[ScoredGroup]) -> Batch:
        """The groups with the probability of their right answers under the newest weights."""
        batch, environment = batch_of(groups), self.world.build()
        answers = [environment.reference(group.group.task_id) for group in groups]
        return replace(batch, answer_probs=answer_probs(batch, TOKENIZER, answers, self._logprobs))

    def with_feedback(self, groups: Sequence[ScoredGroup]) -> Batch:
        """The groups with the shifts of the newest weights' log-probs by the environment's answers."""
        batch = batch_of(groups)
        return replace(batch, feedback_shifts=feedback_shifts(batch, TOKENIZER, self._logprobs))

    def _logprobs(self, batch: Batch) -> Tensor:
        return score_batch(self._network, batch, pack(batch, 4096)).logprobs

    def train(self, num_steps: int) -> None:
        """Steps on policy: play, learn, publish; a step without a gradient makes no version."""
        environment, first = self.world.build(), 10_000 * (self.seed + 1)
        for number in range(num_steps):
            groups = self.play(environment, first, NUM_STEP_GROUPS, GROUP_SIZE)
            first = max(group.group.task_id for group in groups) + 1
            self._learner.step(draw_of(number + 1, groups))
            self._generator.load(*self._learner.snapshot())


def batch_of(groups: Sequence[ScoredGroup]) -> Batch:
    """The groups as recipes see them."""
    return make_batch(draw_of(1, groups), TOKENIZER, policy_id=_NAME)


@functools.cache
def played(world: World, seed: int, num_groups: int = NUM_GROUPS, group_size: int = GROUP_SIZE) -> list[ScoredGroup]:
    """Episodes of the starting weights."""
    policy = Policy(world=world, recipe=TRAJECTORY_LEVEL, seed=seed)
    return policy.play(world.build(), 1000 * (seed + 1), num_groups, group_size)


@functools.cache
def trained(recipe: str, world: World, seed: int, updates_per_step: int = 1, num_steps: int = NUM_STEPS) -> Policy:
    """The policy after so many steps."""
    policy = Policy(world=world, recipe=recipe, seed=seed, updates_per_step=updates_per_step)
    policy.train(num_steps)
    return policy


def tested(policy: Policy, world: World | None = None) -> Batch:
    """Sampled episodes of held-out tasks, of its own world or another."""
    environment = (world or policy.world).build()
    return batch_of(policy.play(environment, 0, NUM_TEST, GROUP_SIZE, is_held_out=True))
