"""Builds the worker of a node from its configuration: model, policy, engine, questions, evaluation, published versions.

Invariant: nothing here runs a loop or talks to a peer, and a configuration that cannot work raises before the first
step. A node either trains a policy (`build_trainer`) or follows one (`build_generator`); a trainer's engine has its own
copy of the weights, so that it can generate while the learner steps.

This module imports torch: it is imported only where a worker is built.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

import torch
from torch import nn

from node.ranks import join, note_choice, open_policy
from node.run_estimate import CHECKPOINT_BYTES
from swarm.activity import LOADING, MEASURING, PREPARING, STARTING_ENGINE, OnProgress, ignore_progress
from swarm.clock import Clock, SystemClock
from swarm.config import SAFE_RECIPE, NodeConfig
from swarm.environments.curriculum import NUM_CANDIDATES, SPACING, AdaptiveCurriculum, TaskMixture, evaluation_tasks
from swarm.environments.given_answers import GivenAnswers
from swarm.environments.load import build_environments
from swarm.episode import Actions, EpisodeOutcome
from swarm.errors import ConfigError
from swarm.generation.episode_player import Step
from swarm.generation.produce import GroupProducer, try_tasks
from swarm.generation.transformers_engine import SnapshotEvaluator, TransformersGenerator
from swarm.interfaces import Environment, Generator, LocalExchange, TaskOf, Tokenizer
from swarm.learn.best_version import BEST, BestVersion
from swarm.learn.checkpoint import checkpoint_pause_s
from swarm.learn.guarded_learner import GuardedLearner
from swarm.learn.learner import PolicyLearner
from swarm.loops import Ask, Worker
from swarm.loops.warm_up import NUM_TRIED
from swarm.loops.worker import Evaluate, WarmUp
from swarm.model.compute_dtype import choose, place, products_of
from swarm.model.device import pick_device
from swarm.model.network import LoadedModel, load_model
from swarm.model.tokenizer import check_turns
from swarm.model.version_digest import PublishedTensors, published_state, snapshot, weights_digest
from swarm.objectives.draw_batch import own_prompt_ids
from swarm.objectives.fallbacks import RecipeSet
from swarm.objectives.methods import load_recipe, recipes_of
from swarm.objectives.part import Requirement
from swarm.serving.served_policy import needs_packages, read_or_make_key, serve
from swarm.telemetry.shown_episodes import write_episodes
from swarm.types import SPLITS, Draw, NodeId, PolicyVersion, Role, Task
from swarm.weights.apply import Applier, VerifiedVersion
from swarm.weights.publish import Publisher, keep_anchor, least_store_bytes
from swarm.weights.store import WeightStore
from swarm.weights.tensors import TorchWeights, specs_of

if TYPE_CHECKING:
    from swarm.serving.agent_runs import AgentRuns

EVALUATING: Final = "evaluating"
BASE_MODEL: Final = "base model"  # policy id of what an engine starts with, until a manifest names the one it follows
NUM_CANARIES: Final = 4  # prompts whose log-probs go into each manifest
ServeRuns = Callable[[], Coroutine[Any, Any, None]]  # until cancelled
Tasks = Callable[[int, int], list[Task]]  # of the training sequence, by first number and count
EvaluationTasks = Mapping[tuple[str, str], Sequence[Task]]  # (environment, split) -> problems


class Engine(Generator, Protocol):
    """A generator that holds resources (a process, connections) until it is closed."""

    def close(self) -> None:
        """Releases the resources (blocking)."""
        ...


def build_worker(
    config: NodeConfig,
    node_id: NodeId,
    exchange: LocalExchange,
    clock: Clock | None = None,
    loop: asyncio.AbstractEventLoop | None = None,
    on_progress: OnProgress = ignore_progress,
) -> Worker:
    """The worker for this node's roles: loads the model and resumes the newest checkpoint (blocking, slow).

    Args:
        config: configuration of the node.
        node_id: our id, which also names the policy that we train.
        exchange: the worker's side of the agent.
        clock: clock of the groups and the loops; None: the machine's.
        loop: event loop that `exchange` runs in; None: no environment of several turns can be played.
        on_progress: takes the worker's signs of life, also during this call.

    Raises:
        ConfigError: the model, the engine or an environment cannot be had, or the recipe needs something that the run
            does not supply; the message names the key and the fix.
    """
    torch.set_num_threads(config.num_threads)
    build = build_trainer if Role.TRAINER in config.roles else build_generator
    step = None if loop is None else partial(_step, exchange, loop)
    return build(config, node_id, exchange, clock or SystemClock(), step, on_progress)


def build_trainer(
    config: NodeConfig,
    node_id: NodeId,
    exchange: LocalExchange,
    clock: Clock,
    step: Step | None,
    on_progress: OnProgress = ignore_progress,
) -> Worker:
    """A worker that trains its own policy, and generates for it if the node has that role. Raises as `build_worker`."""
    recipes = recipes_of(config)
    environments = build_environments(config.environments)
    task_of = partial(rebuild_task, environments)
    evaluations = make_evaluation_tasks(config, environments)
    on_progress(LOADING)
    loaded = load_model(config.model)
    tokenizer = loaded.tokenizer
    check_turns(tokenizer, environments.values())
    if config.weights.publish:
        require_store_room(config, loaded)
    num_trained = sum(param.numel() for param in loaded.network.parameters() if param.requires_grad)
    closing = ExitStack()

    # The policy in training; with `learner.num_processes` > 1 it is spread over several processes (ranks).
    ranks = join(config)
    on_progress(PREPARING)
    policy = open_policy(config, node_id, loaded, recipes, environments, ranks, on_progress)
    learner = GuardedLearner(
        policy,
        load_recipe(SAFE_RECIPE),
        config.guard,
        config.replay.max_age_steps,
        generates=Role.GENERATOR in config.roles and config.replay.local_groups > 0,
    )
    evaluator: TransformersGenerator  # always answers with the learner's newest weights
    if ranks is None:
        start = PolicyVersion(policy_id=node_id, step=0)  # of the seeds of its tries: the same after a restart
        evaluator = TransformersGenerator(
            loaded.network,
            tokenizer,
            start,
            config.seed,
            is_deterministic=config.learner.deterministic,
            activity=EVALUATING,
            on_progress=on_progress,
        )
    else:
        network = load_model(config.model).network
        place(network, ranks.device, policy.compute_dtype)
        evaluator = SnapshotEvaluator(network, tokenizer, policy.snapshot, config.seed, EVALUATING, on_progress)
        closing.callback(ranks.stop)
        closing.callback(policy.stop)
    closing.callback(evaluator.close)

    engine: Generator = evaluator
    serve_runs: ServeRuns | None = None
    if Role.GENERATOR in config.roles:
        on_progress(STARTING_ENGINE)
        started = load_engine(config, tokenizer, learner.version, policy.compute_dtype, on_progress=on_progress)
        closing.callback(started.close)
        started.load(*learner.snapshot())
        engine = started
        stop, serve_runs = serve_policy(config, started, loaded, node_id, exchange, clock)
        closing.callback(stop)

    publish = None
    if config.weights.publish:
        canaries = [task for tasks in zip(*evaluations.values(), strict=False) for task in tasks]
        publisher = Publisher(
            open_weight_store(config).put_chunk,
            [tokenizer.encode_prompt(task) for task in canaries[:NUM_CANARIES]],
            evaluator.score,
        )
        publish = partial(publish_version, publisher)
    greedy = None
    if Requirement.BASELINE_ROLLOUT in recipes.needs:
        greedy = partial(answer_greedily, evaluator, tokenizer, task_of, config.generator.max_new_tokens)
    producer = make_producer(config, node_id, engine, tokenizer, environments, recipes, clock, step)
    return Worker(
        config=config,
        exchange=exchange,
        generator=engine,
        produce=producer.produce,
        ask=make_curriculum(config, recipes, producer, exchange),
        greedy=greedy,
        evaluate=make_evaluate(config, evaluator, tokenizer, step),
        learner=learner,
        tokenizer=tokenizer,
        evaluation_tasks=dict(evaluations),
        on_progress=on_progress,
        encode=publish,
        warm_up=make_warm_up(config, policy, evaluator, environments, evaluations, producer),
        show=partial(write_episodes, config.dir),
        serve_runs=serve_runs,
        keep_best=BestVersion(config.dir / BEST).offer if config.evaluation.keep_best else None,
        saves_when_stopped=True,
        checkpoint_pause_s=checkpoint_pause_s(CHECKPOINT_BYTES * num_trained),
        close=closing.close,
        clock=clock,
        offload=asyncio.to_thread,
    )


def build_generator(
    config: NodeConfig,
    node_id: NodeId,
    exchange: LocalExchange,
    clock: Clock,
    step: Step | None,
    on_progress: OnProgress = ignore_progress,
) -> Worker:
    """A worker that generates with another node's versions, which the agent fetches. Raises as `build_worker`."""
    recipes = recipes_of(config)
    environments = build_environments(config.environments)
    evaluations = make_evaluation_tasks(config, environments)
    on_progress(LOADING)
    loaded = load_model(config.model)
    check_turns(loaded.tokenizer, environments.values())
    weights = snapshot(loaded.network)
    base = PolicyVersion(policy_id=BASE_MODEL, step=0, digest=weights_digest(weights))
    measured = ""
    if config.engine.kind != "openai":  # whose server computes elsewhere
        on_progress(MEASURING)
        device, products = pick_device(config.device), products_of(loaded.network)
        choice = choose(config.compute_dtype, config.model.dtype, device, products)
        note_choice(config, choice)
        measured = choice.dtype
    closing = ExitStack()
    on_progress(STARTING_ENGINE)
    engine = load_engine(config, loaded.tokenizer, base, measured, loaded.network, on_progress)
    closing.callback(engine.close)
    closing.callback(serve_policy(config, engine, loaded, node_id, exchange, clock)[0])
    store = open_weight_store(config)
    applier = Applier(
        engine,
        VerifiedVersion(version=base, weights=TorchWeights(weights)),
        store.chunk,
        keep=partial(keep_anchor, store),
        in_flight=config.follow.mode == "push" and config.follow.in_flight,
    )
    producer = make_producer(config, node_id, engine, loaded.tokenizer, environments, recipes, clock, step)
    return Worker(
        config=config,
        exchange=exchange,
        generator=engine,
        produce=producer.produce,
        ask=make_curriculum(config, recipes, producer, exchange),
        evaluate=make_evaluate(config, engine, loaded.tokenizer, step),
        learner=None,
        tokenizer=loaded.tokenizer,
        evaluation_tasks=dict(evaluations),
        on_progress=on_progress,
        applier=applier,
        close=closing.close,
        clock=clock,
        offload=asyncio.to_thread,
    )


