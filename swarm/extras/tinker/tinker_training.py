"""Endpoints of the tinker SDK that train: models, their steps in order, and weights saved and loaded.

Invariant: requests of a model are done in the order of their numbers, each once; one step at a time, of whatever model.
"""

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar, cast

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from torch import nn

from swarm.clock import Clock
from swarm.errors import TooLarge
from swarm.extras.tinker.adapter_training import AdamSettings, AdapterShape, AdapterTraining, adapted
from swarm.extras.tinker.tinker_futures import Promises, Reply
from swarm.extras.tinker.tinker_http import Endpoint, body_and_beginning, decoded, read_json
from swarm.extras.tinker.tinker_losses import batch_of, parts_of_similar_length, recipe_of
from swarm.extras.tinker.tinker_requests import (
    CreateModel,
    InOrder,
    LoadIntoModel,
    LoadNewModel,
    LoraSettings,
    OfModel,
    OptimStep,
    SaveWeights,
    WeightsPath,
    checked_name,
    read_tinker_request,
)
from swarm.extras.tinker.tinker_samplers import TinkerModel, TinkerSamples
from swarm.extras.tinker.tinker_sessions import ModelInTraining, TinkerSessions
from swarm.extras.tinker.tinker_store import Kind, SavedWeights, TinkerStore
from swarm.extras.tinker.tinker_wire import (
    TrainingRequest,
    parse_order,
    parse_training_request,
    read_training_request,
    write_training_reply,
)
from swarm.extras.tinker.v1.tinker_pb2 import TinkerForwardBackward
from swarm.model.version_digest import load_published
from swarm.serving.openai_requests import RequestRefused
from swarm.types import JsonDict

ALPHA: Final = 32.0  # of every adapter: what it adds is scaled by ALPHA / rank, as in Tinker's adapters
MAX_WAITING_BYTES: Final = 2**30  # of bodies whose turn has not come; a client tries again after that

Result = TypeVar("Result")
Asked = TypeVar("Asked", bound=InOrder)
Work = Callable[[ModelInTraining, Asked], Awaitable[Reply | Awaitable[Reply]]]
"""The work of a request, in its turn; a reply that is still to be awaited holds up no later request."""


