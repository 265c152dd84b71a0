"""Parts that all daemons share: undone starts, an end by signal, a directory of its own."""

import asyncio
import math
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from waits import HANG_S, PROMPT_S

from swarm import __version__, process
from swarm.config import NodeConfig
from swarm.errors import ConfigError, StorageFull
from swarm.identity import Identity
from swarm.process import (
    EXIT_FORCED,
    LOCK,
    Service,
    comes,
    file_lock,
    is_running,
    load_or_create_identity,
    lock_directory,
    lock_holder,
    make_private,
    run_until_signal,
    thread_limits,
    write_json,
    written_bytes,
    written_bytes_of_tree,
)
from swarm.read_files import read_json
from swarm.sqlite_file import move_aside
from swarm.types import SealedManifest
from swarm.weight_sync.equivocation import EquivocationProof, save_proof
from swarm.wire.held_manifest import save_held
from swarm.wire.run_manifest import manifest_of, sign_manifest

STUBBORN = """
import asyncio, sys
from swarm.process import run_until_signal

async def work():
    print("ready", flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        print("draining", flush=True)
        await asyncio.Event().wait()

asyncio.run(run_until_signal(work()))
"""


class Parts(Service):
    """Starts two parts, and fails at the third when told to."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.fails = fails
        self.stopped: list[int] = []

    async def _start(self) -> None:
        for number in (1, 2):
            self._exit.callback(self.stopped.append, number)
        if self.fails:
            raise ConfigError("the third part cannot start")


async def test_what_was_started_is_stopped_in_reverse_also_when_a_later_part_fails() -> None:
    works, fails = Parts(fails=False), Parts(fails=True)
    async with works:
        assert works.stopped == []
    with pytest.raises(ConfigError, match="third part"):
        async with fails:
            raise AssertionError("it never ran")
    assert works.stopped == fails.stopped == [2, 1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_first_signal_lets_the_work_clean_up(
    number: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    cleaned: list[str] = []

    async def work() -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.Event().wait()
        finally:
            assert "a second Ctrl-C does not wait" in caplog.text, "what follows may take seconds"
            await asyncio.sleep(0)
            cleaned.append("done")

    assert await run_until_signal(work())
    assert cleaned == ["done"]
    await asyncio.sleep(0)  # nothing of the signal is left to cancel us here


async def test_work_that_ends_by_itself_was_not_asked_to() -> None:
    assert not await run_until_signal(asyncio.sleep(0))


async def test_a_cancellation_that_is_no_signal_passes_through() -> None:
    running = asyncio.create_task(run_until_signal(asyncio.sleep(60)))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def test_the_second_signal_does_not_wait_for_the_drain() -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "draining\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG_S) == EXIT_FORCED


def test_a_directory_belongs_to_one_process_at_a_time(tmp_path: Path) -> None:
    assert not is_running(tmp_path)
    held = lock_directory(tmp_path)
    assert is_running(tmp_path)
    with pytest.raises(ConfigError, match="runs there already"):
        lock_directory(tmp_path)
    os.close(held)
    assert not is_running(tmp_path)
    os.close(lock_directory(tmp_path))


def test_a_number_is_shown_only_if_the_process_that_holds_the_directory_has_it(tmp_path: Path) -> None:
    """A killed process leaves its number in the file, and by then it may be somebody else's."""
    held = lock_directory(tmp_path)
    assert lock_holder(tmp_path) == os.getpid()
    os.close(held)
    assert lock_holder(tmp_path) is None, "nobody holds it"
    own = process._birth(os.getpid())
    for written in (f"{os.getpid()} another-boot 1", f"1 {own}", "", "-1 x", "1", "\xff"):
        held = lock_directory(tmp_path)
        (tmp_path / LOCK).write_text(written)
        assert lock_holder(tmp_path) is None, written
        os.close(held)


