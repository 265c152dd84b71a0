"""The HTTP interface that the tinker SDK talks to: sessions, models in training, samplers, and promises of results.

    GET  /api/v1/healthz                    no key needed
    POST /api/v1/client/config              what the SDK asks first
    POST /api/v1/create_session             and session_heartbeat; a session that is silent for a while ends
    POST /api/v1/create_model               an adapter of the one model that is served
    POST /api/v1/forward_backward, optim_step, save_weights, save_weights_for_sampler, load_weights
    POST /api/v1/create_sampling_session, asample
    POST /api/v1/retrieve_future            what became of one of them

Invariant: requests of a model are done in the order of their numbers, each once; every table is bounded.

Source: the tinker SDK 0.38 (Apache-2.0): addresses, fields and states; no code of it is here.
"""

import asyncio
import hmac
import json
import logging
import math
import secrets
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar, cast

import numpy as np
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from torch import nn

from swarm.clock import Clock
from swarm.errors import TooLarge, Unavailable
from swarm.interfaces import Tokenizer
from swarm.learn.adapter_training import AdamSettings, AdapterShape, AdapterTraining, adapted
from swarm.model.lora import with_shared_weights
from swarm.model.version_digest import PublishedTensors, load_published, weights_digest
from swarm.serving.http_server import read_body
from swarm.serving.openai_requests import RequestRefused
from swarm.serving.tinker_futures import Promises, Reply
from swarm.serving.tinker_losses import batch_of, parts_of_similar_length, recipe_of
from swarm.serving.tinker_requests import (
    CreateModel,
    CreateSampler,
    CreateSession,
    InOrder,
    InSession,
    LoadIntoModel,
    LoadNewModel,
    LoraSettings,
    OfModel,
    OfRequest,
    OptimStep,
    SampleRequest,
    SaveWeights,
    WeightsPath,
    checked_name,
    read_tinker_request,
)
from swarm.serving.tinker_samplers import Sampler, Samplers
from swarm.serving.tinker_sessions import ModelInTraining, TinkerSessions
from swarm.serving.tinker_store import Kind, SavedWeights, TinkerStore
from swarm.serving.tinker_wire import (
    TrainingRequest,
    parse_order,
    parse_training_request,
    read_training_request,
    write_training_reply,
)
from swarm.types import Digest, JsonDict, PolicyVersion
from swarm.wire.v1.tinker_pb2 import TinkerForwardBackward

logger = logging.getLogger(__name__)

KEY_PREFIX: Final = "tml-"  # the SDK takes no other keys
ALPHA: Final = 32.0  # of every adapter: what it adds is scaled by ALPHA / rank, as in Tinker's adapters
MAX_BODY_BYTES: Final = 64 * 2**20
MAX_ORDER_BYTES: Final = 256  # of a body: they hold model and number
MAX_WAITING_BYTES: Final = 2**30  # of bodies whose turn has not come; a client tries again after that
POLL_S: Final = 25.0  # a client that waits for a result is answered that long after, at the latest
_PROTOBUF: Final = "application/x-protobuf"
_NOTE: Final = "adapters are on attention and MLP; the unembedding stays as it is, also with train_unembed"

