"""What holds weights on a node: the policy in training, what generates, and what ties both to the weight store.

Invariant: a node either trains a policy or follows one; what generates has weights of its own.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, cast

from node.ranks import join, open_policy
from swarm.config import NodeConfig
from swarm.errors import ConfigError
from swarm.interfaces import Generator, TaskOf, TextCodec
from swarm.loops import Encode
from swarm.types import NodeId, PolicyVersion, Role, Task
from swarm.weights.anchors import keep_anchor
from swarm.weights.apply import Applier
from swarm.weights.publish import Held
from swarm.weights.publisher import Publisher, least_store_bytes
from swarm.weights.store import WeightStore
from swarm.weights.tensors import TorchWeights, specs_of

if TYPE_CHECKING:
    from swarm.generation.transformers_engine import TransformersGenerator
    from swarm.learn.data_parallel import ShardedRanks
    from swarm.learn.guarded_learner import GuardedLearner
    from swarm.learn.learner import PolicyLearner
    from swarm.model import LoadedModel, PublishedTensors
    from swarm.objectives.fallbacks import RecipeSet

BASE_MODEL: Final = "base model"  # lineage of what an engine starts with, until a manifest says whom it follows


@dataclass(frozen=True, kw_only=True, slots=True)
class Engines:
    """Everything that holds weights. `learner` or `applier` is None, and `generator` on a node that only trains."""

    codec: TextCodec
    learner: "GuardedLearner | None"
    generator: Generator  # can run while the learner steps; on a node that only trains the evaluator
    evaluator: "TransformersGenerator | None"  # always has the learner's newest weights
    encode: Encode | None
    applier: Applier | None
    close: Callable[[], None]


def load_engines(
    config: NodeConfig, node_id: NodeId, recipes: "RecipeSet", task_of: TaskOf, canaries: Sequence[Task]
) -> Engines:
    """Loads the model and starts what the roles need (blocking, slow).

    Args:
        canaries: problems whose prompts become the canaries of published versions.

    Raises:
        ConfigError: the model cannot be had, or the engine cannot be started.
    """
    from swarm.model import load_model

    loaded = load_model(config.model)
    if Role.TRAINER in config.roles:
        return _training(config, node_id, loaded, recipes, task_of, canaries)
    return _following(config, loaded)


def _training(
    config: NodeConfig,
    node_id: NodeId,
    loaded: "LoadedModel",
    recipes: "RecipeSet",
    task_of: TaskOf,
    canaries: Sequence[Task],
) -> Engines:
    from swarm.generation.transformers_engine import TransformersGenerator
    from swarm.learn.guarded_learner import GuardedLearner
    from swarm.objectives.methods import load_recipe

    if config.weights.publish:
        _check_room(config, loaded)
    ranks = join(config)
    policy = open_policy(config, node_id, loaded, recipes, task_of, ranks)
    safe = load_recipe(config.guard.safe_recipe)
    learner = GuardedLearner(policy, safe, config.guard, config.replay.max_age_steps)
    ending = ExitStack()
    if ranks is None:
        evaluator = TransformersGenerator(loaded.network, loaded.codec, learner.version, config.seed)
    else:
        evaluator = _evaluator_beside(ranks, policy, config)
        ending.callback(ranks.stop)
        ending.callback(policy.stop)
    generator: Generator = evaluator
    if Role.GENERATOR in config.roles:
        generator, close = _start_engine(config, None, loaded.codec, learner.version)
        ending.callback(close)
        generator.load(*learner.snapshot())
    encode = _encoder(config, evaluator, canaries, loaded.codec) if config.weights.publish else None
    return Engines(
        codec=loaded.codec,
        learner=learner,
        generator=generator,
        evaluator=evaluator,
        encode=encode,
        applier=None,
        close=ending.close,
    )


def _evaluator_beside(ranks: "ShardedRanks", policy: "PolicyLearner", config: NodeConfig) -> "TransformersGenerator":
    """On a network of its own: that of the learner is spread over its processes."""
    from node.evaluator import NewestWeights
    from swarm.model import load_model

    loaded = load_model(config.model)
    return NewestWeights(loaded.network.to(ranks.device), loaded.codec, policy, config.seed)


def _following(config: NodeConfig, loaded: "LoadedModel") -> Engines:
    from swarm.model import snapshot, weights_digest

    weights = snapshot(loaded.network)
    version = PolicyVersion(policy_id=BASE_MODEL, step=0, digest=weights_digest(weights))
    generator, close = _start_engine(config, loaded, loaded.codec, version)
    store = _weight_store(config)
    applier = Applier(
        generator,
        Held(version=version, weights=TorchWeights(weights)),
        store.chunk,
        keep=partial(keep_anchor, store),
        in_flight=config.follow.mode == "push" and config.follow.in_flight,
    )
    return Engines(
        codec=loaded.codec,
        learner=None,
        generator=generator,
        evaluator=None,
        encode=None,
        applier=applier,
        close=close,
    )


def _start_engine(
    config: NodeConfig, loaded: "LoadedModel | None", codec: TextCodec, version: PolicyVersion
) -> tuple[Generator, Callable[[], None]]:
    """The configured engine with the run's base model, and what ends it.

    Args:
        loaded: a network that the engine may have; None: it loads one of its own.
    """
    kind, tolerance = config.engine.kind, config.engine.tolerance_nats
    if kind == "vllm":
        from swarm.generation.vllm_engine import VllmGenerator

        vllm = VllmGenerator.start(config, codec, version, config.seed)
        return vllm, vllm.close
    if kind == "openai":
        from swarm.generation.openai_engine import OpenAIGenerator

        remote = OpenAIGenerator.start(config, codec, version, config.seed)
        return remote, remote.close
    from swarm.generation.transformers_engine import TransformersGenerator
    from swarm.model import load_model, pick_device

    network = (loaded or load_model(config.model)).network.to(pick_device(config.device))
    rows = config.engine.max_rows
    generator = TransformersGenerator(network, codec, version, config.seed, max_rows=rows, tolerance_nats=tolerance)
    return generator, _nothing


def _encoder(
    config: NodeConfig, evaluator: "TransformersGenerator", canaries: Sequence[Task], codec: TextCodec
) -> Encode:
    """Publishes into the node's weight store; the learner's own network says what it thinks of the canaries."""
    publisher = Publisher(
        _weight_store(config).put_chunk,
        [codec.encode_prompt(task) for task in canaries[: config.weights.num_canaries]],
        evaluator.score,
        config.weights.anchor_every,
    )

    def encode(version: PolicyVersion, weights: object) -> list[bytes]:
        return publisher.publish(version, TorchWeights(cast("PublishedTensors", weights)))

    return encode


def _check_room(config: NodeConfig, loaded: "LoadedModel") -> None:
    """Raises ConfigError where what is published would exceed the disk's budget for good."""
    from swarm.model import published_state

    least = least_store_bytes(specs_of(TorchWeights(published_state(loaded.network))))
    if config.weights.store_bytes < least:
        raise ConfigError(
            f"weights.store_bytes: {config.weights.store_bytes} has no room for a version in full and a patch; "
            f"for this model set at least {least}"
        )


def _weight_store(config: NodeConfig) -> WeightStore:
    return WeightStore(config.dir / "weights", config.weights.store_bytes)


def _nothing() -> None:
    """Nothing to end."""