def test_a_lock_is_never_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("kept")
    (tmp_path / LOCK).symlink_to(tmp_path / "mine.txt")
    with pytest.raises(OSError, match="symbolic"):
        lock_directory(tmp_path)
    assert (tmp_path / "mine.txt").read_text() == "kept"


def test_a_key_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "node" / "identity.key"
    assert load_or_create_identity(path).node_id == load_or_create_identity(path).node_id
    assert path.stat().st_mode & 0o077 == 0


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    write_json(path, {"step": 1})
    with path.open() as before:
        write_json(path, {"step": 2})
        assert before.read() == '{"step": 1}'
    assert path.read_text() == '{"step": 2}'
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


def test_a_status_that_the_disk_refuses_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    write_json(path, {"step": 1})

    def half(self: Path, text: str, **_: object) -> None:
        self.write_bytes(text.encode()[:3])
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", half)
        with pytest.raises(StorageFull, match=r"status\.json: No space left on device; make room"):
            write_json(path, {"step": 2})
    assert path.read_text() == '{"step": 1}' and [each.name for each in tmp_path.iterdir()] == ["status.json"]


def test_a_json_file_that_is_long_deep_or_none_is_a_value_error(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    for text, says in (("[1, 2]", "longer than 5 bytes"), ("nothing", "longer"), ("[1,", "Expecting")):
        path.write_text(text)
        with pytest.raises(ValueError, match=says):
            read_json(path, 5)
    path.write_text("[" * 200_000)
    with pytest.raises(ValueError, match="too deeply"):
        read_json(path, 10**6)
    path.write_text("[1,2]")
    assert read_json(path, 5) == [1, 2]
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "none.json", 5)


def test_a_private_directory_is_closed_also_where_it_was_open(tmp_path: Path) -> None:
    for name, was_there in (("new", False), ("old", True)):
        directory = tmp_path / name
        if was_there:
            directory.mkdir(mode=0o755)
        make_private(directory)
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_database_is_moved_aside_with_its_log(tmp_path: Path) -> None:
    path = tmp_path / "some.sqlite"
    for suffix in ("", "-wal", "-shm"):
        (tmp_path / f"some.sqlite{suffix}").write_text(suffix)
    aside = move_aside(path, 0.0)
    assert aside.name == "some.sqlite.damaged-19700101-000000"
    assert sorted(each.name.removeprefix(aside.name) for each in tmp_path.iterdir()) == ["", "-shm", "-wal"]


