"""Samplers of a Tinker server: frozen weights that clients sample from, answered by nodes or by an engine here.

Invariant: a sampler's weights never change, and nodes and engine sample from the same weights: the samples of a seed
are equal but for the last bits of their log-probs. If nodes follow, weights are published before a client can sample
from them; if that fails, the engine here answers alone.
"""

import asyncio
import logging
import math
import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from torch import nn

from swarm.extras.tinker.adapter_training import AdapterShape
from swarm.extras.tinker.prompt_scores import prompt_scores
from swarm.extras.tinker.tinker_futures import Promises
from swarm.extras.tinker.tinker_http import Endpoint, read_json
from swarm.extras.tinker.tinker_nodes import SamplingNodes
from swarm.extras.tinker.tinker_requests import CreateSampler, SampleRequest
from swarm.extras.tinker.tinker_sessions import TinkerSessions
from swarm.extras.tinker.tinker_store import TinkerStore
from swarm.extras.tinker.tinker_wire import SampledAnswer, target_reply, write_sample_reply
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.interfaces import CompletionRequest, Tokenizer
from swarm.model.lora import with_shared_weights
from swarm.model.version_digest import PublishedTensors, snapshot, weights_digest
from swarm.serving.answers import whole_answer
from swarm.serving.openai_requests import MAX_CHOICES, RequestRefused
from swarm.types import Digest, JsonDict, PolicyVersion, Sampling

logger = logging.getLogger(__name__)

MAX_SAMPLERS: Final = 64  # with weights here; the one that was not used for longest goes first
MAX_ADAPTER_BYTES: Final = 4 * 2**30  # of all of them together

