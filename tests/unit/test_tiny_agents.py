"""The preset `tiny-agents`: who generates what, and what its warm start has seen and can do."""

import random
from concurrent.futures import Future
from itertools import islice
from pathlib import Path

import pytest

from swarm.config import ModelConfig
from swarm.environments.curriculum import evaluation_tasks
from swarm.environments.load import build_environments
from swarm.environments.replay import LiveEpisodes, replay
from swarm.episode import Actions, EpisodeOutcome
from swarm.generation.produce import try_tasks
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.model.network import load_model
from swarm.model.tokenizer import CharTokenizer
from swarm.model.version_digest import published_state, weights_digest
from swarm.simulate.presets import PRESETS, SimulationOptions, node_configs
from swarm.simulate.tiny import OFF
from swarm.simulate.tiny_agents import (
    RIGHT_SHARES,
    play,
    right_action,
    training_environments,
    training_rows,
    training_tasks,
    warm_start,
    wrong_action,
)
from swarm.testing.episodes import make_episode
from swarm.types import PolicyVersion, Sampling

PRESET = PRESETS["tiny-agents"]
SHIPPED_DIGEST = "9ead9fd686c53d2ecc81b2045cc9f545ab25a96f50fd394eea7dfa8c6bc9d88d"
CONTEXT = 128  # of the model, tokens
ENVIRONMENTS = ("look_up", "grid")


def test_two_nodes_generate_one_environment_and_two_the_other():
    nodes = node_configs(SimulationOptions(preset="tiny-agents"), Path("out"))
    assert [tuple(node.generator.env_weights) for node in nodes] == [("look_up",), ("grid",), ("look_up",), ("grid",)]
    for node in nodes:
        assert tuple(environment.name for environment in node.environments) == ENVIRONMENTS
        assert node.evaluation.environments == (), "each is evaluated on both"
    for name, environment in build_environments(PRESET.environments).items():
        prompts = [CharTokenizer().encode_prompt(environment.task(number)) for number in range(20)]
        assert max(map(len, prompts)) + nodes[0].generator.max_episode_tokens <= CONTEXT, name


def test_the_shipped_file_is_the_one_that_was_measured():
    network = load_model(ModelConfig(source="tiny-agents", dtype="float32")).network
    assert weights_digest(published_state(network)).hex() == SHIPPED_DIGEST


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_what_is_held_out_was_not_in_the_warm_start(name: str):
    shown, training = build_environments(PRESET.environments)[name], training_environments()[name]
    seen = {training.problem(task.task_id).initial_state for task in islice(training_tasks(training), 2000)}
    assert not any(training.problem(task.task_id).is_held_out for task in islice(training_tasks(training), 200))
    held_out = evaluation_tasks(shown, "held_out", PRESET.num_problems, seed=0)
    # The same state has the same name whatever its number and seed are.
    states = {type(training)(shown.config).problem(task.task_id).initial_state for task in held_out}  # type: ignore[attr-defined]
    assert len(held_out) == PRESET.num_problems and not seen & states


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_player_errs_as_often_as_asked_and_goes_on_from_there(name: str):
    environment, source = training_environments()[name], random.Random(0)
    tasks = [task.task_id for task in islice(training_tasks(environment), 60)]
    assert all(play(environment, task, 1.0, source)[1].reward == 1.0 for task in tasks)
    played = [play(environment, task, RIGHT_SHARES[name], source) for task in tasks]
    turns = [
        action == right_action(environment, task, actions[:turn])
        for task, (actions, _) in zip(tasks, played, strict=True)
        for turn, action in enumerate(actions)
    ]
    assert sum(turns) / len(turns) == pytest.approx(RIGHT_SHARES[name], abs=0.1)
    for task, (actions, outcome) in zip(tasks, played, strict=True):
        assert replay(environment, task, actions) == outcome and outcome.is_ended
        right = right_action(environment, task, ())
        assert wrong_action(environment, right, source) != right


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_row_holds_the_tokens_that_a_node_would_have_and_learns_actions_alone(name: str):
    environment, tokenizer = training_environments()[name], CharTokenizer()
    rows = training_rows(environment, 0.5, 10, random.Random(3))
    source = random.Random(3)
    for task, (tokens, targets) in zip(training_tasks(environment), rows, strict=False):
        actions, _ = play(environment, task.task_id, 0.5, source)
        made = make_episode(environment, task.task_id, actions, tokenizer, policy_id="p", sampling=Sampling())
        assert made.trace is not None
        prompt = tokenizer.encode_prompt(task)
        assert tokens == prompt + made.trace.token_ids.tolist()
        mask = [False] * len(prompt) + made.trace.action_mask.tolist()
        assert targets == [token if is_action else OFF for token, is_action in zip(tokens, mask, strict=True)]


def test_one_seed_gives_one_checkpoint():
    losses: list[float] = []
    made = [
        warm_start(1, lambda _step, loss: losses.append(loss), num_steps=8, num_episodes=16, batch_size=16)
        for _ in range(2)
    ]
    assert losses[:8] == losses[8:] and losses[7] < losses[0] - 0.3
    assert len({weights_digest(published_state(network)) for network in made}) == 1


def test_the_shipped_checkpoint_succeeds_now_and_then_at_what_was_held_out():
    """Room to rise and something to rise from: sampled success, as reports show it."""
    environments, episodes = build_environments(PRESET.environments), LiveEpisodes()

    def step(env: str, task_id: int, actions: Actions) -> "Future[EpisodeOutcome]":
        done: Future[EpisodeOutcome] = Future()
        done.set_result(episodes.step(environments[env], task_id, actions))
        return done

    model = load_model(ModelConfig(source="tiny-agents", dtype="float32"))
    generator = TransformersGenerator(model.network, model.tokenizer, PolicyVersion(policy_id="a", step=0), 0)
    limits = node_configs(SimulationOptions(preset="tiny-agents"), Path())[0].generator.episode_limits
    for name, environment in environments.items():
        tasks = evaluation_tasks(environment, "held_out", 32, seed=0)
        tries = try_tasks(generator, model.tokenizer, tasks, limits, step, num_tries=4)
        rewards = [
            replay(environment, task.task_id, each).reward for task, of in zip(tasks, tries, strict=True) for each in of
        ]
        assert 0.15 < sum(rewards) / len(rewards) < 0.5, name
