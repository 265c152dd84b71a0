"""Builds the worker of a node from its configuration: questions, engines, evaluation, tied together.

Invariant: nothing here runs a loop or talks to anyone; what cannot work is said before the first step.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from node.engines import Engines, load_engines
from swarm.clock import Clock, SystemClock
from swarm.config import EvaluationConfig, NodeConfig
from swarm.interfaces import LocalExchange, TaskOf
from swarm.loops import Ask, Greedy, Produce, Worker
from swarm.types import Draw, NodeId, RolloutGroup, Sampling, Task

if TYPE_CHECKING:
    from swarm.environments.environment import NumberedEnvironment
    from swarm.objectives.recipe import Recipe

EvaluationTasks = dict[tuple[str, str], Sequence[Task]]  # (environment, split) -> problems


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

    from swarm.environments.load import build_environments
    from swarm.generation.produce import evaluate
    from swarm.objectives.methods import recipes_of
    from swarm.objectives.part import Requirement

    torch.set_num_threads(config.num_threads)
    recipes = recipes_of(config)
    environments = build_environments(config.environments)

    def task_of(env: str, task_id: int) -> Task:
        return environments[env].task(task_id)

    tasks = _evaluation_tasks(config.evaluation, environments)
    engines = load_engines(config, node_id, recipes, task_of, _spread(tasks))
    clock = SystemClock()
    questions = _questions(config, node_id, engines, environments, clock, recipes.main.prompts is not None)
    return Worker(
        config=config,
        exchange=exchange,
        generator=engines.generator,
        produce=questions.produce,
        ask=_chooser(config, recipes.main, questions, exchange),
        greedy=_greedy(config, engines, task_of) if Requirement.BASELINE_ROLLOUT in recipes.needs else None,
        evaluate=lambda tasks: evaluate(
            engines.evaluator or engines.generator, engines.codec, tasks, config.generator.max_new_tokens
        ),
        learner=engines.learner,
        codec=engines.codec,
        evaluation_tasks=tasks,
        encode=engines.encode,
        applier=engines.applier,
        close=engines.close,
        clock=clock,
        offload=asyncio.to_thread,
    )


def _questions(
    config: NodeConfig,
    node_id: NodeId,
    engines: Engines,
    environments: Mapping[str, "NumberedEnvironment"],
    clock: Clock,
    is_chosen: bool,
) -> _Questions:
    """The training sequence; no question comes again while a group about it may still wait."""
    from swarm.environments.curriculum import SPACING, TaskMixture
    from swarm.environments.prompt_choice import NUM_CANDIDATES
    from swarm.generation.produce import produce

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
    from swarm.environments.prompt_choice import AdaptiveCurriculum

    if recipe.prompts is None:
        return None

    async def score(env: str, task_id: int, answers: Sequence[str]) -> Sequence[float]:
        return (await exchange.score(env, task_id, answers)).rewards.tolist()

    return AdaptiveCurriculum(
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


def _greedy(config: NodeConfig, engines: Engines, task_of: TaskOf) -> Greedy:
    """Answers of the learner's own weights, which nothing else uses meanwhile."""
    from swarm.objectives.batch import own_prompt_ids

    evaluator = engines.evaluator
    assert evaluator is not None, "only a learner draws"

    def answers(draw: Draw) -> list[str]:
        prompts = [own_prompt_ids(drawn.scored, engines.codec, task_of) for drawn in draw.groups]
        return evaluator.greedy(prompts, config.generator.max_new_tokens)

    return answers


def _evaluation_tasks(config: EvaluationConfig, environments: Mapping[str, "NumberedEnvironment"]) -> EvaluationTasks:
    """(environment, split) -> problems, the same on every node."""
    from swarm.environments.curriculum import evaluation_tasks

    return {
        (name, split): evaluation_tasks(environments[name], split, config.num_problems, seed=0)
        for name in config.environments or tuple(environments)
        for split in ("held_out", "all")
    }


def _spread(tasks: EvaluationTasks) -> list[Task]:
    """Problems of all environments in turn."""
    return [task for each in zip(*tasks.values(), strict=False) for task in each]
