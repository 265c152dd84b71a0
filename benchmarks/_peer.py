"""One peer of the exchange benchmark: a process that obeys one JSON command a line and answers each with one line.

Invariant: nothing but a `run` command sends groups, and its clock is the machine's monotonic one, which all
processes share.
"""

import asyncio
import json
import sys
import time
from typing import Any

from benchmarks._groups import GroupMaker
from benchmarks._mesh import CheckOnly, GrpcMesh, Mesh, PlainMesh
from benchmarks._tcp import tcp_counts
from swarm.identity import Identity
from swarm.interfaces import PeerAddress
from swarm.types import SealedGroup


class Peer:
    """State of the process between commands."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._identity = Identity.create()
        self._meshes: dict[str, Mesh] = {
            "exchange": GrpcMesh(self._identity, self._arrived),
            "tcp": PlainMesh(self._arrived),
            "verify": CheckOnly(self._arrived),
        }
        self._groups: list[SealedGroup] = []
        self._wanted = 0
        self._num_bytes = 0
        self._complete = asyncio.Event()
        self._done_s = 0.0

    async def start(self) -> dict[str, Any]:
        """Listens; returns who and where we are."""
        endpoints = {name: await mesh.serve() for name, mesh in self._meshes.items()}
        return {"node_id": self._identity.node_id, "endpoints": endpoints}

    async def connect(self, peers: list[dict[str, Any]]) -> dict[str, Any]:
        """Follows all others on every mesh and waits until they follow us."""
        others = [peer for peer in peers if peer["node_id"] != self._identity.node_id]
        for name, mesh in self._meshes.items():
            await mesh.connect(
                [PeerAddress(node_id=peer["node_id"], endpoint=peer["endpoints"][name]) for peer in others]
            )
        return {}

    async def prepare(self, num_groups: int, target_bytes: int, seed: int) -> dict[str, Any]:
        """Makes and seals our groups; returns the sum of their bodies' bytes."""
        maker = GroupMaker(self._identity, seed + self._number)
        self._groups = await asyncio.to_thread(maker.sealed, num_groups, target_bytes)
        return {"num_bytes": sum(group.size_bytes for group in self._groups)}

    async def arm(self, wanted: int) -> dict[str, Any]:
        """Counts arrivals from here on; all peers are armed before any publishes."""
        self._wanted, self._num_bytes = wanted, 0
        self._complete.clear()
        return {}

    async def run(self, mesh: str, at_s: float) -> dict[str, Any]:
        """Publishes at a time and waits until all wanted groups of others are here."""
        await asyncio.sleep(at_s - time.monotonic())
        await self._meshes[mesh].publish(self._groups)
        await self._complete.wait()
        return {"done_s": self._done_s, "received_bytes": self._num_bytes}

    async def counters(self) -> dict[str, Any]:
        """CPU seconds of all our threads and what the kernel counted on our sockets, since we began."""
        tcp = tcp_counts()
        counted = None if tcp is None else [tcp.payload_bytes, tcp.segments]
        return {"cpu_s": time.process_time(), "tcp": counted}

    async def stop(self) -> dict[str, Any]:
        """Ends every connection."""
        await asyncio.gather(*(mesh.stop() for mesh in self._meshes.values()))
        return {}

    def _arrived(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._wanted -= 1
        if self._wanted == 0:
            self._done_s = time.monotonic()
            self._complete.set()


async def _serve(number: int) -> None:
    """Obeys until standard input ends."""
    peer = Peer(number)
    commands = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        command = json.loads(line)
        answer = await getattr(peer, command.pop("do"))(**command)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(_serve(int(sys.argv[1])))
