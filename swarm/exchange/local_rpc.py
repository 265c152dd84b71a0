"""The agent's LocalExchange over a Unix socket, for the trainer and generator process of the same node.

Invariant: nothing is lost when a worker dies in the middle of a call. The agent finishes a call that changes its state.
The next call joins a draw that still waits, and `LocalExchange.draw` returns a journalled draw again until its step was
reported.
"""

import asyncio
import json
import os
import secrets
import stat
import sys
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import grpc

from swarm.activity import Activity
from swarm.episode import (
    Actions,
    EpisodeOutcome,
    outcome_from_json,
    outcome_to_json,
    outcomes_from_json,
    outcomes_to_json,
)
from swarm.errors import ConfigError, Unavailable
from swarm.interfaces import LocalExchange, Verdict
from swarm.types import (
    ApplyReport,
    Attempt,
    Digest,
    Draw,
    Evaluation,
    PatchChain,
    PolicyVersion,
    RolloutGroup,
    SealedManifest,
    StepReport,
    WarmUpReport,
)
from swarm.wire.grpc_errors import Context, error_of, rpc
from swarm.wire.local import (
    MAX_LOCAL_MESSAGE_BYTES,
    Part,
    apply_report_from_json,
    draw_from_parts,
    draw_to_fields,
    evaluations_from_json,
    evaluations_to_json,
    report_to_json,
    step_report_from_json,
    verdict_from_message,
    verdict_to_message,
)
from swarm.wire.rollout_groups import body_to_group, group_to_body, version_from_message, version_to_message
from swarm.wire.v1 import local_service_pb2 as pb
from swarm.wire.v1 import local_service_pb2_grpc as pb_grpc
from swarm.wire.weights import MAX_LOCAL_MANIFEST_BYTES, bounded_bodies, manifest_from_message, manifest_to_message

Result = TypeVar("Result")
DrawOfStep = Draw  # inside the servicer the name Draw is a method

CALL_HANG_S: Final = 1800.0  # of an agent, in calls that do not wait by design; scoring a group is the longest
_STOP_GRACE_S: Final = 0.2
_OPTIONS: Final[list[tuple[str, Any]]] = [
    ("grpc.max_receive_message_length", MAX_LOCAL_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_LOCAL_MESSAGE_BYTES),
    ("grpc.use_local_subchannel_pool", 1),
]


def _address_of(socket_path: Path) -> str:
    path = str(socket_path.absolute())
    size_bytes, most_bytes = len(os.fsencode(path)), 107 if sys.platform == "linux" else 103  # sockaddr_un
    if size_bytes > most_bytes:
        raise ConfigError(
            f"dir: {path!r} has {size_bytes} bytes, a Unix socket at most {most_bytes}; choose a shorter one"
        )
    return f"unix:{path}"


def fresh_socket(directory: Path) -> Path:
    """Returns a socket path that no earlier start used: a worker that outlived its agent cannot meet the next one.

    Removes the sockets of earlier starts; only for the process that holds the directory. Raises ConfigError.
    """
    for old in directory.glob("agent-*.sock"):
        _remove_socket(old)
    return directory / f"agent-{secrets.token_hex(3)}.sock"


