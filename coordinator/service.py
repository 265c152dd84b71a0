"""CoordinatorService over gRPC: the core's answers to authenticated nodes.

Invariant: the caller's identity comes from its session alone, never from a request's fields.
"""

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack, aclosing
from typing import Any, Final, TypeVar

import grpc

from coordinator.core import CoordinatorCore, TakenReport
from coordinator.turns import CallerTurns
from swarm.errors import ConfigError, StorageFull, TooLarge, Unavailable
from swarm.flow import RateLimiter
from swarm.types import NodeId
from swarm.version_history import MAX_RECORDED
from swarm.wire.connection_limits import ConnectionBounds, peer_subnet
from swarm.wire.grpc_errors import rpc
from swarm.wire.reports import advice_to_message, heartbeat_to_report, version_or_none
from swarm.wire.rollout_groups import MAX_NAME_CHARS, version_to_message
from swarm.wire.run_manifest import SignedManifest
from swarm.wire.server import Sessions
from swarm.wire.v1 import coordinator_service_pb2 as pb
from swarm.wire.v1 import coordinator_service_pb2_grpc as pb_grpc

CALLS_PER_S = 50.0  # of one node, averaged
CALLS_BURST = 200.0
assert MAX_RECORDED <= CALLS_BURST, "each version counts as a call: a full batch would never pass"
HEARTBEATS_PER_S = 10.0  # of one node: it reports every 5 s, and each report is work and a write to the disk
HEARTBEATS_BURST = 20.0
MAX_CLIENTS = 20_000
# Of all nodes of a subnet: 200 nodes behind one router that report every second. Beyond it a call is refused unread.
SUBNET_CALLS_PER_S = 200.0
SUBNET_CALLS_BURST = 600.0
# A client has one call at a time on a connection. Beyond CONCURRENT_CALLS gRPC refuses every caller, so it
# has to be more than the connections that stay open can make.
STREAMS_PER_CONNECTION: Final = 8
CONCURRENT_CALLS: Final = STREAMS_PER_CONNECTION * ConnectionBounds().total
REQUEST_BYTES: Final = 64 * 1024  # the longest report has 45 KB, 100 versions have 25 KB; all calls together 1.5 GiB
STALL_TIMEOUT_S: Final = 120.0  # a watch ends if nothing is read for this long

STORING: Final = 1024  # reports of established nodes on their way to the disk
STRANGERS_STORING: Final = 64

Value = TypeVar("Value")
Context = grpc.aio.ServicerContext


