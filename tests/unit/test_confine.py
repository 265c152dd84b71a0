"""Landlock where it is not: said so, and nothing taken away. Where it is: tests/unit/test_sandbox_verifier.py."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from swarm.environments.sandbox import confine
from swarm.environments.sandbox.confine import leave_readable, python_places

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Landlock is Linux only")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """System calls that were tried; none reaches the kernel, which has no Landlock here."""
    tried: list[int] = []

    def refuse(number: int, *arguments: object) -> int:
        tried.append(number)
        return -1

    monkeypatch.setattr(confine, "_call", refuse)
    monkeypatch.setattr(confine, "_num_threads", lambda: 1)
    return tried


def test_a_kernel_without_landlock_is_reported_and_nothing_else_is_tried(calls: list[int]) -> None:
    assert not leave_readable(python_places())
    assert len(calls) == 1


def test_a_process_with_other_threads_is_not_called_confined(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(confine, "_call", lambda *arguments: pytest.fail("it tried"))
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    try:
        assert not leave_readable(python_places())
    finally:
        done.set()
        other.join()


PROBE = """
import json, sys
from pathlib import Path
from swarm.environments.sandbox.confine import leave_readable, limit_process
folder = Path(sys.argv[1])
limit_process(2**31)
holds = leave_readable([folder / "open", folder / "file", folder / "absent"])
def outcome(act):
    try:
        act()
        return "done"
    except OSError as error:
        return type(error).__name__
tries = {
    "read beneath": lambda: (folder / "open" / "deep" / "x").read_bytes(),
    "read the file": lambda: (folder / "file").read_bytes(),
    "list beneath": lambda: list((folder / "open").iterdir()),
    "read beside": lambda: (folder / "shut").read_bytes(),
    "list above": lambda: list(folder.iterdir()),
    "read through a link": lambda: (folder / "open" / "link").read_bytes(),
    "write beneath": lambda: (folder / "open" / "new").touch(),
    "delete beneath": lambda: (folder / "open" / "deep" / "x").unlink(),
    "rename beneath": lambda: (folder / "open" / "deep" / "x").rename(folder / "open" / "y"),
}
print(json.dumps({"holds": holds, **{name: outcome(act) for name, act in tries.items()}}))
"""


def test_only_the_named_places_can_be_read_and_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "open" / "deep").mkdir(parents=True)
    for name in ("open/deep/x", "file", "shut"):
        (tmp_path / name).write_text("x")
    (tmp_path / "open" / "link").symlink_to(tmp_path / "shut")
    probe = subprocess.run([sys.executable, "-c", PROBE, str(tmp_path)], capture_output=True, text=True, check=True)
    found = json.loads(probe.stdout)
    if not found.pop("holds"):
        pytest.skip("no Landlock on this machine")
    allowed = {name for name, outcome in found.items() if outcome == "done"}
    assert allowed == {"read beneath", "read the file", "list beneath"}
    assert {outcome for name, outcome in found.items() if name not in allowed} == {"PermissionError"}
    assert (tmp_path / "open" / "deep" / "x").exists()


PROBE_CALLS = """
import ctypes, json, os, platform, sys
from pathlib import Path
from swarm.environments.sandbox import confine
libc = ctypes.CDLL(None)
holds = confine.limit_process(2**31)["network"]
holds = confine.hide_files([*confine.python_places(), Path(sys.argv[1])]) and holds
holds = confine.forbid_system_calls() and holds
print(json.dumps({
    "holds": holds,
    "shared memory": libc.shmget(0, 4096, 0o1600) >= 0,
    "semaphore": libc.semget(0, 1, 0o1600) >= 0,
    "messages": libc.msgget(0, 0o1600) >= 0,
    "watch": libc.inotify_init1(0) >= 0,
    "stat": os.path.exists("/etc/passwd"),
    "stat of what is allowed": Path(sys.argv[1], "x").exists(),
}))
"""


def test_objects_that_outlive_a_process_and_other_files_are_out_of_reach(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("x")
    arguments = [sys.executable, "-c", PROBE_CALLS, str(tmp_path)]
    found = json.loads(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
    if not found.pop("holds"):
        pytest.skip("no seccomp filter or no mounts in a namespace on this machine")
    assert found.pop("stat of what is allowed")
    assert set(found.values()) == {False}


PROBE_OTHERS = """
import fcntl, json, os, signal, socket, struct, sys
from swarm.environments.sandbox import confine
victim = int(sys.argv[1])
confine.limit_process(2**31)
left, right = socket.socketpair()
holds = confine.forbid_system_calls()
ends = [os.pipe() for _ in range(3)]
tries = {
    "signal": lambda: os.kill(victim, signal.SIGKILL),
    "owner of a pipe": lambda: fcntl.fcntl(ends[0][0], fcntl.F_SETOWN, victim),
    "owner of a pipe, by kind": lambda: fcntl.fcntl(ends[1][0], 15, struct.pack("ii", 1, victim)),
    "signal of a pipe": lambda: fcntl.fcntl(ends[2][0], 10, signal.SIGKILL),
    "owner of a socket": lambda: fcntl.ioctl(left, 0x8902, struct.pack("i", victim)),
    "owner of a socket, by file": lambda: fcntl.ioctl(left, 0x8901, struct.pack("i", victim)),
    "name of the host": lambda: socket.sethostname("note"),
    "cores": lambda: os.sched_setaffinity(victim, {0}),
    "policy": lambda: os.sched_setscheduler(victim, os.SCHED_IDLE, os.sched_param(0)),
}
def outcome(act):
    try:
        act()
        return "done"
    except OSError as error:
        return type(error).__name__
found = {name: outcome(act) for name, act in tries.items()}
for reader, writer in ends:
    flags = fcntl.fcntl(reader, fcntl.F_GETFL)
    fcntl.fcntl(reader, fcntl.F_SETFL, flags | os.O_ASYNC)
    os.write(writer, b"x")
print(json.dumps({"holds": holds, **found}))
"""


def test_a_confined_process_ends_and_slows_no_other_process_of_the_user() -> None:
    with subprocess.Popen(["sleep", "60"]) as victim:
        try:
            arguments = [sys.executable, "-c", PROBE_OTHERS, str(victim.pid)]
            found = json.loads(subprocess.run(arguments, capture_output=True, text=True, check=True).stdout)
            ended = victim.poll()
        finally:
            victim.kill()
    if not found.pop("holds"):
        pytest.skip("no seccomp filter on this machine")
    assert set(found.values()) == {"PermissionError"} and ended is None
