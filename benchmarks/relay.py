"""Cost of a relay: bytes, seconds and CPU of groups and weight chunks through it, against a direct connection.

    python -m benchmarks.relay                       # on an idle machine: three processes share its cores
    python -m benchmarks.relay --upload 12.5         # the server sends at most so many MB/s, as at home

A server process holds groups of 16 KB and chunks of 1 MiB; a reader subscribes to the groups and fetches the chunks,
directly and through a relay in a process of its own. Bytes are those that the kernel counted on loopback, on a machine
where nobody else uses it: a relayed byte passes it three times. Direct, relayed and spliced runs take turns; the ratio
is that of the medians. Spliced is the floor: the same hops, by processes that pass on a socket's bytes and do no more.
"""

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any, Final

import psutil

from swarm.clock import SystemClock
from swarm.config import ExchangeConfig
from swarm.identity import DOMAIN_GROUP, Identity
from swarm.interfaces import PeerAddress, StreamItem
from swarm.relay.relaying_transport import RelayingTransport
from swarm.relay.reservation_table import RelayLimits
from swarm.testing.builders import HoldsNothing
from swarm.types import Cursor, Digest, NodeId, SealedGroup, StreamFilter

RUN: Final = "relay-benchmark"
GROUP_BYTES: Final = 16 * 1024
CHUNK_BYTES: Final = 2**20
AT_ONCE: Final = 4  # chunks under way, as a follower has


