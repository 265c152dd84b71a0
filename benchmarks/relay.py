"""What a relay costs: bytes, seconds and CPU of groups and weight chunks through it, against a direct connection.

    python -m benchmarks.relay                       # on an idle machine: three processes share its cores
    python -m benchmarks.relay --upload 12.5         # who is asked sends at most so many MB/s, as at home

A server process holds groups of 16 KB and chunks of 1 MiB; a reader subscribes to the groups and fetches the chunks,
directly and through a relay in a process of its own. Bytes are those that the kernel counted on loopback, on a machine
where nobody else uses it: a relayed byte passes it three times. Direct and relayed runs take turns; the ratio is that
of the medians.
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
from swarm.exchange.grpc_transport import GrpcTransport
from swarm.identity import DOMAIN_GROUP, Identity
from swarm.interfaces import PeerAddress, StreamItem
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


def transport_of(identity: Identity, upload: float = 0.0) -> GrpcTransport:
    """On loopback, with no bound on what it relays; `upload`: bytes/s of its own that it sends, 0: no bound."""
    limits = RelayLimits(bytes_per_s=2**40, burst_bytes=2**40)
    config = ExchangeConfig(max_upload_bytes_per_s=int(upload), relay_reservations=0 if upload else 128)
    return GrpcTransport(identity, RUN, config, SystemClock(), relay_limits=limits)


def run_relay(pipe: Connection) -> None:
    """The process of the relay: sends its address, then answers with the CPU seconds that it took so far."""

    async def main() -> None:
        identity = Identity.create()
        transport = transport_of(identity)
        (endpoint,) = await transport.serve(HoldsNothing())
        pipe.send((identity.node_id, endpoint))
        while await asyncio.to_thread(pipe.recv):
            times = psutil.Process().cpu_times()
            pipe.send((times.user + times.system, transport.relay.status()["bytes"]))
        await transport.stop()

    asyncio.run(main())


def run_server(pipe: Connection, relay: tuple[str, str], num_groups: int, upload: float) -> None:
    """The process of who is asked: sends both addresses that lead to it."""

    async def main() -> None:
        identity = Identity.create()
        transport = transport_of(identity, upload)
        (endpoint,) = await transport.serve(Holder(identity, num_groups))
        reservation = transport.reservation_at(PeerAddress(node_id=relay[0], endpoint=relay[1]))
        holding = asyncio.create_task(reservation.hold())
        await reservation.held.wait()
        pipe.send((identity.node_id, endpoint, reservation.endpoint))
        await asyncio.to_thread(pipe.recv)
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        await transport.stop()

    asyncio.run(main())


async def measure(transport: GrpcTransport, address: PeerAddress, num_groups: int, num_chunks: int) -> dict[str, float]:
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
    """Direct and relayed in turn."""
    node_id, direct, through = ends
    transport = transport_of(Identity.create())
    found: dict[str, list[dict[str, float]]] = {"direct": [], "relayed": []}
    carried: dict[str, list[int]] = {"direct": [], "relayed": []}
    relay.send(True)
    cpu_s, passed = relay.recv()
    for number in range(repetitions):
        for way, endpoint in (("direct", direct), ("relayed", through)):
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
        "ratio": {what: middle["relayed"][what] / middle["direct"][what] for what in ("groups", "chunks")},
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
    parser.add_argument("--upload", type=float, default=0.0, help="MB/s that who is asked sends at most; 0: no bound")
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
