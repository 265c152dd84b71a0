"""The hostile nodes of `benchmarks/_hostile_world.py`: what their workers and their clients do.

Invariant: nothing here reads what only honest nodes know.
"""

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

from node.build import build_worker, make_producer
from swarm.clock import Clock
from swarm.config import NodeConfig
from swarm.environments.curriculum import TaskMixture
from swarm.environments.environment import AnswerEnvironment
from swarm.exchange.agent import Agent
from swarm.exchange.checks import admission_checks
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.interfaces import Result
from swarm.loops import Worker
from swarm.model.network import load_model
from swarm.model.version_digest import PublishedTensors, snapshot
from swarm.objectives import coefficients
from swarm.objectives.methods import recipes_of
from swarm.simulate.virtual.adversaries import Adversary
from swarm.simulate.virtual.author import Author
from swarm.simulate.virtual.coordinator import CoreClient, VirtualCoordinator
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.simulate.virtual.node import NUM_HEARD, Checkpoints, ScriptedLearner
from swarm.types import Advice, EdgeReport, LoadReport, NodeId, NodeReport, PolicyVersion, Role, RolloutGroup


@contextmanager
def undefended() -> Generator[None]:
    """Takes out what stands between a free key and the weights: the rival of the benchmark, which has to lose."""
    with ExitStack() as patches:
        for check in ("_check_length", "_check_tokens", "_check_text", "check_cut"):
            patches.enter_context(patch.object(admission_checks, check, lambda *_: None))
        patches.enter_context(patch.object(coefficients, "clip_factors", lambda *_: None))
        yield


class LyingClient(CoreClient):
    """Reports that every honest source is late and useless."""

    def __init__(self, coordinator: VirtualCoordinator, node_id: NodeId, victims: Sequence[NodeId]) -> None:
        super().__init__(coordinator, node_id)
        self._victims = victims

    async def heartbeat(self, report: NodeReport) -> Advice:
        lies = tuple(
            EdgeReport(
                source=victim, num_groups=100, age_mean_steps=64.0, ess_share=0.0, mismatch_kl=10.0, reward_mean=0.0
            )
            for victim in self._victims
        )
        return await super().heartbeat(replace(report, edges=lies))


class StillEngine(TransformersGenerator):
    """An engine whose weights stay as they are while its versions go on."""

    weights: PublishedTensors

    def load(self, version: PolicyVersion, weights: object, **_: object) -> LoadReport:  # type: ignore[override]
        return super().load(version, self.weights)


def hostile_worker(
    config: NodeConfig,
    agent: Agent,
    store: MemoryGroupStore,
    *,
    attacks: Sequence[str],
    environments: Mapping[str, AnswerEnvironment],
    clock: Clock,
    has_turned: Callable[[], bool],
) -> Worker:
    """An ordinary generator, or a trainer that learns nothing, whose groups are the attacks' once it has turned."""
    node_id = agent.node_id
    if Role.TRAINER in config.roles:
        loaded = load_model(config.model)
        learner = ScriptedLearner(node_id, Checkpoints(), lambda draw: b"")
        engine = StillEngine(loaded.network, loaded.tokenizer, learner.version, seed=config.seed, max_rows=512)
        engine.weights = snapshot(loaded.network)
        producer = make_producer(config, node_id, engine, loaded.tokenizer, environments, recipes_of(config), clock)
        worker = Worker(
            config=config,
            exchange=agent.local,
            generator=engine,
            produce=producer.produce,
            evaluate=lambda tasks: [],
            learner=learner,
            tokenizer=loaded.tokenizer,
            evaluation_tasks={},
            clock=clock,
            offload=in_place,
        )
    else:
        worker = build_worker(config, node_id, agent.local, clock)
    mixture = TaskMixture(environments, {}, seed=config.seed)
    author = Author(node_id=node_id, config=config, tokenizer=worker.tokenizer, environments=environments, clock=clock)
    adversaries = [
        Adversary(
            attack=attack,
            author=author,
            rng=random.Random(f"{attack} {config.seed}"),
            heard=lambda: [scored.group for scored in store.newest(NUM_HEARD)],
        )
        for attack in attacks
    ]
    honest, generator = worker.produce, worker.generator

    def produce(first: int, count: int) -> list[RolloutGroup]:
        if not has_turned():
            return honest(first, count)
        adversary = adversaries[first // count % len(adversaries)]
        return adversary.groups(mixture.tasks(first, count), generator.version)

    return replace(worker, produce=produce)


async def in_place(function: Callable[..., Result], /, *arguments: object) -> Result:
    """Calls a function that takes no virtual time."""
    return function(*arguments)
