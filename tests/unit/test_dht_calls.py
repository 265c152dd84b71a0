"""A late answer to a call that was given up does not end the reading of all others, as in the table of hivemind."""

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

pytest.importorskip("hivemind", reason="discovery through the DHT is an extra")


class Wire:
    """A pipe in memory: written bytes can be read."""

    def __init__(self) -> None:
        self.reader = asyncio.StreamReader()

    def write(self, data: bytes) -> None:
        self.reader.feed_data(data)

    async def drain(self) -> None:
        """Everything was read in at once."""


async def test_a_late_answer_leaves_the_next_one_to_be_read() -> None:
    from hivemind.p2p.p2p_daemon_bindings.control import ControlClient
    from hivemind.p2p.p2p_daemon_bindings.utils import write_pbmsg
    from hivemind.proto import p2pd_pb2

    from swarm.peers.dht_calls import OpenCalls

    control: Any = ControlClient(None, _initialized_with_create=True)  # type: ignore[arg-type]
    control._pending_calls = OpenCalls()
    given_up, open_one, wire = uuid4(), uuid4(), Wire()
    for call_id in (given_up, open_one):
        control._pending_calls[call_id] = asyncio.get_running_loop().create_future()
    control._pending_calls[given_up].cancel()
    for call_id in (given_up, open_one):
        response: Any = p2pd_pb2.PersistentConnectionResponse()  # type: ignore[attr-defined]
        response.callId = call_id.bytes
        response.callUnaryResponse.response = b"here"
        await write_pbmsg(wire, response)  # type: ignore[arg-type]
    wire.reader.feed_eof()
    await control._read_from_persistent_conn(wire.reader)
    assert control._pending_calls[open_one].result() == b"here"


async def test_calls_that_are_under_way_are_answered_all_the_same() -> None:
    from swarm.peers.dht_calls import forget_late_answers

    under_way = asyncio.get_running_loop().create_future()
    control = SimpleNamespace(_pending_calls={"id": under_way})
    node: Any = SimpleNamespace(p2p=SimpleNamespace(_client=SimpleNamespace(control=control)))
    forget_late_answers(node)
    assert "id" in control._pending_calls and control._pending_calls["id"] is under_way
    under_way.cancel()
    assert "id" not in control._pending_calls


def test_nobody_is_told_to_dial_its_own_loopback_unless_there_is_nothing_else() -> None:
    from swarm.peers.dht_node import for_others

    loopback, home = "/ip4/127.0.0.1/tcp/7801/p2p/12D3KooW", "/ip4/192.168.1.5/tcp/7801/p2p/12D3KooW"
    assert for_others([loopback, home]) == (home,)
    assert for_others([loopback]) == (loopback,)
