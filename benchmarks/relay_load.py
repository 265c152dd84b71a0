"""Outward-only nodes behind one relay that all want to send: what each of them gets, and what it costs the relay.

python -m benchmarks.relay_load
python -m benchmarks.relay_load --nodes 100 --seconds 20 --unread 64

The relay is a process of its own with the default budget of bytes; nodes and their readers share another one, so that
where cores are few the figures are those of both. Each node holds a reservation, and a reader takes all it sends. With
`--unread` so many more readers read nothing: the memory that they cost is measured.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from typing import Any, Final

import psutil

from swarm.clock import SystemClock
from swarm.config import ExchangeConfig
from swarm.identity import Identity
from swarm.relay.relay_servicer import RelayServicer
from swarm.relay.relaying_transport import RelayingTransport
from swarm.relay.ticket_port import show_ticket
from swarm.relay.tunnel import FRAME_BYTES
from swarm.testing.builders import HoldsNothing, make_identity
from swarm.wire.session import open_channel
from swarm.wire.v1 import relay_service_pb2 as pb
from swarm.wire.v1.relay_service_pb2_grpc import RelayServiceStub

RUN: Final = "relay-load"
RELAY: Final = make_identity(1)
# All are at 127.0.0.1 and so of one subnet, which may do less than as many subnets.
WIDE: Final = {"reservations_per_subnet": 4096, "connections_per_subnet": 4096, "asks_burst": 1e6, "connections": 4096}


async def serve() -> None:
    """The relay: says where it is, and at each line of its input what it costs."""
    from swarm.relay.reservation_table import RelayLimits

    transport = RelayingTransport(
        RELAY,
        RUN,
        ExchangeConfig(),
        SystemClock(),
        relay_limits=RelayLimits(**{**WIDE, "reservations": 4096}),  # type: ignore[arg-type]
    )
    await transport.serve(HoldsNothing())
    print(transport.endpoint, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(_cost(transport.relay)), flush=True)


def _cost(relay: RelayServicer) -> dict[str, Any]:
    process = psutil.Process()
    times = process.cpu_times()
    return {**relay.status(), "rss": process.memory_info().rss, "cpu_s": times.user + times.system}


class Node:
    """A node behind the relay, and the one reader of what it sends."""

    def __init__(self) -> None:
        self.identity, self.reader = Identity.create(), Identity.create()
        self.num_bytes = 0

    async def begin(self, endpoint: str, *, reads: bool) -> None:
        """Takes a reservation, and sends without end."""
        self.channels = [
            await open_channel(endpoint, RELAY.node_id, who, RUN, 30.0) for who in (self.identity, self.reader)
        ]
        own, reader = [(RelayServiceStub(c.channel), await c.metadata(30.0)) for c in self.channels]
        self.reservation: Any = own[0].Reserve(pb.ReserveRequest(), metadata=own[1])
        port = (await self.reservation.read()).port
        self.near: Any = reader[0].Connect(metadata=reader[1])
        await self.near.write(pb.ConnectRequest(node_id=self.identity.node_id))
        host, ticket = endpoint.rpartition(":")[0], (await self.reservation.read()).ticket
        self.far = await show_ticket(host, port, ticket)
        first = await self.near.read()
        self.socket = await show_ticket(host, port, first.ticket)
        self.tasks = [asyncio.ensure_future(self._send())]
        if reads:
            self.tasks.append(asyncio.ensure_future(self._read()))

    async def _send(self) -> None:
        loop, data = asyncio.get_running_loop(), bytes(FRAME_BYTES)
        while True:
            await loop.sock_sendall(self.far, data)

    async def _read(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self.num_bytes += len(await loop.sock_recv(self.socket, FRAME_BYTES))


async def measure(endpoint: str, relay: subprocess.Popen[str], num_nodes: int, num_unread: int, seconds: float) -> None:
    """Prints a line for each phase."""

    def cost() -> dict[str, Any]:
        assert relay.stdin is not None and relay.stdout is not None
        relay.stdin.write("\n")
        relay.stdin.flush()
        return json.loads(relay.stdout.readline())

    print("empty", await asyncio.to_thread(cost), flush=True)
    nodes = [Node() for _ in range(num_nodes)]
    for node in nodes:
        await node.begin(endpoint, reads=True)
    await asyncio.sleep(seconds / 4)
    before, at_s, counts = await asyncio.to_thread(cost), time.monotonic(), [node.num_bytes for node in nodes]
    await asyncio.sleep(seconds)
    after, took_s = await asyncio.to_thread(cost), time.monotonic() - at_s
    rates = sorted((node.num_bytes - count) / took_s for node, count in zip(nodes, counts, strict=True))
    print("all send", after, flush=True)
    cpu = (after["cpu_s"] - before["cpu_s"]) / took_s
    print(
        f"{num_nodes} nodes: {sum(rates) / 2**20:.2f} MiB/s in all; each {rates[0] / 1024:.1f}, "
        f"{rates[len(rates) // 2] / 1024:.1f}, {rates[-1] / 1024:.1f} KiB/s (least, median, most); "
        f"{100 * cpu:.0f} % of a core",
        flush=True,
    )
    unread = [Node() for _ in range(num_unread)]
    for node in unread:
        await node.begin(endpoint, reads=False)
    await asyncio.sleep(seconds / 4)
    now = await asyncio.to_thread(cost)
    if num_unread:
        each = (now["rss"] - after["rss"]) / num_unread / 1024
        print(f"{num_unread} connections that nobody reads: {each:.0f} KiB each", now, flush=True)
    for task in (task for node in [*nodes, *unread] for task in node.tasks):
        task.cancel()
    for node in [*nodes, *unread]:
        node.far.close()
        node.socket.close()
    await asyncio.gather(*(channel.close() for node in [*nodes, *unread] for channel in node.channels))


def main() -> None:
    """Of the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--unread", type=int, default=64)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve())
        return
    command = [sys.executable, "-m", "benchmarks.relay_load", "--serve"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as relay:
        assert relay.stdout is not None
        endpoint = relay.stdout.readline().strip()
        try:
            asyncio.run(measure(endpoint, relay, arguments.nodes, arguments.unread, arguments.seconds))
        finally:
            relay.kill()


if __name__ == "__main__":
    main()
