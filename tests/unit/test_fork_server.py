"""A forked process behaves as if it had been started from a shell, and dies with the fork server and its parent."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest
from waits import until

from swarm.errors import Unavailable
from swarm.simulate.local import fork_server as fork_server_module
from swarm.simulate.local.fork_child import STARTED_A_THREAD
from swarm.simulate.local.fork_server import Forked, ForkServer, environment, fork_server

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only"),
]

PRINTS_ITS_STATE = """
import json, os, signal, sys
print(json.dumps({
    "name": __name__,
    "arguments": sys.argv[1:],
    "note": os.environ.get("NOTE"),
    "path": os.environ.get("PATH"),
    "is_leader": os.getsid(0) == os.getpid(),
    "is_warm": "warm" in sys.modules,
    "signals": [signal.getsignal(number) == signal.SIG_DFL for number in (signal.SIGTERM, signal.SIGCHLD)],
    "num_blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "num_files": len(os.listdir("/proc/self/fd")) - 1,
    "read": sys.stdin.read(),
}))
sys.exit(3)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of importable modules: `warm` prints and starts nothing, `threaded` starts a thread."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "prints.py").write_text(PRINTS_ITS_STATE)
    (folder / "sleeps.py").write_text("import time\nprint('asleep', flush=True)\ntime.sleep(1000)\n")
    (folder / "warm.py").write_text("print('no answer')\n")
    (folder / "broken.py").write_text("raise OSError('no such library')\n")
    (folder / "threaded.py").write_text(
        "import threading, time\nimport warm\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return folder


@pytest.mark.parametrize(("imported", "is_warm"), [(["warm", "broken"], True), (["warm", "threaded"], False)])
async def test_a_fork_has_what_a_process_from_a_shell_has(
    imported: list[str], is_warm: bool, modules: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log.txt"
    log.write_text("before\n")
    async with fork_server(imported, tmp_path / "imports.txt") as forks:
        assert forks is not None
        given = {key: value for key, value in environment().items() if key != "PATH"} | {"NOTE": "given"}
        forked = await forks.fork(["prints", "--flag", "a b"], given, log)
        assert await forked.wait() == forked.returncode == 3
    first, state = log.read_text().splitlines()
    assert first == "before"
    printed = (tmp_path / "imports.txt").read_text()
    assert printed.startswith("no answer\n")
    assert (STARTED_A_THREAD in printed) == (not is_warm)
    assert ("no such library" in printed) == ("broken" in imported)
    assert json.loads(state) == {
        "name": "__main__",
        "arguments": ["--flag", "a b"],
        "note": "given",
        "path": None,
        "is_leader": True,
        "is_warm": is_warm,  # where an import has started a thread, the program begins anew
        "signals": [True, True],
        "num_blocked": 0,
        "num_files": 3,
        "read": "",
    }


async def test_a_signal_right_after_the_start_ends_a_fork(modules: Path, tmp_path: Path) -> None:
    async with fork_server((), tmp_path / "imports.txt") as forks:
        assert forks is not None
        for _ in range(20):
            forked = await forks.fork(["sleeps"], environment(), tmp_path / "log.txt")
            forked.terminate()
            assert await forked.wait() == -signal.SIGTERM


async def test_a_process_that_cannot_be_started_is_an_error(modules: Path, tmp_path: Path) -> None:
    async with fork_server((), tmp_path / "imports.txt") as forks:
        assert forks is not None
        nowhere = await forks.fork(["sleeps"], environment(), tmp_path / "no_folder" / "log.txt")
        assert await nowhere.wait() == 1
        next_one = await forks.fork(["prints"], environment(), tmp_path / "log.txt")
        assert await next_one.wait() == 3
    assert "no_folder" in (tmp_path / "imports.txt").read_text()


async def test_signals_reach_a_fork_and_its_end_is_reported(modules: Path, tmp_path: Path) -> None:
    async with fork_server((), tmp_path / "imports.txt") as forks:
        assert forks is not None
        logs = [tmp_path / f"{number}.txt" for number in range(3)]
        forked = await asyncio.gather(*(forks.fork(["sleeps"], environment(), log) for log in logs))
        await until(lambda: all(log.exists() and log.read_text() for log in logs), "their start")
        terminated, killed, left = forked
        terminated.terminate()
        os.kill(killed.pid, signal.SIGKILL)
        assert [await terminated.wait(), await killed.wait()] == [-signal.SIGTERM, -signal.SIGKILL]
        with pytest.raises(ProcessLookupError):
            terminated.terminate()
        assert psutil.pid_exists(left.pid)
    assert not psutil.pid_exists(left.pid)
    assert left.returncode == -signal.SIGKILL
    with pytest.raises(Unavailable, match="ended with exit code 0"):
        await forks.fork(["prints"], environment(), tmp_path / "late.txt")


async def _forked_and_held(forks: ForkServer, tmp_path: Path) -> tuple[Forked, psutil.Process, psutil.Process]:
    """A fork, its process, and the fork server, which does not answer from then on."""
    forked = await forks.fork(["sleeps"], environment(), tmp_path / "log.txt")
    process = psutil.Process(forked.pid)
    parent = process.parent()
    assert parent is not None
    parent.suspend()
    return forked, process, parent


async def test_a_killed_fork_server_takes_every_fork_along_and_waiting_calls_fail(
    modules: Path, tmp_path: Path
) -> None:
    async with fork_server((), tmp_path / "imports.txt") as forks:
        assert forks is not None
        forked, process, parent = await _forked_and_held(forks, tmp_path)
        waiting = asyncio.create_task(forks.fork(["prints"], environment(), tmp_path / "log.txt"))
        await asyncio.sleep(0)
        parent.kill()
        with pytest.raises(Unavailable, match=r"exit code -9; see .*imports\.txt"):
            await waiting
        assert await forked.wait() == -signal.SIGKILL
        assert psutil.wait_procs([process], 10.0)[1] == []


async def test_a_fork_server_that_hangs_is_killed_at_the_end(
    modules: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fork_server_module, "END_S", 0.3)
    async with fork_server((), tmp_path / "imports.txt") as forks:
        assert forks is not None
        _, process, parent = await _forked_and_held(forks, tmp_path)
        monkeypatch.setattr(fork_server_module, "SILENCE_S", 0.3)
        with pytest.raises(Unavailable, match=r"used no CPU for 0 s and forked nothing; see .*imports\.txt"):
            await forks.fork(["sleeps"], environment(), tmp_path / "log.txt")
    assert psutil.wait_procs([process, parent], 10.0)[1] == []


CLIENT = """
import asyncio, sys
from pathlib import Path
from swarm.simulate.local.fork_server import Forked, ForkServer, environment, fork_server

async def main():
    async with fork_server((), Path(sys.argv[1])) as forks:
        forked = await forks.fork(["sleeps"], environment(), Path(sys.argv[1]))
        print(forked.pid, flush=True)
        await forked.wait()

asyncio.run(main())
"""


async def test_forks_end_when_the_client_is_killed(modules: Path, tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CLIENT, str(tmp_path / "log.txt"), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    forked = psutil.Process(int(await process.stdout.readline()))
    parent = forked.parent()
    assert parent is not None
    process.kill()
    await process.wait()
    _, alive = await asyncio.to_thread(psutil.wait_procs, [forked, parent], 10.0)
    assert not alive