class LocalServer:
    """Serves one LocalExchange to processes of the same user."""

    def __init__(self, local: LocalExchange, socket_path: Path) -> None:
        self._socket_path = socket_path
        self._servicer = _LocalServicer(local)
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Listens on the socket, which only this user can open. Raises ConfigError if the socket cannot be made."""
        assert self._server is None, "start() was called twice"
        self._server = grpc.aio.server(options=_OPTIONS)
        cast(Any, pb_grpc.add_LocalServiceServicer_to_server)(self._servicer, self._server)
        _bind_privately(self._server, self._socket_path)
        await self._server.start()

    async def stop(self) -> None:
        """Ends every call and removes the socket."""
        if self._server is not None:
            await self._server.stop(_STOP_GRACE_S)
            self._server = None
        await self._servicer.stop()
        _remove_socket(self._socket_path)


def _bind_privately(server: grpc.aio.Server, path: Path) -> None:
    address = _address_of(path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_socket(path)
        # Binding creates the file inside this call, so the mode is right from the first moment.
        before = os.umask(0o177)
        try:
            server.add_insecure_port(address)
        finally:
            os.umask(before)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{path}: cannot listen there: {error}") from None


def _remove_socket(path: Path) -> None:
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        raise ConfigError(f"{path}: exists and is no socket; move it away")
    path.unlink(missing_ok=True)


class _LocalServicer(pb_grpc.LocalServiceServicer):
    """Answers the worker from a LocalExchange."""

    def __init__(self, local: LocalExchange) -> None:
        self._local = local
        self._drawing: asyncio.Task[DrawOfStep] | None = None
        self._running: set[asyncio.Task[Any]] = set()

    def _begin(self, work: Coroutine[Any, Any, Result]) -> "asyncio.Task[Result]":
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _finish(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs `work` to its end, also when the call that began it is cancelled."""
        return await asyncio.shield(self._begin(work))

    @rpc
    async def Capacity(self, request: pb.CapacityRequest, context: Context) -> pb.CapacityResponse:
        """Returns admission capacity once it is positive (0 without `wait`), and the number of questions asked."""
        count = await self._local.wait_capacity() if request.wait else 0
        return pb.CapacityResponse(num_groups=count, num_asked=await self._local.num_asked())

    @rpc
    async def Put(self, request: pb.PutRequest, context: Context) -> pb.PutResponse:
        """Stores one group of ours, also if the worker dies during the call, and returns its mean reward."""
        group = body_to_group(request.body, request.producer)
        outcomes = outcomes_from_json(request.outcomes) if request.outcomes else ()
        return pb.PutResponse(reward_mean=await self._finish(self._local.put(group, outcomes)))

    @rpc
    async def Draw(self, request: pb.DrawRequest, context: Context) -> None:
        """Waits for the next draw, or joins the wait that a dead worker left behind."""
        if self._drawing is None or self._drawing.done():
            head = version_from_message(request.head)
            self._drawing = self._begin(self._local.draw(head))
        draw = await asyncio.shield(self._drawing)
        for fields in draw_to_fields(draw):
            await context.write(pb.DrawResponse(**fields))

    @rpc
    async def Redraw(self, request: pb.RedrawRequest, context: Context) -> None:
        """Sends the journalled draws from a step on."""
        for draw in await self._local.redraw(request.from_step):
            for fields in draw_to_fields(draw):
                await context.write(pb.RedrawResponse(**fields))

    @rpc
    async def BeginAgain(self, request: pb.BeginAgainRequest, context: Context) -> pb.BeginAgainResponse:
        """Returns the group to try alone before a journalled step is made again, and the groups to leave out."""
        attempt = await self._finish(self._local.begin_again(request.step, request.passed or None))
        return pb.BeginAgainResponse(trial=attempt.trial or b"", left_out=sorted(attempt.left_out))

    @rpc
    async def Publish(self, request: pb.PublishRequest, context: Context) -> pb.PublishResponse:
        """Publishes a new version of our own lineage."""
        version, bodies = version_from_message(request.version), bounded_bodies(request.manifests)
        await self._finish(self._local.publish(version, bodies))
        return pb.PublishResponse()

    @rpc
    async def NextUpdate(self, request: pb.NextUpdateRequest, context: Context) -> None:
        """Sends the patch chain to a newer version; without `wait`, sends nothing if there is none."""
        held = version_from_message(request.held) if request.HasField("held") else None
        for sealed in await self._local.next_update(held, wait=request.wait) or ():
            await context.write(pb.NextUpdateResponse(manifest=manifest_to_message(sealed, MAX_LOCAL_MANIFEST_BYTES)))

    @rpc
    async def Applied(self, request: pb.AppliedRequest, context: Context) -> pb.AppliedResponse:
        """Records that an engine loaded a version, or refused it."""
        await self._finish(self._local.report_update(apply_report_from_json(request.report)))
        return pb.AppliedResponse()

    @rpc
    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.ReportResponse:
        """Records the report of one step."""
        await self._finish(self._local.report_step(step_report_from_json(request.report)))
        return pb.ReportResponse()

    @rpc
    async def Saved(self, request: pb.SavedRequest, context: Context) -> pb.SavedResponse:
        """Records a checkpoint that was written, or the error that prevented it."""
        await self._finish(self._local.report_checkpoint(request.next_draw, request.error))
        return pb.SavedResponse()

    @rpc
    async def Evaluated(self, request: pb.EvaluatedRequest, context: Context) -> pb.EvaluatedResponse:
        """Records evaluations of a version."""
        await self._finish(self._local.report_evaluations(evaluations_from_json(request.evaluations)))
        return pb.EvaluatedResponse()

    @rpc
    async def WarmedUp(self, request: pb.WarmedUpRequest, context: Context) -> pb.WarmedUpResponse:
        """Records the warm-up that version 0 comes from."""
        await self._finish(self._local.report_warm_up(WarmUpReport(**json.loads(request.report))))
        return pb.WarmedUpResponse()

    @rpc
    async def ReportActivity(self, request: pb.ReportActivityRequest, context: Context) -> pb.ReportActivityResponse:
        """Records the newest activity of the worker."""
        activity = Activity(
            what=request.what,
            done=request.done,
            total=request.total,
            num_tokens=request.num_tokens,
            at_s=request.at_s,
        )
        await self._local.report_activity(activity)
        return pb.ReportActivityResponse()

    @rpc
    async def Verify(self, request: pb.VerifyRequest, context: Context) -> pb.VerifyResponse:
        """Scores episodes with the sandboxed verifier."""
        episodes = [tuple(actions) for actions in json.loads(request.episodes)]
        verdict = await self._local.verify(request.env, request.task_id, episodes)
        return verdict_to_message(verdict)

    @rpc
    async def Step(self, request: pb.StepRequest, context: Context) -> pb.StepResponse:
        """Returns the outcome so far of an episode, given all its actions, the newest last."""
        outcome = await self._local.step(request.env, request.task_id, tuple(request.actions))
        return pb.StepResponse(outcome=json.dumps(outcome_to_json(outcome)).encode())

    async def stop(self) -> None:
        """Cancels running calls, including a waiting draw."""
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


