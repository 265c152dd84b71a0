"""One node, top to bottom, without a daemon: what `swarm-node start` does, in one file.

    python examples/one_node.py [STEPS] [FOLDER]      # 0.19M character model, about a second a step

1) ask the next tasks of the curriculum    2) answer each of them G times, with log-probs and policy version
3) score the answers in the sandbox, sign and store the groups, offer them to peers (here there are none)
4) journal a draw of the replay buffer     5) advantage, objective, one optimizer step
6) the new weights become a policy version: a lossless patch of the one before, in signed manifests
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import numpy as np

from swarm.clock import SystemClock
from swarm.config import (
    EnvironmentConfig,
    GeneratorConfig,
    LearnerConfig,
    ModelConfig,
    NodeConfig,
    ReplayConfig,
    WeightsConfig,
)
from swarm.environments.curriculum import TaskMixture, evaluation_tasks
from swarm.environments.load import build_environments
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.events import Event, StepMade
from swarm.exchange.agent import Agent
from swarm.exchange.group_store import SqliteGroupStore
from swarm.generation.produce import GroupProducer, evaluate
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.learn.learner import PolicyLearner
from swarm.learn.ranks import OneProcess
from swarm.model.compute_dtype import place
from swarm.model.device import pick_device
from swarm.model.network import load_model
from swarm.node_context import NodeContext
from swarm.objectives.methods import recipes_of
from swarm.process import load_or_create_identity
from swarm.weights.publish import Publisher
from swarm.weights.store import WeightStore
from swarm.weights.tensors import TorchWeights

TASK = "reverse"  # rev:abcd= -> dcba


def configure(folder: Path) -> NodeConfig:
    """The settings of a node.toml; everything left out has a default that runs on a laptop."""
    return NodeConfig(
        dir=folder,
        run_id="one-node",
        model=ModelConfig(source="tiny", dtype="float32"),
        environments=(EnvironmentConfig(name=TASK, kind="char", dataset=TASK, seed=1),),
        generator=GeneratorConfig(group_size=8, max_new_tokens=9),
        replay=ReplayConfig(local_groups=4, external_groups=0, max_age_steps=2),
        learner=LearnerConfig(recipe="sapo_swarm", learning_rate=1e-4),
        weights=WeightsConfig(publish=True),
    )


async def train(config: NodeConfig, num_steps: int) -> tuple[float, float]:
    """Greedy accuracy on held-out tasks before the first step and after the last one."""
    clock, identity = SystemClock(), load_or_create_identity(config.dir / "identity.key")
    environments = build_environments(config.environments)
    curriculum = TaskMixture(environments, config.generator.env_weights, config.seed)
    held_out = evaluation_tasks(environments[TASK], "held_out", 40, seed=0)

    # The policy in training, and the engine that generates with a copy of its weights.
    loaded = load_model(config.model)
    place(loaded.network, config.device, config.compute_dtype)  # on a GPU where torch sees one
    learner = PolicyLearner(
        loaded.network,
        loaded.tokenizer,
        recipes_of(config),
        config.learner,
        config.replay,
        policy_id=identity.node_id,
        dir=config.dir / "checkpoints",
        ranks=OneProcess(pick_device(config.device)),  # this process alone
    ).resume()
    engine = TransformersGenerator.from_config(config, loaded.tokenizer, learner.version)
    producer = GroupProducer(
        engine, loaded.tokenizer, curriculum.tasks, config.generator, config.run_id, identity.node_id, clock
    )

    # The agent: store before use, journal before a draw, and the verifier in a confined process.
    store = await SqliteGroupStore.open(config.dir / "groups.sqlite", clock, config.exchange.store_bytes)
    weights = WeightStore(config.dir / "weights", config.weights.store_bytes)
    verifier = SandboxVerifier(config.environments, config.sandbox)
    context = NodeContext(config=config, identity=identity, clock=clock, emit=show)
    agent = Agent(context, store=store, tokenizer=loaded.tokenizer, verifier=verifier, weights=weights)
    publisher = Publisher(weights.put_chunk)
    await agent.restore()

    async def generate() -> None:
        """1 to 3, as long as no group would become too old to use; always with the newest weights."""
        while await agent.local.wait_capacity() > 0:
            if engine.version != learner.version:
                await asyncio.to_thread(engine.load, *learner.snapshot())
            number = await agent.local.num_asked()
            for group in await asyncio.to_thread(producer.produce, number, config.replay.local_groups):
                await agent.local.put(group)

    async def learn() -> None:
        """4 to 6; waits only for groups to learn from."""
        for _ in range(num_steps):
            draw = await agent.local.draw(learner.version)
            await agent.local.report_step(await asyncio.to_thread(learner.step, draw))
            version, tensors = learner.snapshot()
            manifests = await asyncio.to_thread(publisher.publish, version, TorchWeights(tensors))
            await agent.local.publish(version, manifests)

    async def accuracy() -> float:
        await asyncio.to_thread(engine.load, *learner.snapshot())
        limits = config.generator.episode_limits
        episodes = await asyncio.to_thread(evaluate, engine, loaded.tokenizer, held_out, limits)
        verdicts = [
            await agent.local.verify(task.env, task.task_id, [actions])
            for task, actions in zip(held_out, episodes, strict=True)
        ]
        return float(np.mean([verdict.rewards[0] for verdict in verdicts]))

    try:
        before = await accuracy()
        async with asyncio.TaskGroup() as tasks:
            generating = tasks.create_task(generate())
            await learn()
            generating.cancel()
        await asyncio.to_thread(learner.save)
        return before, await accuracy()
    finally:
        await verifier.close()
        await store.close()


def show(event: Event) -> None:
    """Prints a step; a node writes every event to events.jsonl and counts it in /metrics."""
    if isinstance(event, StepMade):
        reward, age = event.diagnostics["reward_mean"], event.diagnostics["age_mean_steps"]
        print(f"step {event.step}: reward {reward:.2f}, age {age:.1f} steps, loss {event.loss:+.4f}")


async def main(num_steps: int, folder: Path) -> None:
    before, after = await train(configure(folder), num_steps)
    print(f"held out {TASK}: {before:.2f} -> {after:.2f} in {num_steps} steps; kept in {folder}")


if __name__ == "__main__":
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    asyncio.run(main(steps, Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp(prefix="one-node-"))))