def sealed(identity: Identity, number: int) -> SealedGroup:
    """A group whose content nobody opens."""
    body = hashlib.sha256(str(number).encode()).digest() * (GROUP_BYTES // 32)
    digest = hashlib.sha256(body).digest()
    return SealedGroup(
        digest=digest,
        producer=identity.node_id,
        public_key=identity.public_key,
        signature=identity.sign(DOMAIN_GROUP, b"\1" + digest),
        is_compressed=False,
        body=body,
    )


class Holder(HoldsNothing):
    """Serves a number of groups, and one chunk under its digest."""

    def __init__(self, identity: Identity, num_groups: int) -> None:
        self.groups = [sealed(identity, number) for number in range(num_groups)]
        self.data = hashlib.sha256(b"chunk").digest() * (CHUNK_BYTES // 32)

    async def subscribe(self, peer: NodeId, cursor: Cursor, wanted: StreamFilter) -> AsyncIterator[StreamItem]:
        """All groups, one after the other, then silence."""
        for number, group in enumerate(self.groups, start=1):
            yield StreamItem(
                cursor=Cursor(epoch="one", sequence=number),
                digest=group.digest,
                size_bytes=group.size_bytes,
                sealed=group,
            )
        await asyncio.Event().wait()

    async def chunk(self, peer: NodeId, digest: Digest) -> bytes:
        """The chunk."""
        return self.data


def transport_of(identity: Identity, upload: float = 0.0) -> RelayingTransport:
    """On loopback, with no bound on what it relays; `upload`: bytes/s of its own that it sends, 0: no bound."""
    limits = RelayLimits(bytes_per_s=2**40, burst_bytes=2**40)
    config = ExchangeConfig(max_upload_bytes_per_s=int(upload), relay_reservations=0 if upload else 128)
    return RelayingTransport(identity, RUN, config, SystemClock(), relay_limits=limits)


def run_relay(pipe: Connection) -> None:
    """The process of the relay: sends its address, then answers with the CPU seconds that it took so far, or with an
    address from which it passes on bytes to the one that it was asked for."""

    async def main() -> None:
        identity = Identity.create()
        transport = transport_of(identity)
        (endpoint,) = await transport.serve(HoldsNothing())
        pipe.send((identity.node_id, endpoint))
        while asked := await asyncio.to_thread(pipe.recv):
            if asked is not True:
                pipe.send(await splice_to(asked))
                continue
            times = psutil.Process().cpu_times()
            pipe.send((times.user + times.system, transport.relay.status()["bytes"]))
        await transport.stop()

    asyncio.run(main())


def run_server(pipe: Connection, relay: tuple[str, str], num_groups: int, upload: float) -> None:
    """The process of the server: sends the three addresses that lead to it."""

    async def main() -> None:
        identity = Identity.create()
        transport = transport_of(identity, upload)
        (endpoint,) = await transport.serve(Holder(identity, num_groups))
        reservation = transport.reservation_at(PeerAddress(node_id=relay[0], endpoint=relay[1]))
        holding = asyncio.create_task(reservation.hold())
        await reservation.held.wait()
        pipe.send((identity.node_id, endpoint, reservation.endpoint, await splice_to(endpoint)))
        await asyncio.to_thread(pipe.recv)
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        await transport.stop()

    asyncio.run(main())


class Splice(asyncio.Protocol):
    """One socket of two whose bytes are passed on; an accepted one dials `target`."""

    def __init__(self, target: tuple[str, int] | None, other: "Splice | None" = None) -> None:
        self._target = target
        self._other: Any = other
        self._socket: Any = None

    def connection_made(self, transport: Any) -> None:
        """Connects the other socket, where there is none."""
        self._socket = transport
        if self._other is None:
            transport.pause_reading()
            self._dialling = asyncio.ensure_future(self._dial())

    async def _dial(self) -> None:
        assert self._target is not None
        make = asyncio.get_running_loop().create_connection
        _, self._other = await make(lambda: Splice(None, self), *self._target)
        self._socket.resume_reading()

    def data_received(self, data: bytes) -> None:
        """Passes bytes on."""
        self._other._socket.write(data)

    def pause_writing(self) -> None:
        """Whoever reads slowly holds back the other end."""
        self._other._socket.pause_reading()

    def resume_writing(self) -> None:
        """Goes on."""
        self._other._socket.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        """The other end ends with this one."""
        if self._other is not None:
            self._other._socket.close()


async def splice_to(endpoint: str) -> str:
    """Listens, and passes each connection on to an endpoint; returns where."""
    host, _, port = endpoint.rpartition(":")
    server = await asyncio.get_running_loop().create_server(lambda: Splice((host, int(port))), "127.0.0.1", 0)
    return "{}:{}".format(*server.sockets[0].getsockname())


async def measure(
    transport: RelayingTransport, address: PeerAddress, num_groups: int, num_chunks: int
) -> dict[str, float]:
    """Payload bytes a second of groups and of chunks over one new connection."""
    peer = await transport.connect(address, 10.0)
    try:
        began_s = time.perf_counter()
        stream: Any = peer.subscribe(Cursor(), StreamFilter())
        async for item in stream:
            if item.cursor.sequence == num_groups:
                break
        groups_s = time.perf_counter() - began_s
        await stream.aclose()
        digest = hashlib.sha256(hashlib.sha256(b"chunk").digest() * (CHUNK_BYTES // 32)).digest()
        left = iter(range(num_chunks))

        async def fetch() -> None:
            for _ in left:
                await peer.fetch_chunk(digest, 60.0)

        began_s = time.perf_counter()
        await asyncio.gather(*(fetch() for _ in range(AT_ONCE)))
        chunks_s = time.perf_counter() - began_s
    finally:
        await peer.close()
    return {"groups": num_groups * GROUP_BYTES / groups_s, "chunks": num_chunks * CHUNK_BYTES / chunks_s}


def received_bytes() -> int:
    """Bytes that loopback carried so far, as the kernel counts them."""
    return psutil.net_io_counters(pernic=True)["lo"].bytes_recv


async def compare(num_groups: int, num_chunks: int, repetitions: int, relay: Connection, ends: Any) -> dict[str, Any]:
    """Direct, relayed and spliced in turn."""
    node_id, direct, through, splice = ends
    relay.send(splice)
    ways = {"direct": direct, "relayed": through, "spliced": await asyncio.to_thread(relay.recv)}
    transport = transport_of(Identity.create())
    found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    carried: dict[str, list[int]] = {way: [] for way in ways}
    relay.send(True)
    cpu_s, passed = relay.recv()
    for number in range(repetitions):
        for way, endpoint in ways.items():
            before = received_bytes()
            rates = await measure(transport, PeerAddress(node_id=node_id, endpoint=endpoint), num_groups, num_chunks)
            carried[way].append(received_bytes() - before)
            found[way].append(rates)
            print(f"{number + 1} of {repetitions}, {way}: {rates}", file=sys.stderr, flush=True)
    relay.send(True)
    cpu_after_s, passed_after = relay.recv()
    await transport.stop()
    payload = num_groups * GROUP_BYTES + num_chunks * CHUNK_BYTES
    middle = {
        way: {what: statistics.median(run[what] for run in runs) for what in ("groups", "chunks")}
        for way, runs in found.items()
    }
    hops = 3  # of a relayed byte over loopback: server to itself, to the relay, to the reader
    return {
        "mb_per_s": {way: {what: rate / 1e6 for what, rate in rates.items()} for way, rates in middle.items()},
        "ratio": {
            way: {what: middle[way][what] / middle["direct"][what] for what in ("groups", "chunks")}
            for way in ("relayed", "spliced")
        },
        "bytes_per_payload_byte": {
            "direct": statistics.median(carried["direct"]) / payload,
            "relayed, of each hop": statistics.median(carried["relayed"]) / payload / hops,
        },
        "relay_cpu_ms_per_mb": 1000 * (cpu_after_s - cpu_s) / ((passed_after - passed) / 1e6),
        "runs": found,
    }


def main() -> None:
    """Prints the comparison as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=2000, help="of 16 KB")
    parser.add_argument("--chunks", type=int, default=100, help="of 1 MiB")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--upload", type=float, default=0.0, help="MB/s that the server sends at most; 0: no bound")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    relay, relay_end = context.Pipe()
    server, server_end = context.Pipe()
    processes = [context.Process(target=run_relay, args=(relay_end,), daemon=True)]
    processes[0].start()
    address = relay.recv()
    server_arguments = (server_end, address, arguments.groups, 1e6 * arguments.upload)
    processes.append(context.Process(target=run_server, args=server_arguments, daemon=True))
    processes[1].start()
    ends = server.recv()
    result = asyncio.run(compare(arguments.groups, arguments.chunks, arguments.repetitions, relay, ends))
    server.send(False)
    relay.send(False)
    for process in processes:
        process.join(10)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