class TinkerTraining:
    """Endpoints that train adapters of clients, and promise the results.

    Args:
        model: base model of the server.
        sampling: adds samplers of the weights of a model in training.
        store: store of saved weights.
        sessions: open sessions of clients.
        promises: table of requests under way.
        clock: clock that measures training.
    """

    def __init__(
        self,
        model: TinkerModel,
        sampling: TinkerSamples,
        store: TinkerStore,
        sessions: TinkerSessions,
        promises: Promises,
        clock: Clock,
    ) -> None:
        self._model, self._sampling, self._store, self._clock = model, sampling, store, clock
        self._sessions, self._promises = sessions, promises
        self._trainer = ThreadPoolExecutor(1, "tinker trainer")
        self._num_waiting_bytes = 0

    @property
    def posts(self) -> dict[str, Endpoint]:
        """Endpoints of POST requests, by path below /api/v1."""
        return {
            "create_model": self._create_model,
            "get_info": self._get_info,
            "forward_backward": self._forward_backward,
            "optim_step": self._endpoint(OptimStep, self._step),
            "save_weights": self._endpoint(SaveWeights, self._save_to_train),
            "save_weights_for_sampler": self._endpoint(SaveWeights, self._save_to_sample),
            "load_weights": self._load_weights,
            "weights_info": self._weights_info,
        }

    def close(self) -> None:
        """Cancels waiting work and waits for the work that runs (blocking)."""
        self._trainer.shutdown(wait=True, cancel_futures=True)

    # --- models and their steps -----------------------------------------------------------------------

    async def _create_model(self, request: Request) -> Response:
        asked = await read_json(request, CreateModel)
        self._model.require(asked.base_model)
        shape = _shape(asked.lora_config)
        return self._new_model("create_model", asked, lambda: AdapterTraining(self._model.network, shape, self._clock))

    async def _load_weights(self, request: Request) -> Response:
        """Loads saved weights into a model, or without a model_id into a new model of a session."""
        body = await decoded(request)
        if isinstance(body, dict) and cast(JsonDict, body).get("model_id") is not None:
            return self._in_order(body, LoadIntoModel, self._load_into_model)
        asked = read_tinker_request(LoadNewModel, body)
        self._model.require(asked.base_model)

        def make() -> AdapterTraining:
            saved = self._store.find(asked.path)
            state = AdapterTraining(self._model.network, saved.shape, self._clock)
            return self._load(state, saved, asked)

        return self._new_model("load_weights", asked, make, path=asked.path)

    def _new_model(
        self, kind: str, asked: CreateModel | LoadNewModel, make: Callable[[], AdapterTraining], **more: str
    ) -> Response:
        """Promises a new model; the trainer's thread calls `make` (blocking)."""
        session_id, model_id = asked.session_id, f"{asked.session_id}:train:{asked.model_seq_id}"

        async def work() -> Reply:
            with self._sessions.room_for_model():
                state = await self._in_trainer(make)
                self._sessions.add(ModelInTraining(model_id, session_id, state, asked.user_metadata or {}))
            return {"type": kind, "model_id": model_id, **more}

        self._sessions.note_seen(session_id)
        return self._promise(f"{model_id}:0", session_id, work(), model_id)

    async def _load_into_model(self, training: ModelInTraining, asked: LoadIntoModel) -> Reply:
        self._model.require(asked.base_model)
        saved = await asyncio.to_thread(self._store.find, asked.path)
        await self._in_trainer(self._load, training.state, saved, asked)
        return {"type": "load_weights", "path": asked.path, "model_id": training.model_id}

    def _load(
        self, state: AdapterTraining, saved: SavedWeights, asked: LoadIntoModel | LoadNewModel
    ) -> AdapterTraining:
        state.load_state(self._store.state(saved), saved.num_steps, has_moments=asked.optimizer)
        return state

    async def _get_info(self, request: Request) -> Response:
        training = self._sessions.model((await read_json(request, OfModel)).model_id)
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
            body = await body_and_beginning(request, beginning)
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

        return self._promise_of(training, message.seq_id, work())

    def _refuse_in_turn(self, message: TinkerForwardBackward, reason: str) -> Response:
        """Promises a refusal, so that later requests of the model do not wait for this one."""
        training = self._sessions.model(message.model_id)

        async def refuse() -> Reply:
            async with training.turns.turn(message.seq_id):
                raise RequestRefused(reason)

        return self._promise_of(training, message.seq_id, refuse())

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

    def _endpoint(self, kind: type[Asked], work: Work[Asked]) -> Endpoint:
        async def answer(request: Request) -> Response:
            return self._in_order(await decoded(request), kind, work)

        return answer

    def _in_order(self, body: object, kind: type[Asked], work: Work[Asked]) -> Response:
        """Promises the work of a request to a model, in its turn.

        Before the turn, only model and number are read: a request that is refused later must leave no gap in the
        numbers, for which all later requests would wait.
        """
        order = read_tinker_request(InOrder, body)
        training = self._sessions.model(order.model_id)

        async def in_turn() -> Reply:
            async with training.turns.turn(order.seq_id):
                done = await work(training, read_tinker_request(kind, body))
            return await done if isinstance(done, Awaitable) else done

        return self._promise_of(training, order.seq_id, in_turn())

    # --- saved weights --------------------------------------------------------------------------------

    async def _save_to_train(self, training: ModelInTraining, asked: SaveWeights) -> Reply:
        if asked.path is None:
            raise RequestRefused("path: give the weights a name")
        return await self._save(training, asked, asked.path, "weights")

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
            await self._sampling.add(sampler_id, training.session_id, frozen, adapter, shape, step)
            return {"type": "save_weights_for_sampler", "sampling_session_id": sampler_id}

        return sampler()

    async def _save(self, training: ModelInTraining, asked: SaveWeights, name: str, kind: Kind) -> Reply:
        path = await self._in_trainer(
            lambda: self._store.save(
                training.state,
                training.model_id,
                kind,
                checked_name(name),
                notes=training.notes,
                ttl_s=asked.ttl_seconds,
                overwrite=asked.overwrite or kind == "sampler_weights",
            )
        )
        return {"type": "save_weights" if kind == "weights" else "save_weights_for_sampler", "path": path}

    async def _weights_info(self, request: Request) -> Response:
        asked = await read_json(request, WeightsPath)
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

    # --- shared ---------------------------------------------------------------------------------------

    def _promise_of(self, training: ModelInTraining, seq_id: int, work: Any) -> Response:
        return self._promise(f"{training.model_id}:{seq_id}", training.session_id, work, training.model_id)

    def _promise(self, request_id: str, session_id: str, work: Any, model_id: str) -> Response:
        self._promises.begin(request_id, session_id, work)
        return JSONResponse({"request_id": request_id, "model_id": model_id})

    async def _in_trainer(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._trainer, function, *arguments)


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
    """Scores the data of a request, and adds its gradient unless it is forward only (blocking).

    Raises:
        RequestRefused: the loss or a datum is not accepted; no gradient was added.
    """
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
