"""Dials and look-ups that callers ask of a relay: its own machine, addresses of others, adverts without end."""

import asyncio
import secrets
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import grpc
import pytest

from swarm.clock import SystemClock
from swarm.config import ExchangeConfig
from swarm.relay import relay_servicer, reservation_table
from swarm.relay.relaying_transport import RelayingTransport
from swarm.testing.builders import HoldsNothing, make_advert
from swarm.wire.adverts import seal_advert
from swarm.wire.v1 import relay_service_pb2 as pb
from tests.worlds.relay_world import ADDRESSES, CODES, NODE, RUN, Caller, code_of, relaying


async def dial_back(caller: Caller, port: int) -> pb.DialBackResponse | grpc.StatusCode:
    try:
        return await caller.stub.DialBack(pb.DialBackRequest(port=port), metadata=caller.metadata, timeout=20.0)
    except grpc.aio.AioRpcError as error:
        return error.code()


def everybody_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """For dial-backs on one machine: loopback is an address like any other."""
    monkeypatch.setattr(relay_servicer, "is_loopback", lambda host: False)  # type: ignore[arg-type]


@asynccontextmanager
async def counting_dials() -> AsyncGenerator[tuple[list[int], int]]:
    """Somebody's port, and a number for each connection to it."""
    calls: list[int] = []

    def called(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        calls.append(1)
        writer.close()

    server = await asyncio.start_server(called, "127.0.0.1", 0)
    try:
        yield calls, server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def test_nobody_has_a_relay_try_what_listens_on_its_own_machine() -> None:
    async with relaying() as relay, counting_dials() as (calls, port):
        caller = await relay.caller()
        answer = await dial_back(caller, port)
        assert answer is CODES.UNAVAILABLE and not calls


async def test_a_subnet_has_few_ports_of_its_own_address_tried_and_none_of_services(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    everybody_is_elsewhere(monkeypatch)
    async with relaying() as relay, counting_dials() as (calls, port):
        for _ in range(3):  # keys are free
            caller = await relay.caller()
            assert await dial_back(caller, 22) is CODES.RESOURCE_EXHAUSTED
            for _ in range(4):
                answer = await dial_back(caller, port)
                assert isinstance(answer, grpc.StatusCode) or not answer.is_reached
        assert len(calls) <= reservation_table.DIAL_BACKS_BURST


async def test_a_dial_back_leads_to_who_proved_its_key_there_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    everybody_is_elsewhere(monkeypatch)
    async with relaying() as relay:
        node = RelayingTransport(NODE, RUN, ExchangeConfig(), SystemClock())
        await node.serve(HoldsNothing())
        port = int(node.endpoint.rpartition(":")[2])
        owner, thief = await relay.caller(identity=NODE), await relay.caller()
        answer = await dial_back(thief, port)
        assert isinstance(answer, pb.DialBackResponse) and not answer.is_reached and "expected node" in answer.detail
        answer = await dial_back(owner, port)
        assert isinstance(answer, pb.DialBackResponse) and answer.is_reached
        assert await relay.reaches(ADDRESSES[1]) == ""
        assert await code_of(await thief.connect(thief.identity)) is CODES.NOT_FOUND
        monkeypatch.setattr(reservation_table, "DIALLED_S", 0.0)
        assert "holds no reservation" in await relay.reaches(ADDRESSES[2])
        await node.stop()


class Records:
    """A directory that counts what it is asked."""

    num_calls = 0

    async def pass_on(self, data: bytes) -> bool:
        self.num_calls += 1
        return True

    async def records(self) -> list[bytes]:
        self.num_calls += 1
        return [secrets.token_bytes(500)] * 600


async def test_free_keys_of_one_subnet_look_up_few_adverts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_servicer, "RECORD_CALLS_OF_SUBNET", 1)
    async with relaying() as relay:
        records = relay.transport.directory = Records()
        stopped = False
        for _ in range(6):
            caller = await relay.caller()
            for _ in range(5):
                call = caller.stub.Lookup(pb.LookupRequest(), metadata=caller.metadata, timeout=1.0)
                try:
                    assert sum([len(response.adverts) async for response in call]) == 600
                except grpc.aio.AioRpcError:
                    stopped = True
                    break
            if stopped:
                break
        assert stopped and records.num_calls <= 2 * relay_servicer.RECORD_CALLS_BURST


async def announce(caller: Caller) -> bool:
    advert = seal_advert(make_advert(caller.identity.node_id, run_id=RUN), caller.identity)
    try:
        await caller.stub.Announce(pb.AnnounceRequest(advert=advert), metadata=caller.metadata, timeout=5.0)
    except grpc.aio.AioRpcError as error:
        assert error.code() is CODES.UNAVAILABLE and "too many announcements" in str(error.details())
        return False
    return True


async def test_free_keys_of_many_subnets_announce_little_and_keep_no_holder_of_a_reservation_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay_servicer, "ANNOUNCED_PER_S", 1e-9)
    monkeypatch.setattr(relay_servicer, "ANNOUNCED_BURST", 4.0)
    async with relaying() as relay:
        records = relay.transport.directory = Records()
        holder = await relay.caller(ADDRESSES[9])
        assert await holder.reserve() is not None
        num_taken = sum([await announce(await relay.caller(source)) for source in ADDRESSES[:8]])
        assert await announce(holder)
        assert num_taken == 4 and records.num_calls == num_taken + 1


async def test_free_keys_of_one_subnet_leave_announcements_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """One used up the burst at once and half of what comes after, two of them everything."""
    monkeypatch.setattr(relay_servicer, "ANNOUNCED_PER_S", 1e-9)
    monkeypatch.setattr(relay_servicer, "ANNOUNCED_BURST", 16.0)
    monkeypatch.setattr(relay_servicer, "ANNOUNCED_OF_SUBNET_PER_S", 1e-9)
    async with relaying() as relay:
        records = relay.transport.directory = Records()
        for _ in range(3):
            caller = await relay.caller(ADDRESSES[0])
            for _ in range(8):
                await announce(caller)
        assert records.num_calls == relay_servicer.ANNOUNCED_OF_SUBNET_BURST
        assert await announce(await relay.caller(ADDRESSES[1]))


async def test_nobody_announces_the_advert_of_another() -> None:
    async with relaying() as relay:
        records = relay.transport.directory = Records()
        caller = await relay.caller()
        for advert in (b"", secrets.token_bytes(300), bytes(2000)):
            call = caller.stub.Announce(pb.AnnounceRequest(advert=advert), metadata=caller.metadata)
            assert await code_of(call) is CODES.RESOURCE_EXHAUSTED
        assert records.num_calls == 0