Publish = Callable[[PublishedTensors, float], Awaitable[PolicyVersion | None]]
"""(adapter, scale of the adapter) -> version that nodes can follow; None if it could not be published."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TinkerModel:
    """Base model of a server, on which clients train adapters."""

    name: str  # as clients call it
    network: nn.Module  # without adapters; its weights never change
    digest: Digest  # of its published tensors
    tokenizer: Tokenizer
    context_tokens: int

    def require(self, base_model: str | None) -> None:
        """Checks the model that a client names; None names no model. Raises RequestRefused for another model."""
        if base_model is not None and base_model != self.name:
            raise RequestRefused(f"base_model: {base_model[:80]!r} is not served; {self.name!r} is", status=404)


@dataclass(eq=False, slots=True)
class Sampler:
    """Frozen weights to sample from, with their version."""

    sampler_id: str
    session_id: str
    network: nn.Module  # used by this sampler alone; its tensors may be shared, and do not change
    version: PolicyVersion  # of an engine here
    published: PolicyVersion | None  # of the nodes that follow; None: the weights were not published
    base_model: str
    model_path: str | None
    num_bytes: int  # of weights of its own
    engine: TransformersGenerator | None = field(default=None, init=False)


class Samplers:
    """Table of samplers, which answers sample requests by nodes or by engines here.

    Args:
        tokenizer: tokenizer of the model.
        context_tokens: most tokens of a prompt and its answer together.
        max_rows: most sequences that an engine here generates together.
        nodes: nodes that may hold published versions; None: all samples are made here.
    """

    def __init__(
        self, tokenizer: Tokenizer, context_tokens: int, max_rows: int, nodes: SamplingNodes | None = None
    ) -> None:
        self.nodes = nodes
        self._tokenizer, self._context_tokens, self._max_rows = tokenizer, context_tokens, max_rows
        self._samplers: OrderedDict[str, Sampler] = OrderedDict()
        self.num_made_here = 0  # samples

    def add(self, sampler: Sampler) -> None:
        """Adds a sampler in place of one with the same id; beyond the bounds those unused for longest end."""
        if sampler.sampler_id in self._samplers:  # a client that got no answer asked again
            self._end(sampler.sampler_id)
        self._samplers[sampler.sampler_id] = sampler
        while len(self._samplers) > MAX_SAMPLERS or (len(self._samplers) > 1 and self._num_bytes > MAX_ADAPTER_BYTES):
            self._end(next(iter(self._samplers)))

    def get(self, sampler_id: str) -> Sampler:
        """Returns a sampler and counts it as used. Raises RequestRefused for an unknown id."""
        if sampler_id not in self._samplers:
            raise RequestRefused(
                f"sampling_session_id: {sampler_id!r} is unknown, its session ended, or it made room for newer ones "
                f"(at most {MAX_SAMPLERS}, and {MAX_ADAPTER_BYTES} bytes); save and name the weights to keep them",
                status=404,
            )
        self._samplers.move_to_end(sampler_id)
        return self._samplers[sampler_id]

    def end_of(self, session_id: str) -> None:
        """Ends the samplers of a session."""
        for sampler_id in [each for each, own in self._samplers.items() if own.session_id == session_id]:
            self._end(sampler_id)

    def close(self) -> None:
        """Ends all engines, and all calls to nodes (blocking)."""
        if self.nodes is not None:
            self.nodes.close()
        for sampler in self._samplers.values():
            if sampler.engine is not None:
                sampler.engine.close()

    @property
    def _num_bytes(self) -> int:
        return sum(sampler.num_bytes for sampler in self._samplers.values())

    async def sample(self, sampler: Sampler, asked: SampleRequest) -> bytes:
        """Samples the answers to a request; returns the reply in protobuf. Raises RequestRefused or Unavailable."""
        prompt = asked.prompt.token_ids
        sampling = self.check(asked)
        seed = secrets.randbits(62) if asked.sampling_params.seed is None else asked.sampling_params.seed
        answers: list[SampledAnswer] = []
        for first in range(0, asked.num_samples, MAX_CHOICES):  # a node takes so many at once
            count = min(MAX_CHOICES, asked.num_samples - first)
            answers += await self._part(sampler, asked, sampling, count, seed + first // MAX_CHOICES)
        scores: list[float] | None = None
        if asked.prompt_logprobs:
            (scored,) = await asyncio.to_thread(self._engine(sampler).score, [prompt])
            last = asked.prompt_logprobs_last_n or len(prompt)
            scores = [math.nan] * max(0, len(prompt) - last) + scored.tolist()[-last:]
        num_top, targets = asked.topk_prompt_logprobs, asked.target_prompt_logprobs
        if not num_top and targets is None:
            return write_sample_reply(answers, scores, asked.topk_sample_logprobs)
        rows, ids = targets.cells(len(prompt) - 1, self._tokenizer.vocab_size) if targets else ((), ())
        top, named = await asyncio.to_thread(prompt_scores, sampler.network, prompt, num_top, rows, ids)
        skipped = len(prompt) - (asked.prompt_logprobs_last_n or len(prompt))
        top[:skipped] = [[]] * skipped
        reply = None
        if targets is not None:
            named = np.where(np.asarray(targets.data) < 0, 0.0, named)
            starts, columns = targets.sparse_crow_indices, targets.sparse_col_indices or ()
            reply = target_reply(targets.shape, named, starts, columns)
        num_sampled = asked.topk_sample_logprobs
        return await asyncio.to_thread(write_sample_reply, answers, scores, num_sampled, top, num_top, reply)

    def check(self, asked: SampleRequest) -> Sampling:
        """Returns the sampling of a request. Raises RequestRefused if the request cannot be answered."""
        prompt, size = asked.prompt.token_ids, self._tokenizer.vocab_size
        if not prompt or max(prompt) >= size:
            raise RequestRefused(f"prompt: {len(prompt)} tokens, at least one, each below the vocabulary of {size}")
        if asked.target_prompt_logprobs is not None:
            asked.target_prompt_logprobs.cells(len(prompt) - 1, size)
        return asked.sampling_params.sampling(self._context_tokens - len(prompt))

    async def _part(
        self, sampler: Sampler, asked: SampleRequest, sampling: Sampling, count: int, seed: int
    ) -> Sequence[SampledAnswer]:
        if self.nodes is not None and sampler.published is not None:
            body = _body(asked, sampling, count, seed)
            answers = await self.nodes.sample(sampler.published, body, count)
            if answers is not None:
                return answers
            logger.info("samples are made here: no node holds their version", extra={"step": sampler.published.step})
        self.num_made_here += count
        engine, params = self._engine(sampler), asked.sampling_params
        calls = [
            whole_answer(
                engine,
                self._tokenizer,
                CompletionRequest(
                    prompt_ids=asked.prompt.token_ids,
                    sampling=sampling,
                    seed=seed % 2**63 * MAX_CHOICES + place,  # as a node has it
                    num_top=asked.topk_sample_logprobs,
                    end_ids=frozenset(params.end_ids),
                ),
                params.stops,
            )
            for place in range(count)
        ]
        made = [answer.completion for answer in await asyncio.gather(*calls)]
        return [
            SampledAnswer(token_ids=each.token_ids, logprobs=each.logprobs or (), top=each.top, finish=each.finish)
            for each in made
        ]

    def _engine(self, sampler: Sampler) -> TransformersGenerator:
        if sampler.engine is None:
            sampler.engine = TransformersGenerator(
                sampler.network, self._tokenizer, sampler.version, seed=0, max_rows=self._max_rows
            )
        return sampler.engine

    def _end(self, sampler_id: str) -> None:
        engine = self._samplers.pop(sampler_id).engine
        if engine is not None:  # its thread ends with the answers that it is making
            asyncio.get_running_loop().run_in_executor(None, engine.close)


def _body(asked: SampleRequest, sampling: Sampling, count: int, seed: int) -> JsonDict:
    params = asked.sampling_params
    return {
        "token_ids": asked.prompt.token_ids,
        "sampling_params": {
            "n": count,
            "seed": seed,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "stop": list(params.stops) or None,
            "stop_token_ids": list(params.end_ids) or None,
            "logprobs": asked.topk_sample_logprobs,
        },
    }


# --- endpoints -----------------------------------------------------------------------------------


class TinkerSamples:
    """Endpoints that add samplers, and promise their answers.

    Args:
        model: base model of the server.
        samplers: table of samplers.
        store: store of saved weights.
        sessions: open sessions of clients.
        promises: table of requests under way.
        publish: makes an adapter a version that nodes follow; None: no node follows.
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
        """Endpoints of POST requests, by path below /api/v1."""
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
        """Publishes weights, if nodes follow, and adds a sampler of them.

        Args:
            sampler_id: id of the new sampler.
            session_id: session that owns the sampler; the sampler ends with it.
            network: makes the network that an engine here samples with (blocking).
            adapter: tensors of the adapter; empty: the base model alone.
            shape: shape of the adapter; None: there is none.
            step: optimizer steps that the adapter has.
            path: path of saved weights; None: they are not saved.
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
        """Answers a GET with the base model and the weights of a sampler."""
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