# --- parts of both ------------------------------------------------------------------------------


def load_engine(
    config: NodeConfig,
    tokenizer: Tokenizer,
    version: PolicyVersion,
    measured: str,
    network: nn.Module | None = None,
    on_progress: OnProgress = ignore_progress,
) -> Engine:
    """The engine that `engine.kind` names, with the run's base model (blocking, slow).

    Args:
        config: configuration of the node.
        tokenizer: the model's tokenizer.
        version: the version that the base model is.
        measured: compute dtype of the node's own passes; vLLM uses it if it computes on the CPU, too.
        network: the base model, which a transformers engine may keep; None: the engine loads another copy.
        on_progress: takes the engine's signs of life.
    """
    # Imported here: each needs what a node with another engine may not have.
    if config.engine.kind == "vllm":
        from swarm.generation.vllm_engine import VllmGenerator

        return VllmGenerator.from_config(config, tokenizer, version, measured, on_progress)
    if config.engine.kind == "openai":
        from swarm.generation.openai_engine import OpenAIGenerator

        return OpenAIGenerator.from_config(config, tokenizer, version, on_progress)
    config = config.model_copy(update={"compute_dtype": measured})
    return TransformersGenerator.from_config(config, tokenizer, version, network, on_progress)


def serve_policy(
    config: NodeConfig, engine: Engine, loaded: LoadedModel, node_id: NodeId, exchange: LocalExchange, clock: Clock
) -> tuple[Callable[[], None], ServeRuns | None]:
    """Serves the engine's policy if `serve.listen` is set.

    Returns:
        A function that stops serving, and the loop that hands over runs of agents, if a key is learned from.

    Raises:
        ConfigError: the server cannot listen on the address, or a package that it needs is not installed.
    """
    if not config.serve.listen:
        return lambda: None, None
    assert isinstance(engine, TransformersGenerator), "the configuration was checked"
    made = open_runs(config, engine, loaded.tokenizer, node_id, clock) if config.learns_from_agents else None
    server, _ = serve(
        engine,
        loaded.tokenizer,
        name=config.name or "policy",
        source=config.model.source,
        context_tokens=loaded.context_tokens,
        listen=config.serve.listen,
        key=read_or_make_key(config.dir),
        keys=[(read_or_make_key(config.dir, key.name), key.name, key.learn) for key in config.serve.keys],
        runs=None if made is None else made[0],
    )
    if made is None:
        return server.stop, None
    runs, close = made

    def stop() -> None:
        server.stop()
        close()

    return stop, partial(runs.hand_over_loop, exchange.put, exchange.report_evaluations)


