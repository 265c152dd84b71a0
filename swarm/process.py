"""Long-running processes: directory locks, start of parts in order, drain on a signal, resources of a process, files.

Invariant: every started part is stopped, in reverse order, also if a later part fails to start; the first signal
drains, the second ends the process at once.
"""

import asyncio
import contextlib
import ctypes
import fcntl
import gc
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator
from pathlib import Path
from typing import Any, Final, Self

from swarm import __version__
from swarm.errors import ConfigError, StorageFull, SwarmError, missing_extra
from swarm.identity import Identity
from swarm.printable import printable
from swarm.read_files import read_bounded
from swarm.types import JsonDict

logger = logging.getLogger(__name__)

LOCK = "lock"  # file locked by a daemon for as long as it lives
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
_PR_SET_PDEATHSIG, _PR_GET_PDEATHSIG = 1, 2  # linux/prctl.h
END_SILENCE_S: Final = 60.0  # of a process that is to end: no CPU used, and no byte written to the disk
END_S: Final = 600.0  # longest wait for the end in all: a worker saves, and peers may keep a serving process busy
LOOK_S: Final = 1.0
STILL_S: Final = 9.0  # somebody who waits sees a line within ten seconds
EXIT_FORCED = 130  # a second signal did not wait for the drain


def defer_gc() -> None:
    """Disables the garbage collector during start-up, until `freeze_gc`.

    Nearly all objects that importing torch, transformers and hivemind makes stay alive; collecting among them again and
    again took a fifth of a worker's start (CPU seconds: 4.8 with it, 3.8 without).
    """
    gc.disable()


def release_words() -> str:
    """Version of the program, and the commit of the clone that it runs from, if it runs from one (blocking)."""
    git = Path(__file__).parents[1] / ".git"
    try:
        head = (git / "HEAD").read_text(encoding="utf-8").strip()
        place = head.removeprefix("ref: ")
        known = [line.split(" ")[0] for line in _lines(git / "packed-refs") if line.endswith(f" {place}")]
        commit = head if place == head else next(iter([*_lines(git / place), *known]))
    except (OSError, StopIteration):  # installed, or a work tree of another clone
        return __version__
    return f"{__version__}, commit {commit[:12]}"


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []


def freeze_gc() -> None:
    """Ends start-up: exempts the objects made so far from garbage collection, and enables it for later ones.

    Does nothing if the collector is enabled already, so the caller may run inside another program.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()


def die_with(parent: int) -> None:
    """Makes this process end when its parent process ends: the kernel kills it, or a thread that checks once a second.

    Exits at once (SystemExit) if `parent` is not, or no longer, the parent of this process.
    """
    if has_parent_signal():
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_end_with, args=(parent,), name="parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before this was in force
        sys.exit(f"the process that started this one ({parent}) is gone")


def has_parent_signal() -> bool:
    """True if the kernel can signal a process when its parent ends (only Linux can)."""
    return sys.platform == "linux" and _prctl(_PR_GET_PDEATHSIG, ctypes.byref(ctypes.c_int())) == 0


def _prctl(option: int, argument: Any) -> int:
    return int(ctypes.CDLL(None, use_errno=True).prctl(option, argument))


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK_S)
    os.kill(os.getpid(), signal.SIGKILL)  # as the kernel does: nothing of it waits for anything


def can_fork_after_imports() -> bool:
    """True if a process that has imported torch may be forked: on Linux, whose /proc lists its threads."""
    return sys.platform == "linux" and Path("/proc/self/task").exists()


def num_usable_cores() -> int:
    """Number of cores that this process may use; all cores of the machine if the system does not report it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def boot_id() -> str:
    """Id of the machine's boot; without Linux's id, the minute of the boot, which changes if the clock is set."""
    with contextlib.suppress(OSError):
        return BOOT_ID.read_text(encoding="ascii").strip()
    import psutil

    return f"{psutil.boot_time() / 60:.0f}"


