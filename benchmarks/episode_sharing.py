"""Learning of an environment that a node never asks, from the episodes of another node alone: preset `agents`.

    python -m benchmarks.episode_sharing --arm swarm --seed 0 --rounds 12 --file runs/agents.jsonl
    python -m benchmarks.episode_sharing --arm silo --seed 0 --rounds 12 --file runs/agents.jsonl

The nodes of the preset in one process, in synchronous rounds: both generate with the weights at the start of the round,
then both learn. In arm `swarm` a node learns from its own groups and from those of the other one with signal, in arm
`silo` from as many groups, all its own. No network, signatures or ages; generation, environments, recipe and learner
are those of a node. A line of the file: sampled success of a node on held-out problems of the environment that it
never asks.
"""

import argparse
import hashlib
import json
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from benchmarks._trained_policy import EVALUATION_SEED, draw_of, scored_group
from swarm.clock import SystemClock
from swarm.config import NodeConfig
from swarm.environments.curriculum import TaskMixture, evaluation_tasks
from swarm.environments.load import build_environments
from swarm.environments.replay import replay
from swarm.episode import Actions, EpisodeOutcome
from swarm.generation.produce import GroupProducer, try_tasks
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.interfaces import Environment
from swarm.learn.learner import PolicyLearner
from swarm.model.network import load_model
from swarm.objectives.methods import load_recipe
from swarm.simulate.presets import SimulationOptions, node_configs
from swarm.types import ScoredGroup

Arm = Literal["swarm", "silo"]


@dataclass(slots=True)
class _Node:
    """A learner, the engine that generates for it, and its share of the environments."""

    config: NodeConfig
    node_id: str
    learner: PolicyLearner
    generator: TransformersGenerator
    producer: GroupProducer
    num_asked: int = 0


class Rounds:
    """The nodes of one arm."""

    def __init__(self, arm: Arm, seed: int, overrides: Sequence[str], folder: Path, only: str = "") -> None:
        """`only`: name of a node that plays alone; empty: all."""
        options = SimulationOptions(preset="agents", seed=seed, overrides=tuple(overrides))
        configs = node_configs(options, folder)
        self.is_silo = arm == "silo"
        self.environments: dict[str, Environment] = build_environments(configs[0].environments)
        self.nodes = [self._node(config) for config in configs if only in ("", config.name)]

    def _node(self, config: NodeConfig) -> _Node:
        node_id = hashlib.sha256(f"episodes/{config.seed}".encode()).hexdigest()
        model, engine = load_model(config.model), load_model(config.model)
        learner = PolicyLearner(
            model.network,
            model.tokenizer,
            load_recipe(config.learner.recipe),
            config.learner,
            config.replay,
            node_id,
            config.dir,
        )
        generator = TransformersGenerator(engine.network, model.tokenizer, learner.version, seed=config.seed)
        mixture = TaskMixture(self.environments, config.generator.env_weights, config.seed)
        producer = GroupProducer(
            generator=generator,
            tokenizer=model.tokenizer,
            tasks=mixture.tasks,
            config=config.generator,
            run_id="benchmark",
            producer=node_id,
            clock=SystemClock(),
            step=self._step,
        )
        return _Node(config, node_id, learner, generator, producer)

    def _step(self, env: str, task_id: int, actions: Actions) -> "Future[EpisodeOutcome]":
        future: Future[EpisodeOutcome] = Future()
        future.set_result(replay(self.environments[env], task_id, actions))
        return future

    def play(self, number: int) -> None:
        """One round: every node generates, then every node learns."""
        made = [self._generate(node) for node in self.nodes]
        for node, own in zip(self.nodes, made, strict=True):
            others = [group for groups in made if groups is not own for group in groups if group.has_signal]
            external = [] if self.is_silo else [replace(group, is_made_here=False) for group in others]
            groups = [group for group in own if group.has_signal] + external
            if groups:
                num_without = len(own) - len(groups)
                node.learner.step(draw_of(number, groups, num_zero_variance=num_without))
                node.generator.load(*node.learner.snapshot())

    def _generate(self, node: _Node) -> list[ScoredGroup]:
        replayed = node.config.replay
        count = replayed.local_groups + (replayed.external_groups if self.is_silo else 0)
        scored: list[ScoredGroup] = []
        for group in node.producer.produce(node.num_asked, count):
            actions = [rollout.actions for rollout in group.rollouts]
            outcomes = tuple(replay(self.environments[group.env], group.task_id, each) for each in actions)
            label = f"{node.node_id}/{node.num_asked}/{len(scored)}"
            scored.append(scored_group(group, label, [outcome.reward for outcome in outcomes], outcomes))
        node.num_asked += count
        return scored

    def success(self, node: _Node, num_problems: int) -> dict[str, float]:
        """Sampled success on held-out problems of each environment that a node never asks."""
        found: dict[str, float] = {}
        for name, environment in self.environments.items():
            if name in node.config.generator.env_weights:
                continue
            tasks = evaluation_tasks(environment, "held_out", num_problems, EVALUATION_SEED)
            limits, num_tries = node.config.generator.episode_limits, node.config.evaluation.num_tries
            tokenizer = node.producer.tokenizer
            tries = try_tasks(node.generator, tokenizer, tasks, limits, self._step, num_tries=num_tries)
            rewards = [
                replay(environment, task.task_id, actions).reward >= 1.0
                for task, of_task in zip(tasks, tries, strict=True)
                for actions in of_task
            ]
            found[name] = float(np.mean(rewards))
        return found


def main() -> None:
    """Plays the rounds of one arm and seed; appends lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", choices=("swarm", "silo"), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--node", default="", help="arm silo: play this one alone, at half the cost")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--evaluate-every", type=int, default=4, help="rounds")
    parser.add_argument("--problems", type=int, default=16, help="held out")
    parser.add_argument("--set", action="append", default=[], help="any key of every node, as of swarm simulate")
    parser.add_argument("--file", type=Path, required=True, help="where lines of JSON are added")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rounds = Rounds(given.arm, given.seed, given.set, Path(folder), given.node)
        for number in range(given.rounds + 1):
            if number:
                rounds.play(number)
            if number % given.evaluate_every and number != given.rounds:
                continue
            for node in rounds.nodes:
                line = {
                    "arm": given.arm,
                    "seed": given.seed,
                    "round": number,
                    "node": node.config.name,
                    "success": rounds.success(node, given.problems),
                    "cpu_s": round(time.process_time()),
                }
                print(line, flush=True)
                with given.file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
