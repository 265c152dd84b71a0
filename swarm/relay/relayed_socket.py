"""A node behind a relay as a local socket, for whoever dials it.

Invariant: each connection to the socket is one through the relay, on which both ends prove their keys; it ends with the
socket, and with the call that asked for it.
"""

import asyncio
import logging
import shutil
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from swarm.errors import NotHeld, Unauthenticated, Unavailable
from swarm.interfaces import PeerAddress
from swarm.relay.acceptor import Acceptor
from swarm.relay.relay_client import RelaySessions
from swarm.relay.tunnel import EOF, FINISH_S, pump, splice
from swarm.types import NodeId, short
from swarm.wire.grpc_errors import calling
from swarm.wire.v1 import relay_service_pb2 as pb

logger = logging.getLogger(__name__)

WHY_S: Final = 0.5  # for a relay to say why a connection ended, once its bytes did
TAKEN_WITHIN_S: Final = 10.0  # a relay waits for half as long


class RelayedSocket:
    """A local socket behind which stands a node that cannot be dialled: each connection to it is one through a relay.

    Args:
        sessions: with relays.
        relay: where the node is reached.
        node_id: of the node.
        idle_s: seconds without a byte after which the relay passes nothing on; each end sends one before.

    Example:
        async with RelayedSocket(sessions, relay, node_id, idle_s=6.0) as path:
            channel = await open_channel(endpoint, node_id, identity, run_id, 5.0, socket_path=path, ping_s=3.0)
    """

    def __init__(self, sessions: RelaySessions, relay: PeerAddress, node_id: NodeId, idle_s: float) -> None:
        self._sessions, self._relay, self._node_id, self._idle_s = sessions, relay, node_id, idle_s
        self._folder = ""
        self._accepted: Acceptor | None = None
        self._pumps: set[asyncio.Task[None]] = set()
        self.failure: Unavailable | None = None  # why the relay gave no connection

    async def __aenter__(self) -> str:
        making = asyncio.ensure_future(asyncio.to_thread(tempfile.mkdtemp, prefix="swarm-relay-"))  # of this user alone
        try:
            self._folder = await asyncio.shield(making)
            path = str(Path(self._folder) / "s")
            listening = socket.socket(socket.AF_UNIX)
            self._accepted = Acceptor(listening, self._connected)
            listening.bind(path)
            listening.listen()
            self._accepted.start()
        except OSError as error:
            await self.close()
            raise Unavailable(f"no local socket in {tempfile.gettempdir()}: {error}; set TMPDIR") from None
        except asyncio.CancelledError:
            with suppress(OSError):
                self._folder = await making
            await self.close()
            raise
        return path

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Raises Unavailable with what the relay said, where that is why nobody answered."""
        if type(error) is Unavailable and self._pumps:
            await asyncio.wait(self._pumps, timeout=WHY_S)
        await self.close()
        if type(error) is Unavailable and self.failure is not None:  # its subclasses say who answered
            raise Unavailable(f"{error}: {self.failure}") from None

    def _connected(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        task = asyncio.ensure_future(self._pass_on(connection))
        self._pumps.add(task)
        task.add_done_callback(self._pumps.discard)
        task.add_done_callback(lambda _: connection.close())  # also where it was cancelled before its first step

    async def _pass_on(self, local: socket.socket) -> None:
        what = f"connection to {short(self._node_id)} through {short(self._relay.node_id)}"
        try:
            async with self._sessions.call(self._relay) as (stub, metadata):
                call = stub.Connect(metadata=metadata)
                try:
                    with calling(what, NotHeld, Unauthenticated):
                        taken = await _until_taken(call, pb.ConnectRequest(node_id=self._node_id), what)
                        await self._through(taken, call, local)
                finally:
                    call.cancel()
        except (Unavailable, NotHeld) as error:
            self.failure = error if isinstance(error, Unavailable) else Unavailable(str(error))
            logger.debug("relayed connection ended", extra={"error": str(error)})

    async def _through(self, taken: pb.ConnectResponse, call: Any, local: socket.socket) -> None:
        remote = await self._sessions.socket_to(self._relay, taken.port, taken.ticket)
        if remote is None:
            await pump(call, pb.ConnectRequest, local, self._idle_s, call.done_writing)
            return
        over = asyncio.ensure_future(call.read())  # which has no bytes
        try:
            await splice(local, remote, over, other_idle_s=self._idle_s)
            await asyncio.wait((over,), timeout=FINISH_S)  # it ends the connection, and may say why that ended
            if over.done():
                over.result()
        finally:
            over.cancel()
            await asyncio.gather(over, return_exceptions=True)

    async def close(self) -> None:
        """Ends the socket and every connection through it."""
        try:
            if self._folder:  # first: nobody connects from then on
                await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)
        finally:
            if self._accepted is not None:
                self._accepted.close()
            for task in list(self._pumps):
                task.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)


async def _until_taken(call: Any, request: pb.ConnectRequest, what: str) -> pb.ConnectResponse:
    """Asks, and waits until the other end took the connection: no byte is sent before, as gRPC forgets why a call was
    refused where our bytes cross that. Raises as gRPC, or Unavailable.

    A first write may never return where the call ends before the relay said anything.
    """
    try:
        async with asyncio.timeout(TAKEN_WITHIN_S):
            await call.write(request)
            taken = await call.read()
    except TimeoutError:
        raise Unavailable(f"{what}: not taken within {TAKEN_WITHIN_S:.0f} s") from None
    if taken is EOF or taken.data:
        raise Unavailable(f"{what}: the relay does not say that it was taken")
    return taken
