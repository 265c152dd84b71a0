"""Endpoints of the tinker SDK that sample: from saved weights, from a model in training, from the model as it is.

Invariant: an adapter is published before it is sampled from, where nodes follow.
"""

import asyncio
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from torch import nn

from swarm.extras.tinker.adapter_training import AdapterShape
from swarm.extras.tinker.tinker_futures import Promises
from swarm.extras.tinker.tinker_http import Endpoint, read_json
from swarm.extras.tinker.tinker_model import TinkerModel
from swarm.extras.tinker.tinker_requests import CreateSampler, SampleRequest
from swarm.extras.tinker.tinker_samplers import Sampler, Samplers
from swarm.extras.tinker.tinker_sessions import TinkerSessions
from swarm.extras.tinker.tinker_store import TinkerStore
from swarm.model.lora import with_shared_weights
from swarm.model.version_digest import PublishedTensors, snapshot, weights_digest
from swarm.types import PolicyVersion

Publish = Callable[[PublishedTensors, float], Awaitable[PolicyVersion | None]]
"""(adapter, its scale) -> the version under which nodes can follow it; None where it could not be published."""


class TinkerSamples:
    """Makes samplers, and promises what they answer.

    Args:
        model: that is served.
        samplers: who samples.
        store: of saved weights.
        sessions: of clients.
        promises: of answers.
        publish: makes an adapter a version that nodes follow; None: nobody follows.
    """

    def __init__(
        self,
        model: TinkerModel,
        samplers: Samplers,
        store: TinkerStore,
        sessions: TinkerSessions,
        promises: Promises,
        publish: Publish | None,
    ) -> None:
        self._model, self._samplers, self._store = model, samplers, store
        self._sessions, self._promises, self._publish = sessions, promises, publish

    @property
    def posts(self) -> dict[str, Endpoint]:
        """Path below /api/v1 -> what a POST there does."""
        return {"create_sampling_session": self._create_sampler, "asample": self._sample}

    async def _create_sampler(self, request: Request) -> Response:
        asked = await read_json(request, CreateSampler)
        self._sessions.note_seen(asked.session_id)
        sampler_id = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        if asked.model_path is not None:
            path = asked.model_path
            saved = await asyncio.to_thread(self._store.find, path)
            network = await asyncio.to_thread(self._store.network, saved, self._model.network)
            adapter = snapshot(network)
            await self.add(sampler_id, asked.session_id, lambda: network, adapter, saved.shape, saved.num_steps, path)
        else:
            self._model.require(asked.base_model or "")
            network = await asyncio.to_thread(with_shared_weights, self._model.network)
            await self.add(sampler_id, asked.session_id, lambda: network, {}, None, 0)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def add(
        self,
        sampler_id: str,
        session_id: str,
        network: Callable[[], nn.Module],
        adapter: PublishedTensors,
        shape: AdapterShape | None,
        step: int,
        path: str | None = None,
    ) -> None:
        """Samples from now on come from these weights.

        Args:
            sampler_id: of the session's own.
            session_id: whose end is its end.
            network: makes what an engine here samples with (blocking).
            adapter: what the network adds to the model; empty: nothing.
            shape: of the adapter; None: there is none.
            step: optimizer steps that were made.
            path: of saved weights.
        """
        digest = await asyncio.to_thread(weights_digest, adapter) if adapter else self._model.digest
        published: PolicyVersion | None = None
        if self._publish is not None:
            published = await self._publish(adapter, shape.alpha / shape.rank if shape else 0.0)
        if published is not None and self._samplers.nodes is not None:
            self._samplers.nodes.note_published(published)
        self._samplers.add(
            Sampler(
                sampler_id=sampler_id,
                session_id=session_id,
                network=await asyncio.to_thread(network),
                version=PolicyVersion(policy_id=self._model.name, step=step, digest=digest),
                published=published,
                base_model=self._model.name,
                model_path=path,
                num_bytes=sum(each.nbytes for each in adapter.values()),
            )
        )

    async def describe(self, request: Request) -> Response:
        """What a sampler samples from."""
        sampler = self._samplers.get(request.path_params["sampler_id"])
        return JSONResponse(
            {"sampler_id": sampler.sampler_id, "base_model": sampler.base_model, "model_path": sampler.model_path}
        )

    async def _sample(self, request: Request) -> Response:
        asked = await read_json(request, SampleRequest)
        sampler = self._samplers.get(asked.sampling_session_id)
        self._sessions.note_seen(sampler.session_id)
        self._samplers.check(asked)
        request_id = f"{sampler.sampler_id}:{asked.seq_id}"
        ids = [f"{request_id}:{place}" for place in range(asked.num_samples)]
        self._promises.begin(request_id, sampler.session_id, self._samplers.sample(sampler, asked))
        return JSONResponse({"request_id": request_id, "sample_sequence_ids": ids})