@pytest.mark.parametrize("what", ["manifest", "proof", "status"])
def test_what_must_outlive_a_power_cut_is_on_the_disk_before_it_takes_its_place(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a file system may keep the new name and none of the bytes. The status waits for nothing."""
    done: list[str] = []
    sync, replace = os.fsync, Path.replace

    def synced(descriptor: int) -> None:
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        sync(descriptor)

    def replaced(self: Path, target: Path) -> Path:
        done.append("replace")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    if what == "manifest":
        signed = sign_manifest(manifest_of(NodeConfig(), "run", "", 1.0), Identity.create())
        save_held(tmp_path, signed)
    elif what == "proof":
        one = SealedManifest(body=b"b", public_key=b"k", signature=b"s")
        sealed = (one, one)
        save_proof(tmp_path, EquivocationProof(policy_id="ab" * 32, branch=1, step=1, manifests=sealed))
    else:
        write_json(tmp_path / "status.json", {"step": 1})
    assert done == (["replace"] if what == "status" else ["file", "replace", "folder"])


def test_a_process_and_what_it_starts_stand_back_and_keep_to_their_threads(tmp_path: Path) -> None:
    code = (
        "import os; from swarm.process import stand_back; stand_back(7); stand_back(3); print(os.nice(0), flush=True)"
    )
    code += "; os.system('nice; echo $OMP_NUM_THREADS')"
    before = os.nice(0)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          env={**os.environ, **thread_limits(3)})  # fmt: skip
    assert done.stdout.split() == [str(max(before, 7)), str(max(before, 7)), "3"]


@pytest.mark.skipif(written_bytes() is None, reason="the system does not count what a process writes")
def test_bytes_written_are_counted_for_a_process_and_for_children_running_and_ended(tmp_path: Path) -> None:
    if _is_in_memory(tmp_path):
        pytest.skip("files of tests lie in memory here")
    size = 8 * 2**20
    write = f"import os; f = open('{tmp_path / 'file'}', 'wb'); f.write(bytes({size})); f.flush(); os.fsync(f.fileno())"
    own, tree = written_bytes(), written_bytes_of_tree()
    assert own is not None and tree is not None
    subprocess.run([sys.executable, "-c", write], check=True)
    after = written_bytes()
    assert after is not None and size <= after - own < 2 * size
    code = f"{write}; print(1, flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline()
        now = written_bytes_of_tree()
        assert now is not None and 2 * size <= now - tree < 3 * size
        child.communicate(b"\n")


def _is_in_memory(path: Path) -> bool:
    lines = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    return max((where, kind) for _, where, kind, *_ in lines if path.is_relative_to(where))[1] == "tmpfs"


@pytest.mark.parametrize(("most", "cached", "left"), [("max", 0, math.inf), ("8000", 0, 3000), ("8000", 1500, 4500)])
def test_what_a_control_group_leaves_counts_cached_files_as_free(
    most: str, cached: int, left: float, tmp_path: Path
) -> None:
    (tmp_path / "memory.max").write_text(f"{most}\n")
    (tmp_path / "memory.current").write_text("5000\n")
    (tmp_path / "memory.stat").write_text(
        f"anon 3000\ninactive_file {cached - cached // 3}\nactive_file {cached // 3}\n"
    )
    assert process._left_in_group(tmp_path) == left
    assert process._left_in_group(tmp_path / "none") == math.inf


async def test_a_wait_lasts_as_long_as_work_goes_on_up_to_a_bound_in_all() -> None:
    signs, never = iter(range(10**9)), asyncio.Event()
    assert not await comes(never.wait(), lambda: "the same", silence_s=0.05)
    assert not await comes(never.wait(), lambda: next(signs), silence_s=0.05, most_s=0.3)
    assert next(signs) >= 3, "it gave up while work went on"
    assert await comes(asyncio.sleep(0.2), lambda: next(signs), silence_s=0.05, most_s=PROMPT_S)


async def test_what_a_wait_gave_up_is_not_left_behind() -> None:
    awaited = asyncio.ensure_future(asyncio.Event().wait())
    assert not await comes(awaited, lambda: "the same", silence_s=0.05)
    assert awaited.cancelled()


def test_a_lock_that_another_holds_is_waited_for_up_to_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    held = pytest.raises(TimeoutError, match="another process has held it")
    with file_lock(path), held, file_lock(path, 0.1):
        pass
    with file_lock(path, 0.1):
        pass


def test_a_lock_follows_no_link_and_waits_for_no_pipe(tmp_path: Path) -> None:
    (tmp_path / "theirs").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    with pytest.raises(OSError, match="link"), file_lock(tmp_path / "link"):
        pass
    os.mkfifo(tmp_path / "pipe")
    with file_lock(tmp_path / "pipe", 0.1):
        pass
    assert (tmp_path / "theirs").read_text() == "precious"


def test_the_release_names_the_commit_of_a_clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "swarm").mkdir()
    monkeypatch.setattr(process, "__file__", str(tmp_path / "swarm" / "process.py"))
    assert process.release_words() == __version__, "installed"
    git, commit = tmp_path / ".git", "abcdef0123456789"
    git.mkdir()
    (git / "HEAD").write_text(commit)
    assert process.release_words() == f"{__version__}, commit abcdef012345"
    (git / "HEAD").write_text("ref: refs/heads/next\n")
    assert process.release_words() == __version__, "no commit yet"
    (git / "packed-refs").write_text(f"# pack-refs\n{commit} refs/heads/next\n")
    assert process.release_words() == f"{__version__}, commit abcdef012345"
