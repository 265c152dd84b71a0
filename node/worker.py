"""The worker of a node: model, generator and learner, driven through a `LocalExchange`.

Invariant: nothing here touches the network; the agent is the only one the worker talks to. It runs
in a process of its own (`python -m node.worker`) or inside the agent's (`worker = "inline"`).
"""

import argparse
import asyncio
import ctypes
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.clock import Clock, SystemClock
from swarm.config import EvaluationConfig, NodeConfig, load_config
from swarm.errors import ConfigError
from swarm.identity import Identity
from swarm.interfaces import LocalExchange, TaskOf, TextCodec
from swarm.loops import Ask, Greedy, Produce, Worker, run_worker
from swarm.types import Draw, NodeId, PolicyVersion, Role, RolloutGroup, Sampling, Task

if TYPE_CHECKING:
    from swarm.learn.guarded import GuardedLearner
    from swarm.learn.kinds import RecipesByKind
    from swarm.learn.recipe import Recipe
    from swarm.rollout.transformers_engine import TransformersGenerator
    from swarm.tasks.base import NumberedEnvironment

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1  # linux/prctl.h
EXIT_CONFIG = 2  # the configuration cannot work: starting again would not help; the message is on stdout


@dataclass(frozen=True, kw_only=True, slots=True)
class _Engines:
    """What holds weights: the policy in training, and two views of it that generate."""

    codec: TextCodec
    learner: "GuardedLearner | None"
    generator: "TransformersGenerator"  # has a network of its own, so that it can run while the learner steps
    evaluator: "TransformersGenerator"  # on the learner's network: always the newest weights


@dataclass(frozen=True, kw_only=True, slots=True)
class _Questions:
    """The training sequence, and what answers it."""

    tasks: Callable[[int, int], list[Task]]  # by first number and count
    answer: Callable[[Sequence[Task], int, Sequence[int]], list[RolloutGroup]]  # tasks, responses, numbers
    produce: Produce


def build_worker(config: NodeConfig, node_id: NodeId, exchange: LocalExchange) -> Worker:
    """Loads the model, resumes the learner from its newest checkpoint, prepares tasks (blocking, slow).

    Raises:
        ConfigError: the model or an environment cannot be had, or the recipe needs what the run does not supply;
            the message names the key and the fix.
    """
    import torch

    from swarm.learn.part import Need
    from swarm.recipes import recipes_of
    from swarm.rollout.produce import evaluate
    from swarm.tasks.build import build_environments

    torch.set_num_threads(config.num_threads)
    recipes = recipes_of(config)
    environments = build_environments(config.environments)

    def task_of(env: str, task_id: int) -> Task:
        return environments[env].task(task_id)

    engines = _load_engines(config, node_id, recipes, task_of)
    clock = SystemClock()
    questions = _questions(config, node_id, engines, environments, clock, recipes.main.prompts is not None)
    return Worker(
        config=config,
        exchange=exchange,
        generator=engines.generator,
        produce=questions.produce,
        ask=_chooser(config, recipes.main, questions, exchange),
        greedy=_greedy(config, engines, task_of) if Need.BASELINE_ROLLOUT in recipes.needs else None,
        evaluate=lambda tasks: evaluate(engines.evaluator, engines.codec, tasks, config.generator.max_new_tokens),
        learner=engines.learner,
        codec=engines.codec,
        evaluation_tasks=_evaluation_tasks(config.evaluation, environments),
        clock=clock,
        offload=asyncio.to_thread,
    )


def _load_engines(config: NodeConfig, node_id: NodeId, recipes: "RecipesByKind", task_of: TaskOf) -> _Engines:
    from swarm.learn.guarded import GuardedLearner
    from swarm.learn.learner import PolicyLearner
    from swarm.model import load_model
    from swarm.recipes import load_recipe
    from swarm.rollout.transformers_engine import TransformersGenerator

    loaded = load_model(config.model)
    codec, learner = loaded.codec, None
    version = PolicyVersion(policy_id=node_id, step=0)
    if Role.TRAINER in config.roles:
        policy = PolicyLearner.open(
            network=loaded.network,
            codec=codec,
            recipe=recipes,
            config=config.learner,
            replay=config.replay,
            policy_id=node_id,
            dir=config.dir / "checkpoints",
            task_of=task_of,
        )
        safe = load_recipe(config.guard.safe_recipe)
        learner = GuardedLearner(policy, safe, config.guard, config.replay.max_age_steps)
        version = learner.version
    engine_network = loaded.network if learner is None else load_model(config.model).network
    generator = TransformersGenerator(network=engine_network, codec=codec, version=version, seed=config.seed)
    if learner is not None:
        generator.load(*learner.snapshot())
    evaluator = TransformersGenerator(network=loaded.network, codec=codec, version=version, seed=config.seed)
    return _Engines(codec=codec, learner=learner, generator=generator, evaluator=evaluator)


