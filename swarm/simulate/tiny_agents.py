"""Warm start of the tiny model for episodes of several turns: the model can solve each environment, but often errs.

Invariant: no held-out initial state is used, and one seed gives one checkpoint on one machine.

The model imitates a player that takes a right action with the probability in RIGHT_SHARES, else a wrong one of the same
form, and goes on from the state that follows. So the model also learns the right action after a mistake, but takes it
too rarely to succeed often; reinforcement learning can raise that.

    python -m swarm.simulate.tiny_agents --out swarm/assets/tiny_agents.safetensors --seed 0
"""

import argparse
import hashlib
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path

from torch import nn

from swarm.environments.grid_world import GridWorldEnvironment
from swarm.environments.load import build_environments
from swarm.environments.look_up import LookUpEnvironment
from swarm.environments.replay import ReplayedEpisode
from swarm.episode import OUTCOME, Actions, EpisodeOutcome
from swarm.model.network import save_tensors, tiny_network
from swarm.model.tokenizer import CharTokenizer
from swarm.model.version_digest import published_state
from swarm.simulate.presets import PRESETS
from swarm.simulate.tiny import DISTORTIONS, OFF, Row, train
from swarm.types import Task

RIGHT_SHARES = {"look_up": 0.65, "grid": 0.4}
NUM_STEPS = 1500
BATCH_SIZE = 64
NUM_EPISODES = 8_000  # of each environment; they are drawn again and again
TRAINING_SEED = 2  # of the environments: other problems than a simulation's

Played = LookUpEnvironment | GridWorldEnvironment


def training_environments() -> dict[str, Played]:
    """The environments of the preset tiny-agents by name, with other problems (TRAINING_SEED)."""
    configs = [each.model_copy(update={"seed": TRAINING_SEED}) for each in PRESETS["tiny-agents"].environments]
    return {
        name: built
        for name, built in build_environments(configs).items()
        if isinstance(built, LookUpEnvironment | GridWorldEnvironment)
    }


def play(
    environment: Played, task_id: int, right_share: float, source: random.Random
) -> tuple[Actions, EpisodeOutcome]:
    """Actions and outcome of a player that errs with probability 1 - `right_share` at each turn."""
    episode, actions = ReplayedEpisode(environment, task_id), list[str]()
    while not episode.is_ended:
        right = right_action(environment, task_id, tuple(actions))
        action = right if source.random() < right_share else wrong_action(environment, right, source)
        actions.append(action)
        episode.step(action)
    return tuple(actions), episode.outcome()


def right_action(environment: Played, task_id: int, actions: Actions) -> str:
    """The first candidate action that earns a reward after `actions`; AssertionError if there is none."""
    candidates = tuple("urdl") if isinstance(environment, GridWorldEnvironment) else environment.demonstration(task_id)
    for candidate in candidates:
        tried = ReplayedEpisode(environment, task_id)
        tried.play(actions)
        transition = tried.step(candidate)
        if transition.reward > 0 or transition.rewards.get(OUTCOME, 0.0) >= 1.0:
            return candidate
    raise AssertionError(f"{environment.name} {task_id}: nothing is right after {actions}")


def wrong_action(environment: Played, right: str, source: random.Random) -> str:
    """Another step in a grid; elsewhere the same search or answer with a distorted word."""
    if isinstance(environment, GridWorldEnvironment):
        return source.choice([step for step in "urdl" if step != right])
    mark, word = ("?", right[1:]) if right.startswith("?") else ("", right)
    return mark + source.choice([wrong for wrong in (distort(word) for distort in DISTORTIONS) if wrong != word])


def warm_start(
    seed: int,
    report: Callable[[int, float], None] | None = None,
    num_steps: int = NUM_STEPS,
    num_episodes: int = NUM_EPISODES,
    batch_size: int = BATCH_SIZE,
) -> nn.Module:
    """A tiny network after `num_steps` x `batch_size` supervised episodes of both environments."""
    network, source = tiny_network(seed), random.Random(seed)
    rows = [
        training_rows(environment, RIGHT_SHARES[name], num_episodes, source)
        for name, environment in training_environments().items()
    ]
    train(network, lambda: [source.choice(source.choice(rows)) for _ in range(batch_size)], num_steps, report=report)
    return network.eval()


def training_rows(environment: Played, right_share: float, count: int, source: random.Random) -> Sequence[Row]:
    """Token ids and targets of `count` episodes at most; only the player's actions are learned."""
    tokenizer = CharTokenizer()
    rows: list[Row] = []
    for task in islice(training_tasks(environment), count):
        prompt = tokenizer.encode_prompt(task)
        tokens, targets = list(prompt), [OFF] * len(prompt)
        actions, episode = play(environment, task.task_id, right_share, source)
        for action, transition in zip(actions, episode.transitions, strict=True):
            acted = tokenizer.encode_response(action)
            observed = tokenizer.encode_observation(transition.messages, is_ended=True)
            tokens += acted + observed
            targets += acted + [OFF] * len(observed)
        rows.append((tokens, targets))
    return rows


def training_tasks(environment: Played) -> Iterator[Task]:
    """Yields the environment's tasks in order, without those held out."""
    tasks = (environment.task(task_id) for task_id in range(environment.num_tasks))
    return (task for task in tasks if not task.is_held_out)


def _print_progress(step: int, loss: float) -> None:
    if step % 50 == 0:
        print(f"step {step}/{NUM_STEPS} loss {loss:.3f}", file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Builds a checkpoint, writes it in float16, and prints the SHA-256 of the file."""
    parser = argparse.ArgumentParser(description="Build the warm start of the tiny model for episodes.")
    parser.add_argument("--out", type=Path, required=True, help="safetensors file to write")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    started_s = time.monotonic()
    network = warm_start(given.seed, _print_progress)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    save_tensors({name: tensor.half() for name, tensor in published_state(network).items()}, given.out)
    digest = hashlib.sha256(given.out.read_bytes()).hexdigest()
    print(f"{given.out}: {given.out.stat().st_size} bytes, {time.monotonic() - started_s:.0f} s, SHA-256 {digest}")


if __name__ == "__main__":
    main()
