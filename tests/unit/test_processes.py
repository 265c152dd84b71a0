"""Processes of a simulation: whatever state they are in, they end when told to."""

import signal
from pathlib import Path

import psutil
import pytest
from waits import until

from swarm.events import kind_of
from swarm.simulate.local.processes import Process, SimulationFailed


async def server(directory: Path) -> Process:
    """A process that runs until a signal ends it."""
    process = Process("server", directory)
    await process.start(["http.server", "0", "--bind", "127.0.0.1"])
    log = directory / "log.txt"
    await until(lambda: b"Serving" in log.read_bytes(), "its start", processes=(process,))
    return process


async def test_a_process_held_by_sigstop_ends_at_once(tmp_path: Path) -> None:
    process = await server(tmp_path)
    assert process._process is not None
    process.send(signal.SIGSTOP)
    held = psutil.Process(process._process.pid)
    await until(lambda: held.status() == psutil.STATUS_STOPPED, "its stop", processes=(process,))
    await process.stop()
    assert process._process.returncode == -signal.SIGTERM, "it was killed instead of asked"
    await process.stop()  # a second time does nothing


async def test_a_process_that_died_unasked_fails_the_check_with_the_end_of_its_log(tmp_path: Path) -> None:
    process = await server(tmp_path)
    assert process._process is not None
    psutil.Process(process._process.pid).kill()
    await until(lambda: not process.is_alive, "its end")
    with pytest.raises(SimulationFailed, match=r"exit code -9; end of its log:\n.*Serving"):
        process.check()
    process.send(signal.SIGKILL)
    process.check()


async def test_events_are_read_once_and_only_whole_lines(tmp_path: Path) -> None:
    process = Process("nobody", tmp_path)
    assert process.read_events() == []
    path = tmp_path / "events.jsonl"
    path.write_text('{"kind": "a"}\n{"kind": "b"')
    assert [kind_of(event) for event in process.read_events()] == ["a"]
    path.write_text('{"kind": "a"}\n{"kind": "b"}\n')
    assert [kind_of(event) for event in process.read_events()] == ["b"]
    assert [kind_of(event) for event in process.events] == ["a", "b"]
