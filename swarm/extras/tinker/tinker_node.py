"""Node whose weights are trained by clients of the tinker SDK; it publishes what they save to sample from.

Invariant: a version is published before it is handed out, so that a follower can hold exactly that version; weights
equal to those of the newest version get no new one.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from itertools import chain
from typing import Any

import torch

from node.build import NUM_CANARIES, make_evaluation_tasks, open_weight_store, require_store_room
from node.daemon import Daemon
from swarm.config import NodeConfig
from swarm.environments.load import build_environments
from swarm.errors import StorageFull
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.model.compute_dtype import place
from swarm.model.lora import merged_tensors
from swarm.model.network import LoadedModel, load_model
from swarm.model.version_digest import PublishedTensors, snapshot, weights_digest
from swarm.trained.model import TrainedModel
from swarm.types import PolicyVersion
from swarm.weights.publish import Publisher
from swarm.weights.tensors import TorchWeights

logger = logging.getLogger(__name__)

Publish = Callable[[PublishedTensors, float], Awaitable[PolicyVersion | None]]
Start = Callable[[TrainedModel, Publish], Any]  # blocking; what it returns is handed to End
End = Callable[[Any], None]  # blocking


class TinkerNode(Daemon):
    """A trainer's agent, with a Tinker server in the place of its worker.

    Args:
        config: configuration of a trainer that publishes.
        start: starts to serve a model; it gets a function that publishes an adapter, from any event loop.
        end: ends the server that `start` returned.
    """

    def __init__(self, config: NodeConfig, start: Start, end: End) -> None:
        # Nobody draws here, so nobody gets credit to generate groups: followers serve, and that is all.
        replay = config.replay.model_copy(update={"local_groups": 0, "external_groups": 1})
        super().__init__(config.model_copy(update={"replay": replay}))
        self._start_serving, self._end_serving = start, end

    async def _run_worker(self) -> None:
        await self.agent.resumed()  # a paused node that is started loads no model
        torch.set_num_threads(self.config.num_threads)
        loaded = await asyncio.to_thread(load_model, self.config.model)
        require_store_room(self.config, loaded)
        versions = await asyncio.to_thread(_Versions, self, loaded)
        await versions.publish({}, 0.0)
        model = TrainedModel(
            network=loaded.network,
            tokenizer=loaded.tokenizer,
            source=self.config.model.source,
            base_digest=loaded.digest,
        )
        loop = asyncio.get_running_loop()

        async def publish(adapter: PublishedTensors, scale: float) -> PolicyVersion | None:
            published = asyncio.run_coroutine_threadsafe(versions.publish(adapter, scale), loop)
            return await asyncio.wrap_future(published)

        serving = await asyncio.to_thread(self._start_serving, model, publish)
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.to_thread(self._end_serving, serving)


class _Versions:
    """Publishes adapters as versions of the node's lineage, one at a time."""

    def __init__(self, node: Daemon, loaded: LoadedModel) -> None:
        config = node.config
        self._agent, self._tokenizer = node.agent, loaded.tokenizer
        self._base = snapshot(loaded.network)
        # Takes each version as followers do, and says what they must find: the canaries' log-probs.
        version = PolicyVersion(policy_id=self._agent.node_id, step=0, digest=loaded.digest)
        network = load_model(config.model).network
        place(network, "cpu", config.compute_dtype)
        self._engine = TransformersGenerator(network, loaded.tokenizer, version, config.seed)
        evaluations = make_evaluation_tasks(config, build_environments(config.environments)).values()
        canaries = list(chain.from_iterable(zip(*evaluations, strict=False)))
        self._publisher = Publisher(
            open_weight_store(config).put_chunk,
            [loaded.tokenizer.encode_prompt(task) for task in canaries[:NUM_CANARIES]],
            self._engine.score,
        )
        self._one_at_a_time = asyncio.Lock()
        self._newest: PolicyVersion | None = None

    async def publish(self, adapter: PublishedTensors, scale: float) -> PolicyVersion | None:
        """Publishes the base with an adapter merged; returns the version, or None if the disk is full."""
        async with self._one_at_a_time:
            adapter = {name: tensor.cpu() for name, tensor in adapter.items()}
            weights = await asyncio.to_thread(merged_tensors, self._base, adapter, scale)
            digest = await asyncio.to_thread(weights_digest, weights)
            if self._newest is not None and self._newest.digest == digest:
                return self._newest
            step = 0 if self._newest is None else self._newest.step + 1
            version = PolicyVersion(policy_id=self._agent.node_id, step=step, digest=digest)
            try:
                bodies = await asyncio.to_thread(self._encode, version, weights)
            except StorageFull as error:
                logger.error("a version could not be published", extra={"step": step, "error": str(error)})
                return None
            await self._agent.local.publish(version, bodies)
            self._newest = version
            return version

    def _encode(self, version: PolicyVersion, weights: PublishedTensors) -> list[bytes]:
        self._engine.load(version, weights)
        return self._publisher.publish(version, TorchWeights(weights))