def open_runs(
    config: NodeConfig, engine: Engine, tokenizer: Tokenizer, node_id: NodeId, clock: Clock
) -> "tuple[AgentRuns, Callable[[], None]]":
    """The runs of agents in the node's directory, and a function that closes their file. Raises ConfigError."""
    with needs_packages():
        from swarm.serving.agent_runs import SINGLE_RUN_RECIPE, AgentRuns, RunRules
        from swarm.serving.run_store import RunStore

    recipe, generator = config.learner.recipe, config.generator
    rules = RunRules(
        run_id=config.run_id,
        node_id=node_id,
        group_size=generator.group_size,
        group_s=config.serve.group_s,
        temperature=generator.temperature,
        max_new_tokens=generator.max_new_tokens,
        max_episode_tokens=generator.max_episode_tokens,
        max_age_steps=config.replay.max_age_steps,
        takes_single_runs=config.replay.keep_zero_variance and (recipe == SINGLE_RUN_RECIPE or ":" in recipe),
    )
    store = RunStore(config.dir / "agent_runs.sqlite", clock.now_s())
    runs = AgentRuns(store, rules, tokenizer, lambda: engine.version, engine.compute_dtype, clock)
    return runs, store.close


def make_producer(
    config: NodeConfig,
    node_id: NodeId,
    engine: Generator,
    tokenizer: Tokenizer,
    environments: Mapping[str, Environment],
    recipes: RecipeSet,
    clock: Clock,
    step: Step | None = None,
) -> GroupProducer:
    """Producer of groups: the endless sequence of training tasks, and the engine that answers them.

    No task comes again while a group about it may wait for a draw: the spacing is at least the groups that may wait.
    """
    num_waiting = (config.replay.max_age_steps + 1) * config.replay.local_groups
    if recipes.main.prompts is not None:
        num_waiting *= NUM_CANDIDATES
    tasks: Tasks = no_tasks  # of a node that learns from runs of agents alone
    if environments or not config.learns_from_agents:
        spacing = max(SPACING, num_waiting)
        tasks = TaskMixture(environments, config.generator.env_weights, config.seed, spacing=spacing).tasks
    return GroupProducer(engine, tokenizer, tasks, config.generator, config.run_id, node_id, clock, step)


