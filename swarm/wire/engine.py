"""An engine in a process of its own over a Unix socket: the calls of a worker, and what answers them there.

Invariant: nothing here knows an engine; what it raises crosses the socket as the same error.
"""

import contextlib
import os
from collections.abc import AsyncIterator, Awaitable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, cast

import grpc
import numpy as np

from swarm.errors import Unavailable, WeightsRefused
from swarm.types import Canary, Digest, FloatArray, LoadReport, PolicyVersion, Rollout, Sampling
from swarm.wire.grpc_errors import Context, answering, error_of
from swarm.wire.rollout_groups import (
    rollout_from_message,
    rollout_to_message,
    sampling_from_message,
    sampling_to_message,
    version_from_message,
    version_to_message,
)
from swarm.wire.v1 import engine_service_pb2 as pb
from swarm.wire.v1 import engine_service_pb2_grpc as pb_grpc
from swarm.wire.weights import canary_from_message, canary_to_message

MAX_MESSAGE_BYTES: Final = 64 << 20
QUICK_CALL_S: Final = 60.0  # State; the others last as long as their work
CANCEL_S: Final = 10.0  # a cancel that did not arrive by then would hit another call
_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
]
_STOP_GRACE_S: Final = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateRequest:
    """A call of generate."""

    prompts: Sequence[Sequence[int]]
    num_samples: int
    sampling: Sampling  # max_new_tokens alone where greedy
    seeds: Sequence[int]  # one per prompt and sample, in that order; of no use where greedy
    greedy: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """One sequence that ended."""

    prompt: int
    sample: int
    rollout: Rollout  # without its text


@dataclass(frozen=True, kw_only=True, slots=True)
class NewWeights:
    """A version that an engine should become."""

    version: PolicyVersion
    path: Path  # safetensors
    digest: Digest  # of the published tensors in it
    canaries: Sequence[Canary]
    tolerance_nats: float
    in_flight: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineState:
    """What an engine is, and what it serves."""

    name: str
    version: PolicyVersion
    num_loads: int


