"""CoordinatorService over gRPC: the core's answers to authenticated nodes.

Invariant: the caller's identity comes from its session alone, never from a request's fields.
"""

from collections.abc import Callable
from typing import Any

import grpc

from coordinator.core import CoordinatorCore
from swarm.errors import ConfigError
from swarm.wire.body import version_to_message
from swarm.wire.reports import advice_to_message, heartbeat_to_report, version_or_none
from swarm.wire.server import Sessions
from swarm.wire.status import answering
from swarm.wire.v1 import coordinator_service_pb2 as pb
from swarm.wire.v1 import coordinator_service_pb2_grpc as pb_grpc

MAX_LISTED = 1000  # versions or members in one answer

Context = grpc.aio.ServicerContext


class CoordinatorServicer(pb_grpc.CoordinatorServiceServicer):
    """Answers nodes.

    Args:
        manifest: signed manifest bytes, signature and public key.
        bootstrap_peers: addresses of DHT peers, asked for at every call.
    """

    def __init__(
        self,
        core: CoordinatorCore,
        sessions: Sessions,
        manifest: tuple[bytes, bytes, bytes],
        bootstrap_peers: Callable[[], tuple[str, ...]],
    ) -> None:
        self._core = core
        self._sessions = sessions
        self._manifest = manifest
        self._bootstrap_peers = bootstrap_peers

    def register(self, server: grpc.aio.Server) -> None:
        """Adds this service to a server."""
        add: Any = pb_grpc.add_CoordinatorServiceServicer_to_server
        add(self, server)

    async def GetManifest(self, request: pb.GetManifestRequest, context: Context) -> Any:
        """The signed run manifest, to anybody who has the link."""
        data, signature, public_key = self._manifest
        return pb.GetManifestResponse(
            public_key=public_key, signature=signature, manifest=data, bootstrap_peers=self._bootstrap_peers()
        )

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> Any:
        """Renews the caller's lease."""
        async with answering(context):
            node_id = self._sessions.require(context)
            report = heartbeat_to_report(request, node_id)
            if report is None:
                raise ConfigError("heartbeat out of bounds")
            return advice_to_message(await self._core.heartbeat(node_id, report))

    async def RecordVersion(self, request: pb.RecordVersionRequest, context: Context) -> Any:
        """Adds a version of the caller's lineage."""
        async with answering(context):
            node_id = self._sessions.require(context)
            version = version_or_none(request.version)
            if version is None:
                raise ConfigError("version out of bounds")
            recorded = await self._core.record_version(node_id, version)
            return pb.RecordVersionResponse(accepted=recorded.accepted, reason=recorded.reason)

    async def ListVersions(self, request: pb.ListVersionsRequest, context: Context) -> Any:
        """The history of one lineage."""
        async with answering(context):
            self._sessions.require(context)
            limit = min(request.limit or MAX_LISTED, MAX_LISTED)
            entries = self._core.ledger.versions(request.policy_id, request.after_step, limit)
            return pb.ListVersionsResponse(versions=[version_to_message(version) for version in entries])

    async def ListMembers(self, request: pb.ListMembersRequest, context: Context) -> Any:
        """Who is here."""
        async with answering(context):
            self._sessions.require(context)
            now_s = self._core.clock.now_s()
            members = self._core.membership.all()[:MAX_LISTED]
            return pb.ListMembersResponse(
                members=[
                    pb.Member(
                        node_id=member.node_id,
                        name=member.report.name,
                        endpoints=member.report.endpoints,
                        head=version_to_message(member.report.head),
                        last_seen_s=member.last_seen_s,
                        is_live=member.is_live(now_s),
                    )
                    for member in members
                ]
            )

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> Any:
        """Ends the caller's lease."""
        async with answering(context):
            await self._core.leave(self._sessions.require(context))
            return pb.LeaveResponse()