def written_bytes(pid: int | None = None) -> int | None:
    """Bytes that a process, and each ended child that it waited for, sent to the disk; None if not known (only Linux).

    Pages that were deleted before they reached the disk do not count.

    Args:
        pid: a process of this user; None: this process.
    """
    try:
        lines = Path(f"/proc/{pid or 'self'}/io").read_text(encoding="ascii").splitlines()
        counts = {name: int(count) for name, _, count in (line.partition(": ") for line in lines)}
        return max(0, counts["write_bytes"] - counts["cancelled_write_bytes"])
    except (OSError, ValueError, KeyError):
        return None


def written_bytes_of_tree() -> int | None:
    """`written_bytes` of this process and all its descendants, running or waited for; None if not known."""
    own = written_bytes()
    return None if own is None else own + sum(written_bytes(pid) or 0 for pid in _descendants(os.getpid()))


def _descendants(pid: int) -> Iterator[int]:
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text(encoding="ascii").split()):
                yield child
                yield from _descendants(child)


def available_bytes() -> int:
    """Memory that this process may still use, bytes: of the machine, or of its control groups (Linux, version 2)."""
    import psutil

    available = psutil.virtual_memory().available
    with contextlib.suppress(OSError, IndexError):
        own = Path("/proc/self/cgroup").read_text(encoding="ascii").split("0::/")[1].strip()
        folder = CONTROL_GROUPS / own
        available = min(available, *(_left_in_group(each) for each in (folder, *folder.parents)))
    return int(available)