class LocalClient:
    """Client of the agent in its worker process; implements `swarm.interfaces.LocalExchange`, whose docstrings hold.

    Every method raises the error of the agent's own method, or Unavailable when the agent is gone.
    """

    def __init__(self, socket_path: Path) -> None:
        self._channel = grpc.aio.insecure_channel(_address_of(socket_path), options=_OPTIONS)
        self._stub: Any = pb_grpc.LocalServiceStub(self._channel)

    async def wait_capacity(self) -> int:
        response = await self._call("Capacity", pb.CapacityRequest(wait=True), timeout_s=None)
        return response.num_groups

    async def num_asked(self) -> int:
        response = await self._call("Capacity", pb.CapacityRequest(wait=False))
        return response.num_asked

    async def put(self, group: RolloutGroup, outcomes: Sequence[EpisodeOutcome] = ()) -> float:
        told = outcomes_to_json(outcomes) if outcomes else b""
        request = pb.PutRequest(body=group_to_body(group), producer=group.producer, outcomes=told)
        response = await self._call("Put", request)
        return response.reward_mean

    async def draw(self, head: PolicyVersion) -> Draw:
        async with aclosing(self._draws("Draw", pb.DrawRequest(head=version_to_message(head)))) as draws:
            async for draw in draws:
                return draw
        raise Unavailable("the agent ended the call without a draw")

    async def redraw(self, from_step: int) -> list[Draw]:
        return [draw async for draw in self._draws("Redraw", pb.RedrawRequest(from_step=from_step))]

    async def begin_again(self, step: int, passed: Digest | None = None) -> Attempt:
        # Without a limit of time, as a draw: on a full disk the agent waits for room before it answers.
        response = await self._call("BeginAgain", pb.BeginAgainRequest(step=step, passed=passed or b""), timeout_s=None)
        return Attempt(trial=response.trial or None, left_out=frozenset(response.left_out))

    async def publish(self, version: PolicyVersion, manifests: Sequence[bytes] = ()) -> None:
        """Publishes a new version, with unsigned manifests of the patches to it. Raises TooLarge."""
        request = pb.PublishRequest(version=version_to_message(version), manifests=bounded_bodies(manifests))
        await self._call("Publish", request)

    async def next_update(self, held: PolicyVersion | None, *, wait: bool) -> PatchChain | None:
        request = pb.NextUpdateRequest(held=None if held is None else version_to_message(held), wait=wait)
        call = self._stub.NextUpdate(request, timeout=None if wait else CALL_HANG_S)
        chain: list[SealedManifest] = []
        try:
            async for part in call:
                chain.append(manifest_from_message(part.manifest, MAX_LOCAL_MANIFEST_BYTES))
        except grpc.RpcError as error:
            raise error_of(error, "agent, NextUpdate", is_made_here=True) from None
        finally:
            call.cancel()
        return tuple(chain) or None

    async def report_update(self, report: ApplyReport) -> None:
        await self._call("Applied", pb.AppliedRequest(report=report_to_json(report)))

    async def report_step(self, report: StepReport) -> None:
        await self._call("Report", pb.ReportRequest(report=report_to_json(report)))

    async def report_checkpoint(self, next_draw: int, error: str = "") -> None:
        await self._call("Saved", pb.SavedRequest(next_draw=next_draw, error=error))

    async def report_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        await self._call("Evaluated", pb.EvaluatedRequest(evaluations=evaluations_to_json(evaluations)))

    async def report_warm_up(self, report: WarmUpReport) -> None:
        await self._call("WarmedUp", pb.WarmedUpRequest(report=json.dumps(asdict(report)).encode()))

    async def report_activity(self, activity: Activity) -> None:
        await self._call("ReportActivity", pb.ReportActivityRequest(**asdict(activity)))

    async def verify(self, env: str, task_id: int, episodes: Sequence[Actions]) -> Verdict:
        request = pb.VerifyRequest(env=env, task_id=task_id, episodes=json.dumps(episodes).encode())
        response = await self._call("Verify", request)
        return verdict_from_message(response)

    async def step(self, env: str, task_id: int, actions: Actions) -> EpisodeOutcome:
        response = await self._call("Step", pb.StepRequest(env=env, task_id=task_id, actions=actions))
        return outcome_from_json(json.loads(response.outcome))

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close(grace=None)

    async def _call(self, method: str, request: Any, timeout_s: float | None = CALL_HANG_S) -> Any:
        try:
            return await getattr(self._stub, method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            raise error_of(error, f"agent, {method}", is_made_here=True) from None

    async def _draws(self, method: str, request: Any) -> AsyncGenerator[Draw, None]:
        """Yields whole draws from a stream of parts. Raises Unavailable if the stream ends within a draw."""
        call = getattr(self._stub, method)(request)
        parts: list[Part] = []  # header and groups of the draw that is arriving
        try:
            async for part in call:
                parts.append(part)
                if len(parts) > parts[0].num_groups:
                    yield draw_from_parts(parts[0], parts[1:])
                    parts = []
        except grpc.RpcError as error:
            raise error_of(error, f"agent, {method}", is_made_here=True) from None
        finally:
            call.cancel()
        if parts:
            raise Unavailable(f"agent, {method}: ended after {len(parts) - 1} of {parts[0].num_groups} groups")
