"""The coordinator over gRPC, as a node sees it.

Invariant: every call ends within its deadline or raises Unavailable; after a failure the next attempt to
connect waits, with jitter, so that a swarm never storms a coordinator that has just come back.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

import grpc

from swarm.clock import Clock, SystemClock
from swarm.config import CoordinatorLink
from swarm.errors import ConfigError, TooLarge, Unauthenticated, Unavailable
from swarm.identity import Identity
from swarm.types import Advice, NodeReport, PolicyVersion, short
from swarm.wire.body import version_to_message
from swarm.wire.convert import is_endpoint
from swarm.wire.reports import advice_from_message, report_to_heartbeat
from swarm.wire.session import AuthenticatedChannel, open_channel
from swarm.wire.status import error_of
from swarm.wire.v1 import coordinator_service_pb2 as pb
from swarm.wire.v1 import coordinator_service_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S: Final = 5.0
MAX_BACKOFF_S: Final = 15.0
FIRST_BACKOFF_S: Final = 0.25


class GrpcCoordinatorClient:
    """Implements `CoordinatorClient`; connects on the first call and again after each failure.

    Example:
        client = GrpcCoordinatorClient(config.coordinator, identity, config.run_id)
        advice = await client.heartbeat(report)
    """

    def __init__(
        self,
        link: CoordinatorLink,
        identity: Identity,
        run_id: str,
        clock: Clock | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> None:
        """Raises ConfigError when the link cannot be dialled."""
        self._addresses = [address.strip() for address in link.address.split(",")]
        for address in self._addresses:
            if not is_endpoint(address):
                raise ConfigError(f"coordinator.address: {address!a} is not host:port")
        if len(link.fingerprint) != 64:
            raise ConfigError("coordinator.fingerprint: expected 64 hex characters, as in the join link")
        self._fingerprint = link.fingerprint.lower()
        self._identity = identity
        self._run_id = run_id
        self._clock = clock or SystemClock()
        self._timeout_s = timeout_s
        self._rng = random.Random(identity.node_id)
        self._channel: AuthenticatedChannel | None = None
        self._stub: Any = None
        self._connecting = asyncio.Lock()
        self._calling = asyncio.Lock()  # a failed call drops the connection: no other may be under way on it
        self._failures = 0
        self._retry_at_s = 0.0
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        """True while the last call was answered and the connection holds."""
        return self._channel is not None

    async def heartbeat(self, report: NodeReport) -> Advice:
        """Renews the lease, reports figures, returns advice within its bounds. Raises Unavailable."""
        answer = await self._call("heartbeat", lambda stub: stub.Heartbeat, report_to_heartbeat(report))
        advice = advice_from_message(answer)
        if advice is None:
            raise Unavailable(f"coordinator {short(self._fingerprint)}: its advice is out of bounds")
        return advice

    async def record_version(self, version: PolicyVersion) -> None:
        """Adds a version to the ledger; a refusal is logged and not raised. Raises Unavailable."""
        request = pb.RecordVersionRequest(version=version_to_message(version))
        answer = await self._call("record_version", lambda stub: stub.RecordVersion, request)
        if not answer.accepted:
            logger.warning(
                "the ledger refused a version", extra={"step": version.step, "reason": str(answer.reason)[:200]}
            )

    async def leave(self) -> None:
        """Ends the lease at once. Raises Unavailable; does not connect just to say goodbye."""
        if self._channel is not None:
            await self._call("leave", lambda stub: stub.Leave, pb.LeaveRequest())

    async def close(self) -> None:
        """Ends the connection."""
        self._is_closed = True
        await self._drop()

    async def _call(self, what: str, method: Callable[[Any], Callable[..., Awaitable[Any]]], request: Any) -> Any:
        """One call within the deadline, on a connection that is made when there is none; one at a time."""
        async with self._calling:
            return await self._call_alone(what, method, request)

    async def _call_alone(self, what: str, method: Callable[[Any], Callable[..., Awaitable[Any]]], request: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                channel = await self._connected()
                metadata = await channel.metadata(self._timeout_s)
                answer = await method(self._stub)(request, timeout=self._timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            failed = error_of(error, f"coordinator {short(self._fingerprint)}: {what}")
            if not isinstance(failed, TooLarge):  # over its rate: the connection itself is good
                await self._failed()
            raise failed if isinstance(failed, Unavailable) else Unavailable(str(failed)) from None
        except TimeoutError:
            await self._failed()
            raise Unavailable(f"coordinator: no answer to {what} within {self._timeout_s} s") from None
        except Unavailable:
            await self._failed()
            raise
        self._failures = 0
        return answer

    async def _connected(self) -> AuthenticatedChannel:
        async with self._connecting:
            if self._is_closed:
                raise Unavailable("coordinator: the client is closed")
            if self._channel is not None:
                return self._channel
            wait_s = self._retry_at_s - self._clock.monotonic_s()
            if wait_s > self._timeout_s:
                raise Unavailable(f"coordinator: next attempt in {wait_s:.1f} s")
            if wait_s > 0:
                await asyncio.sleep(wait_s)
            self._channel = await self._open()
            self._stub = pb_grpc.CoordinatorServiceStub(self._channel.channel)
            return self._channel

    async def _open(self) -> AuthenticatedChannel:
        """The first address that proves to be the coordinator."""
        failures: list[str] = []
        is_wrong = False
        for address in self._addresses:
            try:
                return await open_channel(
                    address, self._fingerprint, self._identity, self._run_id, self._timeout_s / len(self._addresses)
                )
            except Unavailable as error:
                is_wrong = is_wrong or isinstance(error, Unauthenticated)
                failures.append(f"{address}: {error}")
        raise (Unauthenticated if is_wrong else Unavailable)("coordinator: " + "; ".join(failures))

    async def _failed(self) -> None:
        """Drops the connection and sets the earliest next attempt: doubling, half of it random."""
        if self._clock.monotonic_s() >= self._retry_at_s:
            backoff_s = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(self._failures, 10))
            self._failures += 1
            self._retry_at_s = self._clock.monotonic_s() + backoff_s * self._rng.uniform(0.5, 1.0)
        await self._drop()

    async def _drop(self) -> None:
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            await channel.close()
