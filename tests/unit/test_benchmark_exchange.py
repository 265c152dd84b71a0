"""The exchange benchmark measures what it says: sizes, counted bytes, completeness, and both ways to start it."""

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._groups import GROUP_SIZE, GroupMaker
from benchmarks._recheck import measure_rechecks
from benchmarks._tcp import HEADER_BYTES, TcpCounts, tcp_counts
from benchmarks.exchange import Case, Repetition, Result, parse_cases, table
from swarm.identity import Identity
from swarm.types import RolloutGroup
from swarm.wire.envelopes import open_group

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("target_bytes", [2048, 16384])
def test_groups_have_the_wanted_size_and_open_as_genuine(target_bytes: int) -> None:
    groups = GroupMaker(Identity.create(), seed=1).sealed(12, target_bytes)
    mean = sum(group.size_bytes for group in groups) / len(groups)
    assert mean == pytest.approx(target_bytes, rel=0.15)
    assert len({group.digest for group in groups}) == 12
    for sealed in groups:
        group = open_group(sealed, max_bytes=2**20)
        assert isinstance(group, RolloutGroup) and len(group.rollouts) == GROUP_SIZE


def test_logprobs_are_most_of_a_groups_incompressible_bytes() -> None:
    (sealed,) = GroupMaker(Identity.create(), seed=1).sealed(1, 16384)
    group = open_group(sealed, max_bytes=2**20)
    assert isinstance(group, RolloutGroup)
    assert 0.3 * sealed.size_bytes < 4 * group.num_tokens < 0.7 * sealed.size_bytes


def test_cases_are_read_from_text() -> None:
    assert parse_cases("8x2,64x16") == [Case(8, 2), Case(64, 16)]
    for wrong in ("", "8", "x2", "8x", "0x2", "8x2,", "-1x2"):
        with pytest.raises(argparse.ArgumentTypeError):
            parse_cases(wrong)


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO")
async def test_the_kernel_counts_every_byte_that_a_socket_receives() -> None:
    reads: list[bytes] = []
    done = asyncio.Event()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reads.append(await reader.readexactly(100_000))
        writer.write(b"y" * 7)
        await writer.drain()
        await done.wait()
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    before = tcp_counts()
    writer.write(b"x" * 100_000)
    await reader.readexactly(7)
    after = tcp_counts()
    assert before is not None and after is not None
    counted = after - before
    assert counted.payload_bytes == 100_007
    assert counted.segments >= 2
    assert counted.wire_bytes == 100_007 + HEADER_BYTES * counted.segments
    done.set()
    writer.close()
    await writer.wait_closed()
    server.close()


@pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO")
def test_sockets_that_are_no_tcp_connections_are_not_counted() -> None:
    before = tcp_counts()
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        ours.send(b"x" * 100)
        assert tcp_counts() == before


def test_the_table_gives_medians_and_ratios_to_both_floors() -> None:
    case = Case(8, 2)

    def result(mesh: str, seconds: list[float], received: int | None) -> Result:
        tcp = None if received is None else TcpCounts(received, 10)
        return Result(case, mesh, tuple(Repetition(s, 2 * s, 1000, tcp) for s in seconds))

    text = table(
        [result("exchange", [0.3, 0.1, 0.2], 1200), result("tcp", [0.01], 1010), result("verify", [0.09], None)]
    )
    row = text.splitlines()[-1]
    assert "8 x 2 KB | 0.200 (0.100 - 0.300) | 0.010 | 0.090 | 2.0 x | 1.20 x | 1.72 x" in row


def test_every_group_of_the_recheck_is_admitted_by_both_verifiers() -> None:
    results = measure_rechecks(5)
    assert [(r.verifier, r.num_groups) for r in results] == [("in process", 5), ("confined process", 5)]
    assert all(r.seconds > 0 for r in results)


def test_two_peers_end_with_all_groups_and_few_bytes_besides() -> None:
    options = ["--peers", "2", "--cases", "3x2", "--repetitions", "1", "--no-recheck", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.exchange", *options],
        cwd=ROOT,
        env=os.environ | {"PYTHONWARNINGS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    ours = next(row for row in report["results"] if row["mesh"] == "exchange")
    (repetition,) = ours["repetitions"]
    assert repetition["useful_bytes"] == pytest.approx(2 * 3 * 2048, rel=0.25)
    assert repetition["seconds"] > 0
    if sys.platform == "linux":
        assert 1.0 < ours["payload_ratio"] < 1.5
