"""Client of the coordinator: gRPC calls, and the versions, figures and advice that a node exchanges with it.

Invariant: every call except a watch returns or raises Unavailable within its timeout, once earlier calls have ended;
after a failure the next attempt to connect waits, with jitter, so that a swarm never storms a coordinator that is back.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Final

import grpc

from swarm.clock import Clock, SystemClock
from swarm.config import CoordinatorLink
from swarm.errors import ConfigError, TooLarge, Unauthenticated, Unavailable
from swarm.flow import Backoff, BoundedTable
from swarm.identity import Identity
from swarm.types import Advice, EdgeReport, NodeId, NodeReport, PolicyVersion, short
from swarm.wire.adverts import is_endpoint
from swarm.wire.grpc_errors import calling, error_of
from swarm.wire.reports import MAX_EDGES, advice_from_message, report_to_heartbeat, version_or_none
from swarm.wire.rollout_groups import version_to_message
from swarm.wire.session import AuthenticatedChannel, open_channel
from swarm.wire.v1 import coordinator_service_pb2 as pb
from swarm.wire.v1 import coordinator_service_pb2_grpc as pb_grpc

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S: Final = 5.0
MAX_BACKOFF_S: Final = 15.0
FIRST_BACKOFF_S: Final = 0.25
MAX_PENDING_VERSIONS: Final = 10_000  # kept for a coordinator that is away


class GrpcCoordinatorClient:
    """gRPC implementation of `CoordinatorClient`; connects on the first call and again after each failure.

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
        credential: Callable[[], bytes] = bytes,
        note_clock: Callable[[float, float], None] = lambda now_s, at_s: None,
    ) -> None:
        """Creates a client that is not connected yet.

        Args:
            credential: returns the credential that each connection shows.
            note_clock: called with the coordinator's wall clock, and our monotonic clock at that moment.

        Raises:
            ConfigError: an address or the fingerprint of `link` is invalid.
        """
        self._credential, self._note_clock = credential, note_clock
        self._addresses = list(link.addresses)
        if not self._addresses or not all(map(is_endpoint, self._addresses)):
            raise ConfigError(f"coordinator.address: {link.address!a} is not host:port")
        if len(link.fingerprint) != 64:
            raise ConfigError("coordinator.fingerprint: expected 64 hex characters, as in the join link")
        self._has_warned_of_twin = False
        self._fingerprint = link.fingerprint.lower()
        self._identity = identity
        self._run_id = run_id
        self._clock = clock or SystemClock()
        self._timeout_s = timeout_s
        rng = random.Random(identity.node_id)
        self._channel: AuthenticatedChannel | None = None
        self._stub: Any = None
        self._connecting = asyncio.Lock()
        self._calling = asyncio.Lock()  # a failed call drops the connection: no other may be under way on it
        self._retry = _RetryGate(self._clock, rng)
        # Every watch has a connection of its own, so that neither it nor a call can break or delay the other.
        self._watched: set[AuthenticatedChannel] = set()
        self._watch_retry = _RetryGate(self._clock, rng)
        self._is_closed = False

    @property
    def is_connected(self) -> bool:
        """True while a connection is open; a failed call closes it."""
        return self._channel is not None

    def follow_key(self, fingerprint: NodeId) -> None:
        """Replaces the key of the coordinator that the next connection expects."""
        self._fingerprint = fingerprint

    async def heartbeat(self, report: NodeReport) -> Advice:
        """Renews the lease and reports figures; returns the advice. Raises Unavailable, also for invalid advice."""
        answer = await self._call("heartbeat", lambda stub: stub.Heartbeat, report_to_heartbeat(report))
        advice = advice_from_message(answer)
        if advice is None:
            raise Unavailable(f"coordinator {short(self._fingerprint)}: its advice is out of bounds")
        return advice

    async def record_versions(self, versions: Sequence[PolicyVersion]) -> None:
        """Adds versions to the ledger in one call; refused versions are only logged. Raises Unavailable."""
        request = pb.RecordVersionsRequest(versions=map(version_to_message, versions))
        response = await self._call("record_versions", lambda stub: stub.RecordVersions, request)
        if len(response.answers) != len(versions):
            raise Unavailable(f"coordinator: {len(response.answers)} answers to {len(versions)} versions")
        for version, answer in zip(versions, response.answers, strict=True):
            if not answer.accepted:
                self._warn_of_twin(version.step, str(answer.reason)[:200])

    def _warn_of_twin(self, step: int, reason: str) -> None:
        """Logs a refused version: the first as a warning with its likely cause, the others at debug level."""
        level = logging.DEBUG if self._has_warned_of_twin else logging.WARNING
        self._has_warned_of_twin = True
        fix = "where its directory was copied, delete identity.key in the copy; else stop one of the two"
        message = "the ledger refused a version: does another process run with this node's key?"
        logger.log(level, message, extra={"step": step, "reason": reason, "fix": fix})

    async def watch_versions(self, policy_id: str) -> AsyncIterator[PolicyVersion]:
        """Yields the head of a lineage in the ledger, then each new head; a slow reader skips to the newest.

        The head goes back where the owner resumed from an earlier version and made other weights from there.

        Raises:
            Unavailable: the watch did not open, or broke; a new watch begins with the head again.
        """
        channel = await self._open_watched()
        try:
            async with aclosing(self._heads(channel, policy_id)) as heads:
                async for version in heads:
                    self._watch_retry.reset()
                    yield version
        except Unavailable:
            self._watch_retry.failed()
            raise
        finally:
            self._watched.discard(channel)
            await channel.close()

    async def _heads(self, channel: AuthenticatedChannel, policy_id: str) -> AsyncGenerator[PolicyVersion, None]:
        what = f"coordinator {short(self._fingerprint)}: watch of {short(policy_id)}"
        metadata = await channel.metadata(self._timeout_s)
        stub: Any = pb_grpc.CoordinatorServiceStub(channel.channel)
        with calling(what):
            async for response in stub.WatchVersions(pb.WatchVersionsRequest(policy_id=policy_id), metadata=metadata):
                version = version_or_none(response.version)
                if version is None or version.policy_id != policy_id or not version.digest:
                    raise Unavailable(f"{what}: a version out of bounds or of another lineage")
                yield version
        raise Unavailable(f"{what}: the coordinator ended it")

    async def leave(self) -> None:
        """Ends the lease at once; does nothing if no connection is open. Raises Unavailable."""
        if self._channel is not None:
            await self._call("leave", lambda stub: stub.Leave, pb.LeaveRequest())

    async def close(self) -> None:
        """Ends every connection."""
        self._is_closed = True
        await asyncio.gather(self._drop(), *(channel.close() for channel in list(self._watched)))

    async def _call(self, what: str, method: Callable[[Any], Callable[..., Awaitable[Any]]], request: Any) -> Any:
        """Makes one call at a time, within the timeout, and connects first if necessary. Raises Unavailable."""
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
        self._retry.reset()
        return answer

    async def _connected(self) -> AuthenticatedChannel:
        async with self._connecting:
            if self._is_closed:
                raise Unavailable("coordinator: the client is closed")
            if self._channel is not None:
                return self._channel
            await self._retry.wait(self._timeout_s)
            self._channel = await self._open()
            self._stub = pb_grpc.CoordinatorServiceStub(self._channel.channel)
            return self._channel

    async def _open_watched(self) -> AuthenticatedChannel:
        """Opens the connection of one watch, after the pause for earlier failures. Raises Unavailable."""
        await self._watch_retry.wait(MAX_BACKOFF_S)
        if self._is_closed:
            raise Unavailable("coordinator: the client is closed")
        try:
            channel = await self._open()
        except Unavailable:
            self._watch_retry.failed()
            raise
        self._watched.add(channel)
        return channel

    async def _open(self) -> AuthenticatedChannel:
        """Connection to the first address that proves to be the coordinator. Raises Unavailable or Unauthenticated."""
        failures: list[str] = []
        is_wrong = False
        for address in self._addresses:
            try:
                timeout_s = self._timeout_s / len(self._addresses)
                return await open_channel(
                    address,
                    self._fingerprint,
                    self._identity,
                    self._run_id,
                    timeout_s,
                    credential=self._credential,
                    note_clock=lambda _, now_s, at_s: self._note_clock(now_s, at_s),
                )
            except Unavailable as error:
                is_wrong = is_wrong or isinstance(error, Unauthenticated)
                failures.append(str(error))
        raise (Unauthenticated if is_wrong else Unavailable)("coordinator: " + "; ".join(failures))

    async def _failed(self) -> None:
        """Drops the connection and sets the earliest next attempt."""
        self._retry.failed()
        await self._drop()

    async def _drop(self) -> None:
        channel, self._channel, self._stub = self._channel, None, None
        if channel is not None:
            await channel.close()