class EngineHandler(Protocol):
    """What an engine does for the worker; see `swarm.interfaces.Generator` for what each call promises."""

    def state(self) -> EngineState:
        """What it serves now."""
        ...

    def generate(self, wanted: GenerateRequest) -> AsyncIterator[Made]:
        """Sequences as they end; those still in the making end when the iterator is closed. Raises ConfigError."""
        ...

    def cancel(self) -> None:
        """Ends all sequences in the making: they come out aborted."""
        ...

    async def score(self, sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
        """[T] log-probs of each sequence. Raises ConfigError."""
        ...

    async def load(self, new: NewWeights) -> LoadReport:
        """Becomes that version, or raises WeightsRefused or ConfigError and stays what it was."""
        ...


# --- in the engine's process -------------------------------------------------------------------


async def serve_engine(handler: EngineHandler, socket_path: str, until: Awaitable[None]) -> None:
    """Answers on a socket (absolute path) that only this user can open, until `until` is done."""
    server = grpc.aio.server(options=_OPTIONS)
    cast(Any, pb_grpc.add_EngineServiceServicer_to_server)(_EngineServicer(handler), server)
    before = os.umask(0o177)  # binding creates the file, so its mode is right from the first moment
    try:
        server.add_insecure_port(f"unix:{socket_path}")
    finally:
        os.umask(before)
    await server.start()
    try:
        await until
    finally:
        await server.stop(_STOP_GRACE_S)


class _EngineServicer(pb_grpc.EngineServiceServicer):
    """Answers the worker from an EngineHandler."""

    def __init__(self, handler: EngineHandler) -> None:
        self._handler = handler

    async def State(self, request: pb.StateRequest, context: Context) -> pb.StateResponse:
        """What the engine serves."""
        state = self._handler.state()
        return pb.StateResponse(version=version_to_message(state.version), name=state.name, num_loads=state.num_loads)

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        """Sequences as they end."""
        async with answering(context):
            wanted = GenerateRequest(
                prompts=[list(prompt.token_ids) for prompt in request.prompts],
                num_samples=request.num_samples,
                sampling=sampling_from_message(request.sampling),
                seeds=list(request.seeds),
                greedy=request.greedy,
            )
            async with contextlib.aclosing(cast(Any, self._handler.generate(wanted))) as made:
                async for each in made:
                    rollout = rollout_to_message(each.rollout)
                    yield pb.GenerateResponse(prompt=each.prompt, sample=each.sample, rollout=rollout)

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:
        """Ends every sequence in the making."""
        self._handler.cancel()
        return pb.CancelResponse()

    async def ScoreSequences(self, request: pb.ScoreSequencesRequest, context: Context) -> pb.ScoreSequencesResponse:
        """Log-probs of given sequences."""
        async with answering(context):
            scores = await self._handler.score([list(sequence.token_ids) for sequence in request.sequences])
            return pb.ScoreSequencesResponse(logprobs=[each.astype("<f4").tobytes() for each in scores])
        raise AssertionError("answering() ends the call")

    async def Load(self, request: pb.LoadRequest, context: Context) -> pb.LoadResponse:
        """Replaces the weights, all or nothing."""
        async with answering(context):
            new = NewWeights(
                version=version_from_message(request.version),
                path=Path(request.path),
                digest=request.digest,
                canaries=[canary_from_message(message) for message in request.canaries],
                tolerance_nats=request.tolerance_nats,
                in_flight=request.in_flight,
            )
            try:
                report = await self._handler.load(new)
            except WeightsRefused as error:
                return pb.LoadResponse(error=str(error) or "refused")
            return pb.LoadResponse(mismatch_nats=report.mismatch_nats, pause_seconds=report.pause_s)
        raise AssertionError("answering() ends the call")


# --- in the worker's process -------------------------------------------------------------------


class EngineClient:
    """Blocking calls to an engine's process; may be used by several threads at once.

    Every call raises Unavailable when the process is gone.
    """

    def __init__(self, socket_path: str) -> None:
        self._channel = grpc.insecure_channel(f"unix:{socket_path}", options=_OPTIONS)
        self._stub = pb_grpc.EngineServiceStub(self._channel)
        self._cancel: object = None  # the call under way: gRPC ends those that nobody holds
        self._is_closed = False

    def close(self) -> None:
        """Ends the connection and its calls."""
        self._is_closed = True
        self._channel.close()

    def state(self) -> EngineState:
        """What the engine serves."""
        with self._errors("engine state"):
            response = self._stub.State(pb.StateRequest(), timeout=QUICK_CALL_S, wait_for_ready=True)
            version = version_from_message(response.version)
            return EngineState(name=response.name, version=version, num_loads=response.num_loads)

    def generate(self, wanted: GenerateRequest) -> Iterator[Made]:
        """Sequences as they end. Raises ConfigError."""
        request = pb.GenerateRequest(
            prompts=[pb.TokenSequence(token_ids=prompt) for prompt in wanted.prompts],
            num_samples=wanted.num_samples,
            sampling=sampling_to_message(wanted.sampling),
            seeds=wanted.seeds,
            greedy=wanted.greedy,
        )
        with self._errors("generate"):
            for response in self._stub.Generate(request):
                rollout = rollout_from_message(response.rollout)
                yield Made(prompt=response.prompt, sample=response.sample, rollout=rollout)

    def cancel(self) -> None:
        """Asks for the end of every sequence in the making, and does not wait for it."""
        with self._errors("cancel"):
            self._cancel = cast(Any, self._stub.Cancel).future(pb.CancelRequest(), timeout=CANCEL_S)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[FloatArray]:
        """[T] log-probs of each sequence. Raises ConfigError."""
        request = pb.ScoreSequencesRequest(sequences=[pb.TokenSequence(token_ids=each) for each in sequences])
        with self._errors("score"):
            response = self._stub.ScoreSequences(request)
            return [np.frombuffer(each, "<f4").astype(np.float32) for each in response.logprobs]

    def load(self, new: NewWeights) -> LoadReport:
        """Has the engine become a version. Raises WeightsRefused, ConfigError."""
        request = pb.LoadRequest(
            version=version_to_message(new.version),
            path=str(new.path),
            digest=new.digest,
            canaries=[canary_to_message(each) for each in new.canaries],
            tolerance_nats=new.tolerance_nats,
            in_flight=new.in_flight,
        )
        with self._errors("load"):
            response = self._stub.Load(request)
        if response.error:
            raise WeightsRefused(response.error)
        return LoadReport(pause_s=response.pause_seconds, mismatch_nats=response.mismatch_nats)

    @contextlib.contextmanager
    def _errors(self, what: str) -> Generator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise error_of(error, what, is_made_here=True) from None
        except ValueError:  # of gRPC where the channel is closed
            if self._is_closed:
                raise Unavailable(f"{what}: the connection was closed") from None
            raise