def no_tasks(first: int, count: int) -> list[Task]:
    """The training tasks of a node without environments."""
    return []


def make_curriculum(
    config: NodeConfig, recipes: RecipeSet, producer: GroupProducer, exchange: LocalExchange
) -> Ask | None:
    """Adaptive choice among the training tasks if the recipe asks for it, else None."""
    if recipes.main.prompts is None:
        return None
    return AdaptiveCurriculum(
        chooser=recipes.main.prompts,
        candidates=producer.tasks,
        answer=producer.answer,
        verify=exchange.verify,
        offload=asyncio.to_thread,
        path=config.dir / "questions.json",
        seed=config.seed,
        group_size=config.generator.group_size,
        largest=max(config.generator.group_size, config.generator.largest_group),
    ).ask


def make_evaluation_tasks(config: NodeConfig, environments: Mapping[str, Environment]) -> EvaluationTasks:
    """Problems of each environment and split, the same on every node."""
    return {
        (name, split): evaluation_tasks(environments[name], split, config.evaluation.num_problems, seed=0)
        for name in config.evaluation.environments or tuple(environments)
        for split in SPLITS
    }


def make_warm_up(
    config: NodeConfig,
    policy: PolicyLearner,
    evaluator: TransformersGenerator,
    environments: Mapping[str, Environment],
    evaluations: EvaluationTasks,
    producer: GroupProducer,
) -> WarmUp | None:
    """Parts of the supervised warm-up; None without `warm_up.answers`. Raises ConfigError."""
    if not config.warm_up.answers:
        return None
    tokenizer, generator = producer.tokenizer, config.generator
    given = GivenAnswers(
        config,
        environments,
        held_out=[task for (_, split), tasks in evaluations.items() if split == "held_out" for task in tasks],
        tokenizer=tokenizer,
    )
    return WarmUp(
        pairs=given.pairs,
        are_scored=given.are_tasks,
        tasks=producer.tasks(0, NUM_TRIED),
        tries=partial(
            try_tasks,
            evaluator,
            tokenizer,
            limits=generator.episode_limits,
            step=producer.step,
            num_tries=generator.group_size,
            temperature=generator.temperature,
        ),
        imitate=policy.imitate,
        begin_anew=policy.begin_anew,
        notes=policy.notes,
    )


