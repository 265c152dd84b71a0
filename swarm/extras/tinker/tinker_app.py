"""The HTTP interface that the tinker SDK talks to: sessions, models in training, samplers, and promises of results.

    GET  /api/v1/healthz                    no key needed
    POST /api/v1/client/config              settings, which the SDK asks for first
    POST /api/v1/create_session             and session_heartbeat; a session that is silent for a while ends
    POST /api/v1/create_model               an adapter of the one model that is served
    POST /api/v1/forward_backward, optim_step, save_weights, save_weights_for_sampler, load_weights
    POST /api/v1/create_sampling_session, asample
    POST /api/v1/retrieve_future            result of a request that was promised
    GET  /api/v1/training_runs/RUN          what was saved last; DELETE .../checkpoints/KIND/NAME

Endpoints of models are in `tinker_training.py`, those of samplers in `tinker_samplers.py`.

Invariant: every table is bounded.

Source: the tinker SDK 0.38 (Apache-2.0): addresses, fields and states; no code of it is here.
"""

import asyncio
from typing import Final

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from swarm.clock import Clock
from swarm.extras.tinker.tinker_futures import Promises
from swarm.extras.tinker.tinker_http import Endpoint, body_of, guarded, read_json
from swarm.extras.tinker.tinker_requests import CreateSession, InSession, OfRequest
from swarm.extras.tinker.tinker_samplers import Publish, Samplers, TinkerModel, TinkerSamples
from swarm.extras.tinker.tinker_sessions import TinkerSessions
from swarm.extras.tinker.tinker_store import TinkerStore
from swarm.extras.tinker.tinker_training import TinkerTraining
from swarm.serving.openai_requests import RequestRefused

KEY_PREFIX: Final = "tml-"  # the SDK takes no other keys
POLL_S: Final = 25.0  # a client that waits for a result is answered that long after, at the latest
_PROTOBUF: Final = "application/x-protobuf"
_NOTE: Final = "adapters are on attention and MLP; the unembedding stays as it is, also with train_unembed"


class TinkerApp:
    """Answers the tinker SDK for one model.

    Args:
        model: model to train and to sample from.
        samplers: table of samplers.
        store: store of saved weights.
        key: secret that every request but healthz must have; begins with `tml-`.
        clock: clock of idle sessions and of training.
        publish: makes an adapter a version that nodes follow; None: no node follows.

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
        self._model, self.samplers, self._store, self._clock = model, samplers, store, clock
        self._promises = Promises()
        self._sessions = TinkerSessions(clock, self._end_work)
        sampling = TinkerSamples(model, samplers, store, self._sessions, self._promises, publish)
        self._training = TinkerTraining(model, sampling, store, self._sessions, self._promises, clock)
        posts: dict[str, Endpoint] = {
            "client/config": self._client_config,
            "client/dynamic_config": self._dynamic_config,
            "telemetry": self._telemetry,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            **self._training.posts,
            **sampling.posts,
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
        }

        def route(path: str, endpoint: Endpoint, *methods: str) -> Route:
            return Route(path, guarded(endpoint, key.encode()), methods=methods)

        self.routes = Starlette(
            routes=[
                Route("/api/v1/healthz", self._health, methods=["GET"]),
                route("/api/v1/get_server_capabilities", self._capabilities, "GET"),
                route("/api/v1/samplers/{sampler_id}", sampling.describe, "GET"),
                route("/api/v1/sessions/{session_id}/finish", self._finish, "POST"),
                route("/api/v1/training_runs/{run}", self._describe_run, "GET"),
                route("/api/v1/training_runs/{run}/checkpoints/{kind}/{name}", self._delete_saved, "DELETE"),
                *(route(f"/api/v1/{path}", endpoint, "POST") for path, endpoint in posts.items()),
                route("/{path:path}", self._unknown, "GET", "POST", "PUT", "DELETE"),
            ]
        )

    def close(self) -> None:
        """Ends training, engines and calls to nodes (blocking)."""
        self._training.close()
        self.samplers.close()

    # --- what the SDK asks first ----------------------------------------------------------------------

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _unknown(self, request: Request) -> Response:
        raise RequestRefused(f"{request.method} {request.url.path} is not served here", status=404)

    async def _client_config(self, request: Request) -> Response:
        await read_json(request, CreateSession)
        # Chunks in their order, so that little waits; half of the connections that the server takes.
        return JSONResponse({"parallel_fwdbwd_chunks": False, "sample_max_concurrent_requests": 512})

    async def _dynamic_config(self, request: Request) -> Response:
        return JSONResponse({"sample_cancel_enabled": True})

    async def _telemetry(self, request: Request) -> Response:
        await body_of(request)
        return JSONResponse({"status": "accepted"})  # and dropped

    async def _capabilities(self, request: Request) -> Response:
        model = {
            "model_name": self._model.name,
            "max_context_length": self._model.context_tokens,
            "trainable": True,
            "sampleable": True,
        }
        return JSONResponse({"supported_models": [model]})

    # --- saved weights --------------------------------------------------------------------------------

    async def _describe_run(self, request: Request) -> Response:
        """Answers with what the weights that a run saved last are of, and what its client wrote to it."""
        run = request.path_params["run"]
        saved = await asyncio.to_thread(self._store.newest_of, run)
        about = {
            "training_run_id": run,
            "base_model": saved.base_model,
            "model_owner": "owner of the key",
            "is_lora": True,
            "lora_rank": saved.shape.rank,
            "last_request_time": self._clock.now_s(),
            "user_metadata": dict(saved.notes),
        }
        return JSONResponse(about)

    async def _delete_saved(self, request: Request) -> Response:
        await asyncio.to_thread(self._store.delete, "tinker://{run}/{kind}/{name}".format(**request.path_params))
        return JSONResponse({})

    # --- sessions -------------------------------------------------------------------------------------

    async def _create_session(self, request: Request) -> Response:
        await read_json(request, CreateSession)
        session_id = self._sessions.begin()
        return JSONResponse({"type": "create_session", "session_id": session_id, "info_message": _NOTE})

    async def _heartbeat(self, request: Request) -> Response:
        asked = await read_json(request, InSession)
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

    # --- promises -------------------------------------------------------------------------------------

    async def _retrieve(self, request: Request) -> Response:
        asked = await read_json(request, OfRequest)
        reply = await self._promises.wait(asked.request_id, POLL_S)
        if reply is None:
            pending = {"type": "try_again", "request_id": asked.request_id, "queue_state": "active"}
            return JSONResponse(pending, 408)
        if isinstance(reply, bytes):
            return Response(reply, media_type=_PROTOBUF)
        return JSONResponse(reply)

    async def _cancel(self, request: Request) -> Response:
        asked = await read_json(request, OfRequest)
        if ":sample:" in asked.request_id:  # what trains would leave a gap in the order
            self._promises.cancel(asked.request_id)
        return JSONResponse({})
