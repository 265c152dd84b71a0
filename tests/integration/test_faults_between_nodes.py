"""A wrong clock and a process that stands still, over real sockets: exchange stops, and goes on by itself."""

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from attacked_node import AttackedNode
from waits import until

from swarm.clock import CLOCK_SKEW_S
from swarm.flow import Backoff
from swarm.interfaces import PeerAddress
from swarm.testing.builders import TOY_NOW_S, make_group, make_identity

ALICE = make_identity(2)
HOUR_S = 3600.0
NUM_SENT = 8


@pytest.mark.parametrize("skew_s", [HOUR_S, -HOUR_S])
async def test_nothing_is_taken_across_clocks_that_differ_and_all_of_it_once_they_agree(
    skew_s: float, tmp_path: Path
) -> None:
    assert abs(skew_s) > CLOCK_SKEW_S
    async with AttackedNode(tmp_path) as node:
        alice = await node.follow(ALICE)
        for number in range(NUM_SENT):
            alice.send(make_group(ALICE.node_id, task_id=10 * number + 7, created_at_s=TOY_NOW_S + skew_s))
        is_allowed = node.agent.reputation.is_allowed
        await until(lambda: node.num_judged == NUM_SENT or not is_allowed(ALICE.node_id))
        assert is_allowed(ALICE.node_id), "a wrong clock is no crime"
        assert node.agent.ingest.num_admitted == 0
        assert len((await node.draw()).groups) == node.config.replay.local_groups, "steps go on"
        for number in range(NUM_SENT):
            alice.send(make_group(ALICE.node_id, task_id=10 * number + 5, created_at_s=TOY_NOW_S))
        await node.judged(2 * NUM_SENT)
        assert node.agent.ingest.num_admitted == NUM_SENT


# --- a process that stands still ---------------------------------------------------------------------------

PEER = """
import asyncio, os, sys
from pathlib import Path
sys.path[:0] = sys.argv[1], os.path.dirname(sys.argv[1])
from attacked_node import AttackedNode, Sender
from swarm.testing.builders import make_group, make_identity

async def main():
    async with AttackedNode(Path(sys.argv[2])) as node:
        sender = Sender(make_identity(2))
        (endpoint,) = await node._transport(sender.identity).serve(sender)
        print(endpoint, flush=True)
        for number in range(1_000_000):
            sender.send(make_group(sender.identity.node_id, task_id=number))
            await asyncio.sleep(0.05)

asyncio.run(main())
"""


@asynccontextmanager
async def peer_process(directory: Path) -> AsyncGenerator[tuple[asyncio.subprocess.Process, str]]:
    """Alice in a process of her own, who streams group after group."""
    arguments = [sys.executable, "-c", PEER, str(Path(__file__).parent), str(directory)]
    process = await asyncio.create_subprocess_exec(*arguments, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        yield process, (await process.stdout.readline()).decode().strip()
    finally:
        process.kill()
        await process.wait()


class Relay:
    """A router between two nodes that forgets connections without traffic."""

    def __init__(self, endpoint: str) -> None:
        self._host, _, self._port = endpoint.rpartition(":")
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server
        self.endpoint = ""

    async def __aenter__(self) -> "Relay":
        self._server = await asyncio.start_server(self._pass_on, "127.0.0.1", 0)
        self.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.forget()

    def forget(self) -> None:
        """Ends every connection that there is now."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        beyond, out = await asyncio.open_connection(self._host, int(self._port))
        self._writers += [writer, out]
        await asyncio.gather(_copy(reader, out), _copy(beyond, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.close()


async def test_a_process_that_is_stopped_for_longer_than_its_connections_last_exchanges_again(tmp_path: Path) -> None:
    """SIGSTOP and SIGCONT."""
    async with (
        peer_process(tmp_path / "alice") as (process, endpoint),
        Relay(endpoint) as relay,
        AttackedNode(tmp_path / "victim") as node,
    ):
        address = PeerAddress(node_id=ALICE.node_id, endpoint=relay.endpoint)
        stream = node.stream_from(address)
        stream._backoff = Backoff(random.Random(0), first_s=0.1, longest_s=0.5)
        await until(lambda: node.agent.ingest.num_admitted >= 3)
        process.send_signal(signal.SIGSTOP)
        relay.forget()
        await until(lambda: not node.agent.peers.connected)
        num_before = node.agent.ingest.num_admitted
        process.send_signal(signal.SIGCONT)
        client = await node.transport.connect(address, 20.0)  # it is there again, for whoever asks
        await client.close()
        # within half a second it tries another connection
        await until(lambda: node.agent.ingest.num_admitted >= num_before + 3, "more groups", most_s=20.0)