def _left_in_group(folder: Path) -> float:
    """Bytes that a control group may still use, its cached files included; infinite if it has no bound."""
    try:
        most = int((folder / "memory.max").read_text(encoding="ascii"))  # or "max"
        used = int((folder / "memory.current").read_text(encoding="ascii"))
        pairs = (line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        counts = {name: int(count) for name, count in pairs}
        return most - used + counts["inactive_file"] + counts["active_file"]
    except (OSError, ValueError, KeyError):
        return math.inf


def cpu_s(pid: int, *, is_whole_tree: bool = True) -> float:
    """CPU seconds of a process and (`is_whole_tree`) its running descendants; 0 if the process has ended."""
    import psutil

    total = 0.0
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        for each in (process, *(process.children(recursive=True) if is_whole_tree else ())):
            with contextlib.suppress(psutil.Error):
                times = each.cpu_times()
                total += times.user + times.system
    return total


def work_of(pid: int) -> tuple[int, int]:
    """Sign of life of a process: whole CPU seconds of its tree, and bytes that the process sent to the disk."""
    return int(cpu_s(pid)), written_bytes(pid) or 0


async def comes(
    awaited: Awaitable[object],
    sign: Callable[[], object],
    silence_s: float = END_SILENCE_S,
    most_s: float = END_S,
) -> bool:
    """Waits for the result or end of a process of ours as long as the process shows signs of life.

    Args:
        awaited: the result or end; its errors are not raised. Cancelled if it has not come.
        sign: sign of life, which changes while the process works (blocking).
        silence_s: longest time without a change of `sign`.
        most_s: longest wait in all.

    Returns:
        True if `awaited` is done; False if the wait was given up.
    """
    task, last = asyncio.ensure_future(awaited), None
    began_s = seen_s = time.monotonic()
    try:
        while not (await asyncio.wait({task}, timeout=min(LOOK_S, silence_s)))[0]:
            newest, now_s = await asyncio.to_thread(sign), time.monotonic()
            if newest != last:
                last, seen_s = newest, now_s
            if now_s - seen_s >= silence_s or now_s - began_s >= most_s:
                return False
        return True
    finally:
        task.cancel()
        await asyncio.wait({task})


class Service(ABC):
    """Async context manager that starts on entry and stops on exit.

    A subclass implements `_start`, which registers the stop of each started part in `_exit`.

    Example:
        async with Daemon(config) as daemon:
            await daemon.run()
    """

    def __init__(self) -> None:
        self._exit = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._exit.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exit.aclose()

    @abstractmethod
    async def _start(self) -> None:
        """Starts every part, and registers the stop of each in `_exit` right after its start."""


async def run_until_signal(work: Coroutine[Any, Any, None], say: Callable[[str], None] = logger.info) -> bool:
    """Awaits `work`; the first SIGTERM or SIGINT cancels it (drain), the second ends the process at once.

    Closing the terminal (SIGHUP) also starts the drain, unless the process was started to outlive it (nohup).

    Args:
        work: the work of the process.
        say: called with a line for people at the first signal.

    Returns:
        True if a signal came, False if `work` returned without one.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    is_asked, asked_s = False, 0.0

    def say_on() -> None:
        if is_asked and not has_ended:
            say(f"still stopping, after {loop.time() - asked_s:.0f} s: what is under way is ended and saved")
            loop.call_later(STILL_S, say_on)

    def stop() -> None:
        nonlocal is_asked, asked_s
        if is_asked:
            os._exit(EXIT_FORCED)
        is_asked, asked_s = True, loop.time()
        loop.call_later(STILL_S, say_on)
        say("stopping: what is under way is ended and saved; a second Ctrl-C does not wait for that")
        task.cancel()

    terminals = [each for each in (1, 2) if os.isatty(each)]

    def hang_up() -> None:
        if not is_asked:  # the shell sends the signal, too
            for each in terminals:
                _discard(each)
            stop()

    has_ended, numbers = False, [signal.SIGTERM, signal.SIGINT]
    for number in numbers:
        loop.add_signal_handler(number, stop)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:
        numbers.append(signal.SIGHUP)
        loop.add_signal_handler(signal.SIGHUP, hang_up)
    try:
        await work
    except asyncio.CancelledError:
        if not is_asked:
            raise
        task.uncancel()
    finally:
        has_ended = True
        for number in numbers:
            loop.remove_signal_handler(number)
    return is_asked


def _discard(descriptor: int) -> None:
    """Redirects a descriptor to the null device: a write to a closed terminal would raise OSError."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)


@contextlib.contextmanager
def errors_explained() -> Generator[None]:
    """Context manager of a command: prints a SwarmError or a missing extra, and raises typer.Exit (code 2) instead."""
    import typer
    from rich.console import Console
    from rich.markup import escape

    try:
        yield
    except (SwarmError, ModuleNotFoundError) as raised:
        error = missing_extra(raised) if isinstance(raised, ModuleNotFoundError) else raised
        if error is None:
            raise
        text = escape(printable(str(error)))  # it may quote an answer, or a file that somebody sent
        Console(stderr=True).print(f"[red]{type(error).__name__}:[/red] {text}", soft_wrap=True)
        raise typer.Exit(2) from None


def thread_limits(num_threads: int) -> dict[str, str]:
    """Environment variables that bound the threads of computations in a process and its children."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "GOMAXPROCS")
    return {**dict.fromkeys(names, str(num_threads)), "TOKENIZERS_PARALLELISM": "false"}


def run_bounded(entry: str, request: bytes, cpu_s: int, memory_bytes: int) -> bytes:
    """Runs a function of this package in a process with limits, and returns what it printed (blocking).

    Args:
        entry: "module:function", called without arguments.
        request: its standard input.
        cpu_s: most CPU time.
        memory_bytes: largest address space.

    Raises:
        ValueError: the process exceeded a limit or failed; the message is a predicate, such as "took more than 1 MiB".
    """
    module, _, function = entry.partition(":")
    limits = {"RLIMIT_CPU": cpu_s, "RLIMIT_AS": memory_bytes, "RLIMIT_CORE": 0}
    code = (
        "import contextlib, resource as r\n"
        f"for name, most in {limits}.items():\n"
        "    with contextlib.suppress(ValueError, OSError):\n"
        "        r.setrlimit(getattr(r, name), (most, most))\n"
        f"import {module} as m; m.{function}()"
    )
    command = [sys.executable, "-I", "-c", code]
    done = subprocess.run(command, input=request, capture_output=True, env=os.environ | thread_limits(1), check=False)
    if done.returncode in (-signal.SIGKILL, -signal.SIGXCPU):
        raise ValueError(f"took more than {cpu_s} s of CPU")
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        is_memory = "MemoryError" in said or "memory allocation" in said
        raise ValueError(f"took more than {memory_bytes >> 20:,} MiB" if is_memory else f"failed: {said:.300}")
    return done.stdout


def stand_back(niceness: int) -> None:
    """Raises the niceness of this process, and of the processes that it starts later, to at least `niceness`."""
    os.nice(max(0, niceness - os.nice(0)))


def lock_directory(directory: Path) -> int:
    """Locks a directory for this process, until the returned descriptor is closed or the process ends.

    Raises:
        ConfigError: another process holds the lock.
        OSError: the lock file cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # no link, no pipe is waited for
    descriptor = os.open(directory / LOCK, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        holder = lock_holder(directory)
        raise ConfigError(
            f"{directory}: a process runs there already{f' (pid {holder})' if holder else ''}; stop it, or give this "
            "one another dir"
        ) from None
    with contextlib.suppress(OSError):  # a full disk stops no start: the number is for people
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {_birth(os.getpid())}".encode(), 0)
    return descriptor


def lock_holder(directory: Path) -> int | None:
    """Process id of the process that holds the lock of a directory; None if that cannot be proved.

    The lock must be held, and the process with the id in the lock file must have the start time that stands there: the
    system reuses process ids.
    """
    try:
        number, _, birth = read_bounded(directory / LOCK, 200).decode("ascii").partition(" ")
    except (OSError, ValueError):
        return None
    is_proved = number.isdecimal() and birth and birth == _birth(int(number)) and is_running(directory)
    return int(number) if is_proved else None


def _birth(pid: int) -> str:
    """Boot id and start time of a process, which identify it among all processes with its id; "" without a process."""
    if not Path("/proc/self/stat").exists():
        import psutil

        with contextlib.suppress(psutil.Error, ValueError, OverflowError):
            return f"{psutil.Process(pid).create_time()}"
        return ""
    try:
        ticks = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
    return f"{boot_id()} {ticks}"


@contextlib.contextmanager
def file_lock(path: Path, most_s: float = math.inf) -> Generator[None]:
    """Context manager that holds a lock file, as one process of the machine at a time (blocking).

    Args:
        path: the lock file; created if it is missing.
        most_s: longest wait for the lock, seconds.

    Raises:
        OSError: the file cannot be opened; a TimeoutError if another process held the lock for `most_s`.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK  # no link, no pipe is waited for
    descriptor = os.open(path, flags, 0o600)
    try:
        end_s = time.monotonic() + most_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end_s:
                    raise TimeoutError(f"{path}: another process has held it for {most_s:.0f} s") from None
                time.sleep(0.05)
        yield
    finally:
        os.close(descriptor)


def is_running(directory: Path) -> bool:
    """True if a process holds the lock of a directory, or if another user's lock file cannot be read."""
    try:
        descriptor = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except PermissionError:
        return True
    except OSError:  # usually there is no lock file
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def load_or_create_identity(path: Path) -> Identity:
    """Loads the key in a file, or creates it if there is none. Raises ConfigError if it cannot be read or written."""
    if path.exists():
        return Identity.load(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    identity = Identity.create()
    identity.save(path)
    return identity


def silence_grpc() -> None:
    """Keeps gRPC's own log lines below errors off the terminal, unless GRPC_VERBOSITY is set already.

    To be called before the first channel is made, when gRPC's C core reads the variable.
    """
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def make_private(directory: Path) -> None:
    """Makes a directory, or changes its mode, so that no other user can enter; only warns if it is another user's."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_mode & 0o077:
        try:
            directory.chmod(0o700)
        except PermissionError:
            logger.warning("other users can read this directory, and it is not ours to close", extra={"dir": directory})


def sync_path(path: Path) -> None:
    """Waits until the content of a file, or the entries of a directory, have reached the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, data: JsonDict | list[str], *, is_durable: bool = False) -> None:
    """Writes or replaces a JSON file atomically, so that a reader never sees a partial file.

    Args:
        path: path of the file.
        data: new content.
        is_durable: True: waits for the disk, so that a power cut leaves either the old or the new file whole.

    Raises:
        StorageFull: the file cannot be written, for any OSError; the old file usually stays.
    """
    draft = path.with_suffix(".tmp")
    try:
        draft.write_text(json.dumps(data), encoding="utf-8")
        if is_durable:
            sync_path(draft)
        draft.replace(path)
        if is_durable:
            sync_path(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise StorageFull(error.errno, f"{path}: {error.strerror or error}; make room on the disk") from None


def wait_for_signal() -> None:
    """Waits for Ctrl-C or SIGTERM (blocking; main thread only)."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    ended.wait()