def _questions(
    config: NodeConfig,
    node_id: NodeId,
    engines: _Engines,
    environments: Mapping[str, "NumberedEnvironment"],
    clock: Clock,
    is_chosen: bool,
) -> _Questions:
    """The training sequence; no question comes again while a group about it may still wait."""
    from swarm.rollout.chosen import NUM_CANDIDATES
    from swarm.rollout.produce import produce
    from swarm.tasks.mixture import SPACING, TaskMixture

    sampling = Sampling(temperature=config.generator.temperature, max_new_tokens=config.generator.max_new_tokens)
    num_waiting = (config.replay.max_age_steps + 1) * config.replay.local_groups * (NUM_CANDIDATES if is_chosen else 1)
    mixture = TaskMixture(environments, config.generator.asks, config.seed, spacing=max(SPACING, num_waiting))

    def answer(tasks: Sequence[Task], size: int, numbers: Sequence[int]) -> list[RolloutGroup]:
        return produce(
            engines.generator,
            engines.codec,
            tasks,
            size,
            sampling,
            run_id=config.run_id,
            producer=node_id,
            clock=clock,
            numbers=numbers,
            byte_lengths=config.generator.byte_lengths,
        )

    def produce_groups(first: int, count: int) -> list[RolloutGroup]:
        return answer(mixture.tasks(first, count), config.generator.group_size, range(first, first + count))

    return _Questions(tasks=mixture.tasks, answer=answer, produce=produce_groups)


def _chooser(config: NodeConfig, recipe: "Recipe", questions: _Questions, exchange: LocalExchange) -> Ask | None:
    """Asks what the recipe chooses among the training sequence; None where it takes it as it comes."""
    from swarm.rollout.chosen import ChosenQuestions

    if recipe.prompts is None:
        return None

    async def score(env: str, task_id: int, answers: Sequence[str]) -> Sequence[float]:
        return (await exchange.score(env, task_id, answers)).rewards.tolist()

    return ChosenQuestions(
        chooser=recipe.prompts,
        candidates=questions.tasks,
        answer=questions.answer,
        score=score,
        offload=asyncio.to_thread,
        path=config.dir / "questions.json",
        seed=config.seed,
        group_size=config.generator.group_size,
        largest=max(config.generator.group_size, config.generator.largest_group),
    ).ask


def _greedy(config: NodeConfig, engines: _Engines, task_of: TaskOf) -> Greedy:
    """Answers of the learner's own weights, which nothing else uses meanwhile."""
    from swarm.learn.batch import own_prompt_ids

    def answers(draw: Draw) -> list[str]:
        prompts = [own_prompt_ids(drawn.scored, engines.codec, task_of) for drawn in draw.groups]
        return engines.evaluator.greedy(prompts, config.generator.max_new_tokens)

    return answers


def _evaluation_tasks(
    config: EvaluationConfig, environments: Mapping[str, "NumberedEnvironment"]
) -> dict[tuple[str, str], Sequence[Task]]:
    """(environment, split) -> problems, the same on every node."""
    from swarm.tasks.mixture import evaluation_tasks

    return {
        (name, split): evaluation_tasks(environments[name], split, config.num_problems, seed=0)
        for name in config.environments or tuple(environments)
        for split in ("held_out", "all")
    }


async def work(config: NodeConfig, socket: Path) -> None:
    """Connects to the agent and works until done or terminated."""
    from swarm.exchange.local_grpc import LocalClient

    task = asyncio.current_task()
    assert task is not None
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    client = LocalClient(socket)
    try:
        node_id = Identity.load(config.dir / "identity.key").node_id
        worker = await asyncio.to_thread(build_worker, config, node_id, client)
        await run_worker(worker)
    except asyncio.CancelledError:
        logger.info("worker stopped")
    finally:
        await client.close()


def die_with(parent: int) -> None:
    """Has the kernel end this process when its parent ends, however that happens (Linux).

    Elsewhere a worker ends at its next call to the agent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before this was in force
        sys.exit(f"the agent (process {parent}) is gone")


def main() -> None:
    """Entry point of the worker process; started by the agent, not by people."""
    from swarm.telemetry import setup_logging

    parser = argparse.ArgumentParser(description="The training and generating process of a node.")
    parser.add_argument("--config", type=Path, required=True, help="resolved node configuration (TOML)")
    parser.add_argument("--socket", type=Path, required=True, help="Unix socket of the agent")
    parser.add_argument("--parent", type=int, required=True, help="process id of the agent")
    arguments = parser.parse_args()
    die_with(arguments.parent)
    config = load_config(NodeConfig, arguments.config)
    setup_logging(config.telemetry.log_level, config.telemetry.log_format, config.name)
    try:
        asyncio.run(work(config, arguments.socket))
    except (ConfigError, BaseExceptionGroup) as error:
        cause = only_cause(error)
        if not isinstance(cause, ConfigError):
            raise
        print(cause)
        sys.exit(EXIT_CONFIG)


def only_cause(error: BaseException) -> BaseException:
    """The one error inside nested groups; the group itself where there are several."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


if __name__ == "__main__":
    sys.exit(main())
