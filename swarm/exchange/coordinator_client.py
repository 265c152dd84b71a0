"""The coordinator as a node calls it: over gRPC, with a deadline on every call.

Invariant: whatever goes wrong is `Unavailable`; the next call connects anew, to the next address.
"""

import asyncio
import logging
from typing import Any

import grpc

from swarm.config import CoordinatorLink
from swarm.errors import SwarmError, Unavailable
from swarm.identity import Identity
from swarm.types import Advice, NodeReport, PolicyVersion
from swarm.wire.body import version_to_message
from swarm.wire.manifest import JoinLink, RunManifest, open_manifest
from swarm.wire.reports import advice_from_message, report_to_heartbeat
from swarm.wire.session import AuthenticatedChannel, open_channel
from swarm.wire.status import error_of
from swarm.wire.v1 import coordinator_service_pb2 as pb
from swarm.wire.v1 import coordinator_service_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0


class GrpcCoordinatorClient:
    """Implements `swarm.interfaces.CoordinatorClient`; retries are the caller's (see `swarm.loops`)."""

    def __init__(self, link: CoordinatorLink, identity: Identity, run_id: str) -> None:
        self._addresses = [address for address in link.address.split(",") if address]
        self._fingerprint = link.fingerprint
        self._identity = identity
        self._run_id = run_id
        self._channel: AuthenticatedChannel | None = None
        self._connecting = asyncio.Lock()

    async def heartbeat(self, report: NodeReport) -> Advice:
        """Renews the lease and reports figures."""
        advice = advice_from_message(await self._call("Heartbeat", report_to_heartbeat(report)))
        if advice is None:
            raise Unavailable("the coordinator's advice is malformed")
        return advice

    async def record_version(self, version: PolicyVersion) -> None:
        """Adds a version to the ledger; a refusal is logged, the node goes on."""
        answer = await self._call("RecordVersion", pb.RecordVersionRequest(version=version_to_message(version)))
        if not answer.accepted:
            logger.warning("version refused by the ledger", extra={"step": version.step, "reason": answer.reason[:200]})

    async def leave(self) -> None:
        """Ends the lease at once."""
        await self._call("Leave", pb.LeaveRequest())

    async def fetch_manifest(self, link: JoinLink) -> tuple[RunManifest, tuple[str, ...]]:
        """The verified manifest and DHT peers to bootstrap from. Raises also ConfigError."""
        answer = await self._call("GetManifest", pb.GetManifestRequest())
        manifest = open_manifest(answer.manifest, answer.signature, answer.public_key, link)
        return manifest, tuple(peer for peer in answer.bootstrap_peers[:64] if len(peer) < 300)

    async def close(self) -> None:
        """Ends the connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.channel.close()

    async def _call(self, method: str, request: Any) -> Any:
        channel = await self._connected()
        stub: Any = pb_grpc.CoordinatorServiceStub(channel.channel)
        try:
            metadata = await channel.metadata(CALL_TIMEOUT_S)
            return await getattr(stub, method)(request, timeout=CALL_TIMEOUT_S, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            await self.close()
            raise error_of(error, f"coordinator, {method}") from None
        except SwarmError:
            await self.close()
            raise

    async def _connected(self) -> AuthenticatedChannel:
        async with self._connecting:
            if self._channel is None:
                last: Unavailable = Unavailable("coordinator.address is empty")
                for address in self._addresses:
                    try:
                        self._channel = await open_channel(
                            address, self._fingerprint, self._identity, self._run_id, CALL_TIMEOUT_S
                        )
                        break
                    except Unavailable as error:
                        last = error
                else:
                    raise last
            return self._channel


async def fetch_manifest(link: JoinLink, identity: Identity) -> tuple[RunManifest, tuple[str, ...]]:
    """Asks the link's coordinators for the run's manifest.

    Raises:
        Unavailable, Unauthenticated: none answered, or another key did.
        ConfigError: the manifest is not what the link promises.
    """
    where = CoordinatorLink(address=",".join(link.addresses), fingerprint=link.fingerprint)
    client = GrpcCoordinatorClient(where, identity, link.run_id)
    try:
        return await client.fetch_manifest(link)
    finally:
        await client.close()