class CoordinatorServicer(pb_grpc.CoordinatorServiceServicer):
    """Implements CoordinatorService for authenticated nodes.

    Args:
        core: state of the coordinator.
        sessions: sessions of the server, which authenticate callers.
        manifest: manifest of the run; the attribute may be set to a newer one.
        bootstrap_peers: returns the addresses of DHT peers; called for every GetManifest.
        stall_timeout_s: a watch ends if its caller reads nothing for this long.
        turns: turns of callers; None treats every node as established.
    """

    def __init__(
        self,
        core: CoordinatorCore,
        sessions: Sessions,
        manifest: SignedManifest,
        bootstrap_peers: Callable[[], tuple[str, ...]],
        stall_timeout_s: float = STALL_TIMEOUT_S,
        turns: CallerTurns | None = None,
    ) -> None:
        self._core = core
        self._sessions = sessions
        self.manifest = manifest
        self._bootstrap_peers = bootstrap_peers
        self._calls = RateLimiter[str](CALLS_PER_S, CALLS_BURST, MAX_CLIENTS)
        self._subnet_calls = RateLimiter[str](SUBNET_CALLS_PER_S, SUBNET_CALLS_BURST, MAX_CLIENTS)
        self._heartbeats = RateLimiter[NodeId](HEARTBEATS_PER_S, HEARTBEATS_BURST, MAX_CLIENTS)
        self._turns = turns or CallerTurns()
        self._places = {True: asyncio.Semaphore(STRANGERS_STORING), False: asyncio.Semaphore(STORING)}  # by is_stranger
        self._storing = set[asyncio.Task[None]]()
        self._storage_error = ""  # of the last report that went to the disk
        self._stall_timeout_s = stall_timeout_s

    def register(self, server: grpc.aio.Server) -> None:
        """Adds this service to a server."""
        add: Any = pb_grpc.add_CoordinatorServiceServicer_to_server
        add(self, server)

    def _caller(self, context: Context, num_calls: int = 1) -> NodeId:
        """Id of the caller, within its rate and that of its subnet. Raises Unauthenticated, Unavailable, TooLarge."""
        node_id = self._sessions.require(context)
        now_s = self._core.clock.monotonic_s()
        if not self._subnet_calls.spend(peer_subnet(context.peer()), now_s):
            raise self._too_many(context, f"{SUBNET_CALLS_PER_S:.0f} calls a second from this network")
        if not self._calls.spend(node_id, now_s, num_calls):
            raise self._too_many(context, f"{CALLS_PER_S:.0f} calls a second")
        return node_id

    def _too_many(self, context: Context, bound: str) -> TooLarge:
        return self._sessions.refused(context.peer(), TooLarge(f"more than {bound}; slow down"))

    async def _in_turn(
        self, context: Context, node_id: NodeId | None, work: Callable[[], Coroutine[Any, Any, Value]]
    ) -> Value:
        """Does a call's work in a turn of its caller, to the end even if the caller hangs up. Raises Unavailable."""
        peer = context.peer()

        async def take_turn() -> Value:
            async with self._turns.of_peer(peer) if node_id is None else self._turns.of_node(node_id, peer):
                return await work()

        try:
            return await asyncio.shield(asyncio.ensure_future(take_turn()))
        except Unavailable as error:
            raise self._sessions.refused(peer, error) from None

    @rpc
    async def GetManifest(self, request: pb.GetManifestRequest, context: Context) -> Any:
        """Returns the signed run manifest to any caller; no session is needed."""
        if not self._calls.spend(peer_subnet(context.peer()), self._core.clock.monotonic_s()):
            raise self._too_many(context, f"{CALLS_PER_S:.0f} calls a second")

        async def read() -> Any:
            signed = self.manifest
            return pb.GetManifestResponse(
                public_key=signed.public_key,
                signature=signed.signature,
                manifest=signed.data,
                bootstrap_peers=self._bootstrap_peers(),
            )

        return await self._in_turn(context, None, read)

    @rpc
    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> Any:
        """Renews the caller's lease and returns advice; the report is stored afterwards.

        If a report cannot be written, heartbeats fail with StorageFull until one can be written again; leases are
        renewed all the same.
        """
        node_id = self._caller(context)
        if not self._heartbeats.try_take(node_id, self._core.clock.monotonic_s()):
            raise self._too_many(context, f"{HEARTBEATS_PER_S:.0f} heartbeats a second")

        subnet = peer_subnet(context.peer())
        is_stranger = self._turns.is_stranger(node_id)

        async def beat() -> Any:
            if is_stranger:
                del request.edges[:]  # a newcomer's figures on others are neither read nor kept
            report = heartbeat_to_report(request, node_id)
            if report is None:
                raise ConfigError("heartbeat out of bounds")
            async with AsyncExitStack() as place:
                await place.enter_async_context(self._places[is_stranger])  # in turn: the disk is no faster for many
                taken = self._core.take_report(node_id, report, subnet)
                storing = asyncio.create_task(self._store(taken, place.pop_all()))
            self._storing.add(storing)
            storing.add_done_callback(self._storing.discard)
            if self._storage_error:
                raise StorageFull(self._storage_error)
            return advice_to_message(self._core.advice(node_id))

        return await self._in_turn(context, node_id, beat)

    async def _store(self, taken: TakenReport, place: AsyncExitStack) -> None:
        async with place:
            try:
                await self._core.store_report(taken)
            except StorageFull as error:
                self._storage_error = str(error)
            else:
                self._storage_error = ""

    async def finish(self) -> None:
        """Waits until all reports are stored; to be called after the last call of a node."""
        await asyncio.gather(*self._storing)

    @rpc
    async def RecordVersions(self, request: pb.RecordVersionsRequest, context: Context) -> Any:
        """Adds versions to the caller's lineage; each version counts as one call of the caller's rate."""
        num_versions = len(request.versions)
        node_id = self._caller(context, min(max(1, num_versions), MAX_RECORDED))

        async def record() -> Any:
            if not 0 < num_versions <= MAX_RECORDED:
                raise ConfigError(f"{num_versions} versions, expected 1 to {MAX_RECORDED}")
            versions = [version_or_none(version) for version in request.versions]
            whole = [version for version in versions if version is not None]
            if len(whole) < len(versions):
                raise ConfigError("version out of bounds")
            answers = await self._core.record_versions(node_id, whole)
            return pb.RecordVersionsResponse(
                answers=[pb.RecordedVersion(accepted=answer.accepted, reason=answer.reason) for answer in answers]
            )

        return await self._in_turn(context, node_id, record)

    @rpc
    async def WatchVersions(self, request: pb.WatchVersionsRequest, context: Context) -> None:
        """Sends the head of a lineage, then each new head, for as long as the caller reads."""
        node_id = self._caller(context)

        async def check() -> None:
            if not 0 < len(request.policy_id) <= MAX_NAME_CHARS:
                raise ConfigError(f"policy id of {len(request.policy_id)} characters, expected 1 to {MAX_NAME_CHARS}")

        await self._in_turn(context, node_id, check)
        async with aclosing(
            self._core.watch_versions(node_id, request.policy_id, peer_subnet(context.peer()))
        ) as heads:
            async for head in heads:
                await self._write(context, pb.WatchVersionsResponse(version=version_to_message(head)))

    async def _write(self, context: Context, response: Any) -> None:
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                await context.write(response)
        except TimeoutError:
            raise Unavailable(f"nothing was read for {self._stall_timeout_s} s; watch again") from None

    @rpc
    async def Leave(self, request: pb.LeaveRequest, context: Context) -> Any:
        """Ends the caller's lease."""
        node_id = self._caller(context)
        await self._in_turn(context, node_id, lambda: self._core.leave(node_id))
        return pb.LeaveResponse()