class CoordinatorView:
    """A node's side of the control plane: figures and versions to report, and advice to follow.

    A node works without any of them. Advice ends with its lease and can only lower the node's own measurements.

    Example:
        view.apply_advice(await coordinator.heartbeat(own_report(agent, rate)))
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._advice, self._advice_ends_s = Advice(), 0.0
        self.pending_versions: list[PolicyVersion] = []  # not yet in the ledger, oldest first
        self.edges = BoundedTable[NodeId, EdgeReport](MAX_EDGES)  # newest of each source; a report carries all
        self.evaluations: dict[str, float] = {}  # env/split -> newest accuracy
        self.refusal = ""  # why the two accepted no session of each other since the last answer

    @property
    def advice(self) -> Advice:
        """The coordinator's newest advice; the default `Advice()`, without any opinion, once its lease ran out."""
        return self._advice if self._clock.monotonic_s() < self._advice_ends_s else Advice()

    def apply_advice(self, advice: Advice) -> None:
        """Follows the advice of a heartbeat's answer until its lease ends."""
        self._advice, self._advice_ends_s = advice, self._clock.monotonic_s() + advice.lease_s

    def queue_version(self, version: PolicyVersion) -> None:
        """Queues a version of ours for the ledger; a full queue drops the version, and the ledger has a gap."""
        if len(self.pending_versions) < MAX_PENDING_VERSIONS:
            self.pending_versions.append(version)

    def record_edges(self, edges: Iterable[EdgeReport]) -> None:
        """Records the off-policy figures of a step, the newest of each source."""
        for edge in edges:
            self.edges[edge.source] = edge

    def source_weights(self) -> dict[NodeId, float]:
        """Weight of each source: its measured share of effective sample size (else 1), which advice can only lower."""
        weights = {source: edge.ess_share for source, edge in self.edges.items()}
        for source, weight in self.advice.source_weights.items():
            weights[source] = min(weights.get(source, 1.0), weight)
        return weights


class _RetryGate:
    """The earliest time of the next attempt to connect; each failure delays it."""

    def __init__(self, clock: Clock, rng: random.Random) -> None:
        self._clock = clock
        self._backoff = Backoff(rng, FIRST_BACKOFF_S, MAX_BACKOFF_S)
        self._retry_at_s = 0.0  # monotonic

    def failed(self) -> None:
        """Sets the time of the earliest next attempt; failures of concurrent attempts count once."""
        now_s = self._clock.monotonic_s()
        if now_s >= self._retry_at_s:
            self._retry_at_s = now_s + self._backoff.next_s()

    def reset(self) -> None:
        """Resets the next pause to the shortest, after a success."""
        self._backoff.reset()

    async def wait(self, max_wait_s: float) -> None:
        """Waits until an attempt may be made. Raises Unavailable at once if that is more than `max_wait_s` away."""
        wait_s = self._retry_at_s - self._clock.monotonic_s()
        if wait_s > max_wait_s:
            raise Unavailable(f"coordinator: next attempt in {wait_s:.1f} s, more than {max_wait_s:.1f} s from now")
        if wait_s > 0:
            await asyncio.sleep(wait_s)
