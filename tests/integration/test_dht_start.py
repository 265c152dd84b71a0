"""The DHT's daemon is waited for while its process lives, and tried three times; stand-ins take its place."""

import asyncio
import contextlib
from collections.abc import Callable, Generator
from pathlib import Path

import psutil
import pytest

from swarm.clock import SystemClock
from swarm.config import DirectoryConfig
from swarm.errors import Unavailable
from swarm.identity import Identity
from swarm.peers.discovery_dht import HivemindDirectory

pytest.importorskip("hivemind")

StandIn = Callable[[str], Path]


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """Puts a shell script in the place of p2pd: `$P2PD` in it is the real one. Returns the file it counts starts in."""
    from hivemind.p2p import p2p_daemon

    real = Path(p2p_daemon.cli.__path__[0]) / p2p_daemon.P2PD_FILENAME
    script, starts = tmp_path / "p2pd", tmp_path / "starts"

    def replace(body: str) -> Path:
        script.write_text(f"#!/bin/sh\nP2PD='{real}'\necho >> '{starts}'\nN=$(wc -l < '{starts}')\n{body}\n")
        script.chmod(0o700)
        return starts

    @contextlib.contextmanager
    def found(*_: object) -> Generator[Path]:
        yield script

    monkeypatch.setattr(p2p_daemon, "path", found)
    monkeypatch.setattr("swarm.peers.dht_node._START_PAUSES_S", (0.1, 0.2))
    return replace


async def start() -> HivemindDirectory:
    return await HivemindDirectory.start(Identity.create(), "start", DirectoryConfig(), SystemClock(), None)


def num_children() -> int:
    return len(psutil.Process().children(recursive=True))


@pytest.mark.sweep
async def test_a_daemon_that_takes_longer_than_hivemind_waits_is_waited_for(stand_in: StandIn) -> None:
    starts = stand_in('sleep 16; exec "$P2PD" "$@"')  # hivemind gives up after 15 s
    directory = await start()
    assert directory.visible_maddrs()
    await directory.stop()
    assert len(starts.read_text()) == 1


async def test_a_daemon_that_dies_twice_is_started_a_third_time(stand_in: StandIn) -> None:
    starts = stand_in('[ "$N" -lt 3 ] && exit 7; exec "$P2PD" "$@"')
    directory = await start()
    await directory.stop()
    assert len(starts.read_text()) == 3


async def test_a_daemon_that_dies_three_times_is_unavailable_with_what_was_seen(stand_in: StandIn) -> None:
    starts = stand_in('echo "no room at $N"; exit 7')
    with pytest.raises(Unavailable, match=r"did not start .* tried 3 times: .*code 7 .* no room at 1; .* no room at 3"):
        await start()
    assert len(starts.read_text()) == 3


async def test_a_daemon_that_hangs_is_ended_and_named(stand_in: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.peers.dht_node._START_HANG_S", 0.5)
    before = num_children()
    stand_in("exec sleep 600")
    with pytest.raises(Unavailable, match=r"process \d+ was stopped after .* it hung"):
        await start()
    assert num_children() == before


async def test_a_start_that_is_cancelled_leaves_no_daemon(stand_in: StandIn) -> None:
    before = num_children()
    starts = stand_in("exec sleep 600")
    task = asyncio.create_task(start())
    while not starts.exists():  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert num_children() == before