Publish = Callable[[PublishedTensors, float], Awaitable[PolicyVersion | None]]
"""(adapter, its scale) -> the version under which nodes can follow it; None where it could not be published."""
Result = TypeVar("Result")
Asked = TypeVar("Asked", bound=InOrder)
Work = Callable[[ModelInTraining, Asked], Awaitable[Reply | Awaitable[Reply]]]
"""What a request asks for, in its turn; what it returns to be awaited holds up no later request."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TinkerModel:
    """What is served to train."""

    name: str  # as clients call it
    network: nn.Module  # without adapters; its weights never change
    digest: Digest  # of its published tensors
    tokenizer: Tokenizer
    context_tokens: int


class TinkerApp:
    """Answers the tinker SDK for one model.

    Args:
        model: that is served.
        samplers: who samples.
        store: of saved weights.
        key: that every request but healthz must have; begins with `tml-`.
        clock: of idle sessions.
        publish: makes an adapter a version that nodes follow; None: nobody follows.

    Example:
        uvicorn.run(TinkerApp(model, samplers, store, key, SystemClock()).routes)
    """

    def __init__(
        self,
        model: TinkerModel,
        samplers: Samplers,
        store: TinkerStore,
        key: str,
        clock: Clock,
        publish: Publish | None = None,
    ) -> None:
        assert key.startswith(KEY_PREFIX), "the SDK takes no other key"
        self._model, self._store, self._clock, self._publish = model, store, clock, publish
        self.samplers = samplers
        self._key = key.encode()
        self._promises = Promises()
        self._sessions = TinkerSessions(clock, self._end_work)
        self._trainer = ThreadPoolExecutor(1, "tinker trainer")  # one step at a time, of whatever model
        self._num_waiting_bytes = 0
        routes: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "telemetry": self._telemetry,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "load_weights": self._load_weights,
            "weights_info": self._weights_info,
            "create_sampling_session": self._create_sampler,
            "asample": self._sample,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
        }
        self.routes = Starlette(
            routes=[
                Route("/api/v1/healthz", self._health, methods=["GET"]),
                Route("/api/v1/get_server_capabilities", self._guarded(self._capabilities), methods=["GET"]),
                Route("/api/v1/samplers/{sampler_id}", self._guarded(self._get_sampler), methods=["GET"]),
                Route("/api/v1/sessions/{session_id}/finish", self._guarded(self._finish), methods=["POST"]),
                *(
                    Route(f"/api/v1/{path}", self._guarded(endpoint), methods=["POST"])
                    for path, endpoint in routes.items()
                ),
                Route("/{path:path}", self._guarded(self._unknown), methods=["GET", "POST", "PUT", "DELETE"]),
            ]
        )

    def close(self) -> None:
        """Ends training and engines (blocking)."""
        self._trainer.shutdown(wait=True, cancel_futures=True)
        self.samplers.close()

    # --- what the SDK asks first ----------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _unknown(self, request: Request) -> Response:
        raise RequestRefused(f"{request.method} {request.url.path} is not served here", status=404)

    async def _client_config(self, request: Request) -> Response:
        await self._json(request, CreateSession)
        # Chunks in their order, so that little waits; half of the connections that the server takes.
        return JSONResponse({"parallel_fwdbwd_chunks": False, "sample_max_concurrent_requests": 512})

    async def _dynamic_config(self, request: Request) -> Response:
        return JSONResponse({"sample_cancel_enabled": True})

    async def _telemetry(self, request: Request) -> Response:
        await self._body(request)
        return JSONResponse({"status": "accepted"})  # and dropped

    async def _capabilities(self, request: Request) -> Response:
        model = {
            "model_name": self._model.name,
            "max_context_length": self._model.context_tokens,
            "trainable": True,
            "sampleable": True,
        }
        return JSONResponse({"supported_models": [model]})

    # --- sessions -------------------------------------------------------------------------------------

    async def _create_session(self, request: Request) -> Response:
        await self._json(request, CreateSession)
        session_id = self._sessions.begin()
        return JSONResponse({"type": "create_session", "session_id": session_id, "info_message": _NOTE})

    async def _heartbeat(self, request: Request) -> Response:
        asked = await self._json(request, InSession)
        self._sessions.end_silent()
        self._sessions.note_seen(asked.session_id, 410)
        return JSONResponse({"type": "session_heartbeat"})

    async def _finish(self, request: Request) -> Response:
        session_id = request.path_params["session_id"]
        self._sessions.note_seen(session_id, 410)
        self._sessions.end(session_id)
        return JSONResponse({})

    def _end_work(self, session_id: str) -> None:
        self._promises.cancel_of(session_id)
        self.samplers.end_of(session_id)

    # --- training -------------------------------------------------------------------------------------

    async def _create_model(self, request: Request) -> Response:
        asked = await self._json(request, CreateModel)
        self._require_served(asked.base_model)
        shape = _shape(asked.lora_config)
        return self._new_model("create_model", asked, lambda: AdapterTraining(self._model.network, shape, self._clock))

    async def _load_weights(self, request: Request) -> Response:
        """Into a model that is there, or into a new one of a session."""
        body = await self._decoded(request)
        if isinstance(body, dict) and cast(JsonDict, body).get("model_id") is not None:
            return self._in_order(body, LoadIntoModel, self._load_into_model)
        asked = read_tinker_request(LoadNewModel, body)
        self._require_served(asked.base_model)

        def make() -> AdapterTraining:
            saved = self._store.find(asked.path)
            state = AdapterTraining(self._model.network, saved.shape, self._clock)
            return self._load(state, saved, asked)

        return self._new_model("load_weights", asked, make, path=asked.path)

    def _new_model(
        self, kind: str, asked: CreateModel | LoadNewModel, make: Callable[[], AdapterTraining], **said: str
    ) -> Response:
        """Promises a model that `make` makes (blocking)."""
        session_id, model_id = asked.session_id, f"{asked.session_id}:train:{asked.model_seq_id}"

        async def work() -> Reply:
            with self._sessions.room_for_model():
                state = await self._in_trainer(make)
                self._sessions.add(ModelInTraining(model_id, session_id, state))
            return {"type": kind, "model_id": model_id, **said}

        self._sessions.note_seen(session_id)
        return self._promise(f"{model_id}:0", session_id, work(), model_id)

    async def _load_into_model(self, training: ModelInTraining, asked: LoadIntoModel) -> Reply:
        self._require_served(asked.base_model)
        saved = await asyncio.to_thread(self._store.find, asked.path)
        await self._in_trainer(self._load, training.state, saved, asked)
        return {"type": "load_weights", "path": asked.path, "model_id": training.model_id}

    def _load(
        self, state: AdapterTraining, saved: SavedWeights, asked: LoadIntoModel | LoadNewModel
    ) -> AdapterTraining:
        state.load_state(self._store.state(saved), saved.num_steps, has_moments=asked.optimizer)
        return state

    async def _get_info(self, request: Request) -> Response:
        training = self._sessions.model((await self._json(request, OfModel)).model_id)
        name = self._model.name
        return JSONResponse(
            {
                "type": "get_info",
                "model_id": training.model_id,
                "model_name": name,
                "model_data": {
                    "arch": type(self._model.network).__name__,
                    "model_name": name,
                    "tokenizer_id": name,
                },
                "is_lora": True,
                "lora_rank": training.state.shape.rank,
            }
        )

    async def _forward_backward(self, request: Request) -> Response:
        if request.headers.get("content-encoding", "identity") != "identity":
            raise RequestRefused("content-encoding: not served; leave proto_compress_fwdbwd off", status=415)
        beginning = bytearray()
        try:
            body = await read_body(_keeping_first(request.stream(), beginning), MAX_BODY_BYTES)
        except TooLarge as error:
            return self._refuse_in_turn(parse_order(bytes(beginning)), str(error))
        message = await asyncio.to_thread(parse_training_request, body)
        training = self._sessions.model(message.model_id)
        limits = self._model.tokenizer.vocab_size, self._model.context_tokens
        if self._num_waiting_bytes > MAX_WAITING_BYTES:
            raise RequestRefused(f"{self._num_waiting_bytes} bytes of data wait, of {MAX_WAITING_BYTES}", status=429)

        async def work() -> Reply:
            self._num_waiting_bytes += len(body)
            try:
                async with training.turns.turn(message.seq_id):
                    asked = await asyncio.to_thread(read_training_request, message, *limits)
                    return await self._in_trainer(_train, training.state, asked)
            finally:
                self._num_waiting_bytes -= len(body)

        request_id = f"{training.model_id}:{message.seq_id}"
        return self._promise(request_id, training.session_id, work(), training.model_id)

    def _refuse_in_turn(self, message: TinkerForwardBackward, reason: str) -> Response:
        """Promises a refusal, so that later requests of the model do not wait for this one."""
        training = self._sessions.model(message.model_id)

        async def refuse() -> Reply:
            async with training.turns.turn(message.seq_id):
                raise RequestRefused(reason)

        request_id = f"{training.model_id}:{message.seq_id}"
        return self._promise(request_id, training.session_id, refuse(), training.model_id)

    async def _optim_step(self, request: Request) -> Response:
        return self._in_order(await self._decoded(request), OptimStep, self._step)

    async def _step(self, training: ModelInTraining, asked: OptimStep) -> Reply:
        adam = asked.adam
        settings = AdamSettings(
            learning_rate=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            max_grad_norm=adam.grad_clip_norm or math.inf,
        )
        norm = await self._in_trainer(training.state.step, settings)
        return {"metrics": {"grad_norm": norm, "num_steps": float(training.state.num_steps)}}

    def _in_order(self, body: object, kind: type[Asked], work: Work[Asked]) -> Response:
        """Promises what a model is asked for, in its turn.

        The rest of it is read then: a request that is refused must leave no gap, which all later ones would wait for.
        """
        order = read_tinker_request(InOrder, body)
        training = self._sessions.model(order.model_id)

        async def in_turn() -> Reply:
            async with training.turns.turn(order.seq_id):
                done = await work(training, read_tinker_request(kind, body))
            return await done if isinstance(done, Awaitable) else done

        request_id = f"{training.model_id}:{order.seq_id}"
        return self._promise(request_id, training.session_id, in_turn(), training.model_id)

    # --- saved weights --------------------------------------------------------------------------------

    async def _save_weights(self, request: Request) -> Response:
        return self._in_order(await self._decoded(request), SaveWeights, self._save_to_train)

    async def _save_to_train(self, training: ModelInTraining, asked: SaveWeights) -> Reply:
        if asked.path is None:
            raise RequestRefused("path: give the weights a name")
        return await self._save(training, asked, asked.path, "weights")

    async def _save_for_sampler(self, request: Request) -> Response:
        return self._in_order(await self._decoded(request), SaveWeights, self._save_to_sample)

    async def _save_to_sample(self, training: ModelInTraining, asked: SaveWeights) -> Reply | Awaitable[Reply]:
        if asked.path is not None:
            return await self._save(training, asked, asked.path, "sampler_weights")
        if asked.sampling_session_seq_id is None:
            raise RequestRefused("save_weights_for_sampler: give a path, or a sampling_session_seq_id")
        sampler_id, shape = f"{training.session_id}:sample:{asked.sampling_session_seq_id}", training.state.shape
        adapter, step = await self._in_trainer(training.state.adapter), training.state.num_steps

        def frozen() -> nn.Module:
            network = adapted(self._model.network, shape)
            load_published(network, adapter)
            return network

        async def sampler() -> Reply:
            await self._add_sampler(sampler_id, training.session_id, frozen, adapter, shape, step)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

        return sampler()

    async def _save(self, training: ModelInTraining, asked: SaveWeights, name: str, kind: Kind) -> Reply:
        path = await self._in_trainer(
            lambda: self._store.save(
                training.state,
                training.model_id,
                kind,
                checked_name(name),
                ttl_s=asked.ttl_seconds,
                overwrite=asked.overwrite or kind == "sampler_weights",
            )
        )
        return {"type": "save_weights" if kind == "weights" else "save_weights_for_sampler", "path": path}

    async def _weights_info(self, request: Request) -> Response:
        asked = await self._json(request, WeightsPath)
        saved = await asyncio.to_thread(self._store.find, asked.tinker_path)
        return JSONResponse(
            {
                "base_model": saved.base_model,
                "is_lora": True,
                "lora_rank": saved.shape.rank,
                "train_unembed": False,
                "train_mlp": saved.shape.has_mlp,
                "train_attn": saved.shape.has_attention,
            }
        )

    # --- sampling -------------------------------------------------------------------------------------

    async def _create_sampler(self, request: Request) -> Response:
        asked = await self._json(request, CreateSampler)
        self._sessions.note_seen(asked.session_id)
        sampler_id = f"{asked.session_id}:sample:{asked.sampling_session_seq_id}"
        if asked.model_path is not None:
            path = asked.model_path
            saved = await asyncio.to_thread(self._store.find, path)
            network = await asyncio.to_thread(self._store.network, saved, self._model.network)
            adapter = {name: each.detach().clone() for name, each in network.named_parameters() if each.requires_grad}
            await self._add_sampler(
                sampler_id, asked.session_id, lambda: network, adapter, saved.shape, saved.num_steps, path
            )
        else:
            self._require_served(asked.base_model or "")
            network = await asyncio.to_thread(with_shared_weights, self._model.network)
            await self._add_sampler(sampler_id, asked.session_id, lambda: network, {}, None, 0)
        return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler_id})

    async def _add_sampler(
        self,
        sampler_id: str,
        session_id: str,
        network: Callable[[], nn.Module],
        adapter: PublishedTensors,
        shape: AdapterShape | None,
        step: int,
        path: str | None = None,
    ) -> None:
        digest = await asyncio.to_thread(weights_digest, adapter) if adapter else self._model.digest
        published: PolicyVersion | None = None
        if self._publish is not None:
            published = await self._publish(adapter, shape.alpha / shape.rank if shape else 0.0)
        if published is not None and self.samplers.nodes is not None:
            self.samplers.nodes.note_published(published)
        self.samplers.add(
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

    async def _get_sampler(self, request: Request) -> Response:
        sampler = self.samplers.get(request.path_params["sampler_id"])
        return JSONResponse(
            {"sampler_id": sampler.sampler_id, "base_model": sampler.base_model, "model_path": sampler.model_path}
        )

    async def _sample(self, request: Request) -> Response:
        asked = await self._json(request, SampleRequest)
        sampler = self.samplers.get(asked.sampling_session_id)
        self._sessions.note_seen(sampler.session_id)
        self.samplers.check(asked)
        request_id = f"{sampler.sampler_id}:{asked.seq_id}"
        ids = [f"{request_id}:{place}" for place in range(asked.num_samples)]
        self._promises.begin(request_id, sampler.session_id, self.samplers.sample(sampler, asked))
        return JSONResponse({"request_id": request_id, "sample_sequence_ids": ids})

    # --- promises -------------------------------------------------------------------------------------

    def _promise(self, request_id: str, session_id: str, work: Any, model_id: str) -> Response:
        self._promises.begin(request_id, session_id, work)
        return JSONResponse({"request_id": request_id, "model_id": model_id})

    async def _retrieve(self, request: Request) -> Response:
        asked = await self._json(request, OfRequest)
        reply = await self._promises.wait(asked.request_id, POLL_S)
        if reply is None:
            pending = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
            return JSONResponse(pending, 408)
        if isinstance(reply, bytes):
            return Response(reply, media_type=_PROTOBUF)
        return JSONResponse(reply)

    async def _cancel(self, request: Request) -> Response:
        asked = await self._json(request, OfRequest)
        if ":sample:" in asked.request_id:  # what trains would leave a gap in the order
            self._promises.cancel(asked.request_id)
        return JSONResponse({})

    # --- shared ---------------------------------------------------------------------------------------

    def _require_served(self, base_model: str | None) -> None:
        if base_model is not None and base_model != self._model.name:
            raise RequestRefused(f"base_model: {base_model[:80]!r} is not served; {self._model.name!r} is", status=404)

    async def _in_trainer(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._trainer, function, *arguments)

    async def _body(self, request: Request) -> bytes:
        try:
            return await read_body(request.stream(), MAX_BODY_BYTES)
        except TooLarge as error:
            raise RequestRefused(str(error), status=413) from None

    async def _json(self, request: Request, kind: type[Any]) -> Any:
        return read_tinker_request(kind, await self._decoded(request))

    async def _decoded(self, request: Request) -> object:
        try:
            return json.loads(await self._body(request))
        except (ValueError, RecursionError):
            raise RequestRefused("body: not JSON") from None

    def _guarded(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """The endpoint for callers with the key, and its refusals as the SDK reads them."""

        async def answer(request: Request) -> Response:
            if not hmac.compare_digest(request.headers.get("x-api-key", "").encode(), self._key):
                return JSONResponse({"detail": "no valid key: set TINKER_API_KEY to what the server printed"}, 401)
            try:
                return await endpoint(request)
            except RequestRefused as error:
                return JSONResponse({"detail": str(error)}, error.status)
            except Unavailable as error:
                return JSONResponse({"detail": str(error)}, 503, headers={"Retry-After": "1"})
            except ClientDisconnect:
                return Response(status_code=499)  # nobody reads it
            except Exception:  # task boundary: one request must not end the others
                logger.exception("request failed", extra={"path": request.url.path})
                return JSONResponse({"detail": "this request failed; the server's log says why"}, 500)

        return answer


async def _keeping_first(parts: AsyncIterable[bytes], first: bytearray) -> AsyncGenerator[bytes]:
    """The parts as they are, of which the first MAX_ORDER_BYTES are put into `first`."""
    async for part in parts:
        first += part[: MAX_ORDER_BYTES - len(first)]
        yield part


def _shape(lora: LoraSettings | None) -> AdapterShape:
    if lora is None:
        raise RequestRefused("lora_config: only adapters are trained here; give one with a rank")
    return AdapterShape(
        rank=lora.rank,
        alpha=ALPHA,
        seed=secrets.randbits(62) if lora.seed is None else lora.seed,
        has_attention=lora.train_attn,
        has_mlp=lora.train_mlp,
    )


def _train(state: AdapterTraining, asked: TrainingRequest) -> bytes:
    """Scores the data of a request and adds its gradient (blocking)."""
    recipe = recipe_of(asked.loss, asked.config)
    parts = [
        (part, batch_of(asked.loss, asked.data, part, state.device)) for part in parts_of_similar_length(asked.data)
    ]  # all of them first: a request that is refused adds nothing
    logprobs: dict[int, np.ndarray[Any, Any]] = {}
    total = 0.0
    for part, batch in parts:
        token_ids, targets = [asked.data[row].token_ids for row in part], [asked.data[row].targets for row in part]
        scored, loss = state.forward_backward(recipe, batch, token_ids, targets, is_forward_only=asked.is_forward_only)
        logprobs |= dict(zip(part, scored, strict=True))
        total += loss
    return write_training_reply([logprobs[row] for row in range(len(asked.data))], {"loss:sum": total})
