"""Calls of Linux that are taken away: the table and `swarm doctor` name each, and the code goes on without it."""

import asyncio
import errno
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Never

import psutil
import pytest
from waits import has_ended, until

from node import expectations
from node.disk_budget import takes_line
from node.doctor import _check_system  # pyright: ignore[reportPrivateUsage]
from swarm import process, system_fallbacks
from swarm.addresses import has_whole_loopback
from swarm.config import EnvironmentConfig, NodeConfig, SandboxConfig
from swarm.environments.sandbox.confine import limit_memory
from swarm.environments.sandbox.time_accounts import Allowance
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.errors import ConfigError
from swarm.exchange.local_rpc import LocalClient
from swarm.interfaces import PeerAddress, Producer
from swarm.model import compute_dtype
from swarm.open_files import allow_descriptors
from swarm.relay.relay_client import RelayReservation
from swarm.simulate.local.fork_server import fork_server
from swarm.system_fallbacks import FALLBACKS, needed_fallbacks
from swarm.testing.builders import answers
from swarm.types import NodeId

Patch = pytest.MonkeyPatch
CHAR = EnvironmentConfig(name="rev", kind="char", dataset="reverse")
ABSENT = Path("/absent")


def raising(error: Exception) -> Callable[..., Never]:
    def call(*_: object, **__: object) -> Never:
        raise error

    return call


def without_proc(patch: Patch, module: Any) -> None:
    """No path of a module exists that starts at the root."""
    patch.setattr(module, "Path", lambda text: ABSENT / str(text).lstrip("/"))


def on_mac(patch: Patch) -> None:
    patch.setattr(sys, "platform", "darwin")


TAKEN: dict[str, Callable[[Patch], None]] = {
    "signal at a parent's end": lambda patch: patch.setattr(process, "_prctl", lambda *_: -1),
    "id of the machine's start": lambda patch: patch.setattr(process, "BOOT_ID", ABSENT),
    "bytes that a process wrote": lambda patch: without_proc(patch, process),
    "CPU time of a scoring process": lambda patch: patch.setattr(
        time, "clock_gettime", raising(OSError(errno.EINVAL, "x"))
    ),
    "memory limit of a container": lambda patch: patch.setattr(process, "CONTROL_GROUPS", ABSENT),
    "addresses 127.0.0.0/8": lambda patch: patch.setattr(
        socket.socket, "bind", raising(OSError(errno.EADDRNOTAVAIL, "x"))
    ),
    "fork after imports": on_mac,
    "cores of a process": lambda patch: patch.delattr(os, "sched_getaffinity", raising=False),
    "flags of the processor": lambda patch: without_proc(patch, system_fallbacks),
}


@pytest.fixture(autouse=True)
def asked_anew() -> Generator[None]:
    has_whole_loopback.cache_clear()
    yield
    has_whole_loopback.cache_clear()


@pytest.mark.parametrize("name", [each.name for each in FALLBACKS])
def test_a_call_that_is_taken_away_is_named_by_doctor_with_what_is_done_instead(name: str, monkeypatch: Patch) -> None:
    TAKEN[name](monkeypatch)
    row = next(each for each in needed_fallbacks() if each.name == name)
    has_whole_loopback.cache_clear()
    finding = next(each for each in _check_system() if each.name == name)
    assert row.instead in finding.detail and finding.is_ok, "a node works without it"


def test_the_page_of_systems_says_the_same() -> None:
    page = (Path(__file__).parents[2] / "docs" / "platforms.md").read_text(encoding="utf-8")
    assert [each for each in FALLBACKS if f"| {each.name} | {each.instead} |" not in page] == []


def test_a_system_that_has_them_all_is_one_finding(monkeypatch: Patch) -> None:
    monkeypatch.setattr(system_fallbacks, "FALLBACKS", ())
    (finding,) = _check_system()
    assert finding.is_ok and "has every call" in finding.detail


CHILD = """
import os, sys, time
from swarm import process
process._prctl, process.LOOK_S = lambda *_: -1, 0.05
process.die_with(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(600)
"""
PARENT = "import os, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], str(os.getpid())])"


async def test_a_worker_ends_with_its_node_where_no_kernel_does_that() -> None:
    command = (sys.executable, "-c", PARENT, CHILD)
    parent = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    child = psutil.Process(int(await parent.stdout.readline()))
    parent.kill()
    await until(lambda: has_ended(child))
    await parent.communicate()


def test_the_start_of_the_machine_has_a_name_without_proc(monkeypatch: Patch) -> None:
    monkeypatch.setattr(process, "BOOT_ID", ABSENT)
    monkeypatch.setattr(psutil, "boot_time", lambda: 1_700_000_000.4)
    assert process.boot_id() == "28333333"


