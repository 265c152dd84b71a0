"""Episodes of the character model for the figures of recipes over turns: groups that it plays, and steps it learns.

Invariant: same weights, tasks and seed, same episodes; everything is in one process, and every reward is of the replay.
"""

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
from swarm.objectives.coefficients import with_advantages
from swarm.objectives.draw_batch import make_batch
from swarm.objectives.methods import load_recipe
from swarm.types import Correction, Draw, DrawnGroup, EpisodeLimits, Sampling, ScoredGroup, StepReport

LIMITS: Final = EpisodeLimits(max_new_tokens=6, max_episode_tokens=110)
LEARNING_RATE: Final = 5e-4
_NAME: Final = hashlib.sha256(b"turns").hexdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """An environment, and the weights that the character model starts from."""

    kind: str
    params: str  # JSON
    source: str = "tiny-agents"
    max_new_tokens: int = LIMITS.max_new_tokens  # of a turn
    temperature: float = 1.0

    def but(self, **params: Any) -> "World":
        """With other parameters."""
        return replace(self, params=json.dumps(json.loads(self.params) | params))

    def build(self) -> Environment:
        """The environment."""
        given = json.loads(self.params)
        return build_environment(
            EnvironmentConfig.model_validate({"name": self.kind, "kind": self.kind, "params": given, "seed": 5})
        )


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
    """The character model with a learner, and an engine that plays with the newest weights of that."""

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
            CharTokenizer(),
            load_recipe(self.recipe),
            LearnerConfig(learning_rate=LEARNING_RATE, updates_per_step=self.updates_per_step),
            ReplayConfig(),
            _NAME,
            Path(self._folder.name),
            answer_of=lambda _, task_id: environment.reference(task_id),
        )
        self._generator = TransformersGenerator(
            engine, CharTokenizer(), self._learner.version, seed=self.seed, max_rows=512
        )

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

        limits = EpisodeLimits(max_new_tokens=self.world.max_new_tokens, max_episode_tokens=LIMITS.max_episode_tokens)
        groups = produce(
            self._generator,
            CharTokenizer(),
            tasks,
            group_size,
            Sampling(max_new_tokens=self.world.max_new_tokens, temperature=self.world.temperature),
            run_id="benchmark",
            producer=_NAME,
            clock=ManualClock(),
            numbers=[first + place for place in range(num_groups)],
            observe=player_of(CharTokenizer(), limits, step, tasks, group_size),
        )
        scored: list[ScoredGroup] = []
        for place, group in enumerate(groups):
            outcomes = tuple(replay(environment, group.task_id, rollout.actions) for rollout in group.rollouts)
            rewards = torch.tensor([outcome.reward for outcome in outcomes]).numpy()
            digest = hashlib.sha256(f"{self.seed}/{first}/{place}".encode()).digest()
            scored.append(
                ScoredGroup(
                    digest=digest,
                    group=group,
                    rewards=rewards,
                    correction=Correction.EXACT,
                    is_made_here=True,
                    first_seen_s=0.0,
                    size_bytes=1,
                    outcomes=outcomes,
                )
            )
        return scored

    def learn(self, groups: Sequence[ScoredGroup], step: int = 1) -> StepReport:
        """One step, from all of them."""
        return self._learner.step(draw_of(groups, step))

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
        """The groups, and how likely the newest weights find their right answers."""
        batch, environment = batch_of(groups), self.world.build()
        answers = [environment.reference(group.group.task_id) for group in groups]
        return replace(batch, answer_probs=answer_probs(batch, CharTokenizer(), answers, self._logprobs))

    def with_feedback(self, groups: Sequence[ScoredGroup]) -> Batch:
        """The groups, and how far the newest weights are moved by what the environment answered."""
        batch = batch_of(groups)
        return replace(batch, feedback_shifts=feedback_shifts(batch, CharTokenizer(), self._logprobs))

    def _logprobs(self, batch: Batch) -> Tensor:
        return score_batch(self._network, batch, pack(batch, 4096)).logprobs

    def publish(self) -> None:
        """The engine plays with the newest weights from now on."""
        self._generator.load(*self._learner.snapshot())

    def train(self, environment: Environment, num_steps: int, num_groups: int, group_size: int) -> None:
        """Steps on policy: play, learn, publish; a step without a gradient makes no version."""
        first = 10_000 * (self.seed + 1)
        for number in range(num_steps):
            groups = self.play(environment, first, num_groups, group_size)
            first = max(group.group.task_id for group in groups) + 1
            self.learn(groups, number + 1)
            self.publish()


def draw_of(groups: Sequence[ScoredGroup], step: int = 1) -> Draw:
    """A draw of all of them."""
    return Draw(
        step=step, groups=tuple(DrawnGroup(scored=each, age_steps=0, use=1) for each in groups), num_zero_variance=0
    )


def batch_of(groups: Sequence[ScoredGroup]) -> Batch:
    """The groups as recipes see them."""
    return make_batch(draw_of(groups), CharTokenizer(), policy_id=_NAME)


def advantages(recipe: str, batch: Batch) -> Tensor:
    """Advantage of each turn [N, K], that of its first trained token; NaN where it is dropped or there is no turn."""
    found = with_advantages(load_recipe(recipe), batch, "all")
    assert batch.num_turns is not None
    turns = torch.full((batch.num_rollouts, int(batch.num_turns.max())), torch.nan, dtype=torch.float64)
    for row in range(batch.num_rollouts):
        for turn in range(int(batch.num_turns[row])):
            tokens = found.mask[row] & (batch.turn_ids[row] == turn)
            if tokens.any():
                turns[row, turn] = float(found.advantages[row][tokens][0])
    return turns