def make_evaluate(config: NodeConfig, engine: Generator, tokenizer: Tokenizer, step: Step | None) -> Evaluate:
    """Function that tries problems with the settings of `evaluation`."""
    return partial(
        try_tasks,
        engine,
        tokenizer,
        limits=config.generator.episode_limits,
        step=step,
        num_tries=config.evaluation.num_tries,
        temperature=config.generator.temperature,
    )


def rebuild_task(environments: Mapping[str, Environment], env: str, task_id: int) -> Task:
    """The task of an environment with this number. Raises LookupError for an unknown environment or number."""
    return environments[env].task(task_id)


def _step(
    exchange: LocalExchange, loop: asyncio.AbstractEventLoop, env: str, task_id: int, actions: Actions
) -> "Future[EpisodeOutcome]":
    """An `episode_player.Step` for the engine's thread: the agent plays the environment."""
    return asyncio.run_coroutine_threadsafe(exchange.step(env, task_id, actions), loop)


def answer_greedily(
    evaluator: TransformersGenerator, tokenizer: Tokenizer, task_of: TaskOf, max_new_tokens: int, draw: Draw
) -> list[Actions]:
    """A greedy answer to the prompt of each drawn group (blocking), for recipes that compare with one."""
    prompts = [own_prompt_ids(drawn.scored, tokenizer, task_of) for drawn in draw.groups]
    return evaluator.greedy(prompts, max_new_tokens)


def publish_version(publisher: Publisher, version: PolicyVersion, weights: object) -> list[bytes]:
    """Manifest bodies of a version, after its chunks were put into the weight store (blocking). Raises StorageFull."""
    return publisher.publish(version, TorchWeights(cast("PublishedTensors", weights)))


def require_store_room(config: NodeConfig, loaded: LoadedModel) -> None:
    """Raises ConfigError if the disk budget has no room for a version in full and a patch."""
    least = least_store_bytes(specs_of(TorchWeights(published_state(loaded.network))))
    if config.weights.store_bytes < least:
        raise ConfigError(
            f"weights.store_bytes: {config.weights.store_bytes} has no room for a version in full and a patch; "
            f"for this model set at least {least}"
        )


def open_weight_store(config: NodeConfig) -> WeightStore:
    """The weight store that the agent serves from and fetches into."""
    return WeightStore(config.dir / "weights", config.weights.store_bytes)