def test_a_process_whose_written_bytes_nobody_counts_still_shows_its_cpu(monkeypatch: Patch) -> None:
    without_proc(monkeypatch, process)
    assert process.written_bytes() is None and process.written_bytes_of_tree() is None
    used_s, written = process.work_of(os.getpid())
    assert used_s > 0 and written == 0


async def test_groups_are_charged_for_the_time_that_passed_where_no_cpu_time_of_a_child_is_told(
    monkeypatch: Patch,
) -> None:
    monkeypatch.setattr(time, "clock_gettime", raising(OSError(errno.EINVAL, "x")))
    stranger = Producer(node_id=NodeId("a" * 32), is_known=True)
    async with SandboxVerifier((CHAR,), SandboxConfig()) as verifier:
        assert (await verifier.verify("rev", 1, answers("x"), stranger)).rewards.tolist() == [0.0]
        assert verifier.accounts.allowance(stranger) is Allowance.ALL


def test_the_memory_of_the_machine_counts_where_no_control_group_bounds_it(monkeypatch: Patch) -> None:
    monkeypatch.setattr(process, "CONTROL_GROUPS", ABSENT)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=2**40))
    assert process.available_bytes() == 2**40


def test_behind_a_relay_all_come_from_one_address_where_there_is_only_one(monkeypatch: Patch) -> None:
    def has_sources() -> bool:
        relay = PeerAddress(node_id=NodeId("a" * 32), endpoint="127.0.0.1:7700")
        sessions: Any = None
        return RelayReservation(sessions, relay, "127.0.0.1:7701")._has_sources  # pyright: ignore[reportPrivateUsage]

    assert has_sources() == (sys.platform == "linux")
    has_whole_loopback.cache_clear()
    TAKEN["addresses 127.0.0.0/8"](monkeypatch)
    assert not has_sources()


@pytest.mark.parametrize("take", [on_mac, lambda patch: without_proc(patch, process)], ids=["macOS", "no /proc"])
async def test_a_simulation_forks_nothing_where_that_is_unsafe(
    take: Callable[[Patch], None], monkeypatch: Patch, tmp_path: Path
) -> None:
    take(monkeypatch)
    async with fork_server(["json"], tmp_path / "imports.txt") as server:
        assert server is None


def test_cores_and_processor_have_a_name_everywhere(monkeypatch: Patch) -> None:
    TAKEN["cores of a process"](monkeypatch)
    without_proc(monkeypatch, compute_dtype)
    assert f"(of {os.cpu_count()} cores" in takes_line(NodeConfig())
    assert compute_dtype._processor().split()[0]  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(("platform", "most"), [("linux", 107), ("darwin", 103)])
async def test_a_socket_path_is_as_long_as_the_system_takes(platform: str, most: int, monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    await LocalClient(Path("/" + "d" * (most - 1))).close()
    with pytest.raises(ConfigError, match=f"has {most + 1} bytes, a Unix socket at most {most}; choose a shorter"):
        LocalClient(Path("/" + "d" * most))


def test_where_unlimited_open_files_are_10240_that_many_are_taken(monkeypatch: Patch) -> None:
    taken: list[int] = []

    def set_limit(_: int, limits: tuple[int, int]) -> None:
        if limits[0] > 10240:
            raise ValueError("current limit exceeds maximum limit")
        taken.append(limits[0])

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", set_limit)
    assert allow_descriptors(60_000) == 10240 - 3328 and taken == [10240]
    monkeypatch.setattr(resource, "setrlimit", raising(ValueError("not allowed to raise maximum limit")))
    assert allow_descriptors(60_000) == 128


def test_a_limit_of_memory_that_the_system_refuses_is_none(monkeypatch: Patch) -> None:
    monkeypatch.setattr(resource, "setrlimit", raising(ValueError("current limit exceeds maximum limit")))
    assert not limit_memory(2**30)


async def test_a_group_of_ended_processes_that_may_not_be_signalled_is_no_error(monkeypatch: Patch) -> None:
    kill, sent = os.killpg, list[int]()

    def refuse(group: int, number: int) -> None:
        kill(group, number)
        sent.append(number)
        raise PermissionError(errno.EPERM, "Operation not permitted")

    verifier = SandboxVerifier((CHAR,), SandboxConfig())
    await verifier.limits_in_force()
    monkeypatch.setattr(os, "killpg", refuse)
    await verifier.close()
    assert sent == [signal.SIGKILL]


def test_the_peak_of_memory_is_in_bytes_on_every_system(monkeypatch: Patch) -> None:
    usage = SimpleNamespace(ru_maxrss=2048)
    monkeypatch.setattr(resource, "getrusage", lambda _: usage)
    peaks: list[int] = []
    for platform in ("linux", "darwin"):
        monkeypatch.setattr(sys, "platform", platform)
        peaks.append(expectations._peak_bytes_of_children())  # pyright: ignore[reportPrivateUsage]
    assert peaks == [2048 * 1024, 2048]
