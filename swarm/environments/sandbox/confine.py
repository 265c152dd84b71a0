"""Takes rights away from the current process for good: resource limits, namespaces, seccomp, Landlock (Linux).

Invariant: this module imports the standard library only; a limit that it reports as in force was accepted by the kernel
and cannot be undone. On systems other than Linux, only the resource limits are set, and all else is reported as not
in force.
"""

import ctypes
import os
import platform
import resource
import signal
import struct
import sys
import sysconfig
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_NEWNS = 0x00020000
_CLONE_NEWUTS = 0x04000000
_CLONE_NEWIPC = 0x08000000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWNET = 0x40000000
_MS_BIND, _MS_REC, _MS_PRIVATE, _MNT_DETACH = 1 << 12, 1 << 14, 1 << 18, 2
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_POINTS = ("/mnt", "/tmp", "/var", "/home")  # any folder does: what is below it is hidden from this process only
_HOST_NAME = b"sandbox"
_MAX_OPEN_FILES = 64

# Audit architecture, then system call numbers that are refused (asm/unistd_64.h, asm-generic/unistd.h):
# starting processes and threads, networking, signalling, tracing or scheduling others, changing files, objects that
# outlive a process (System V, message queues, keys, the host's name) or that all share (AIO), watching files, mounting,
# and detours to these. Opening a file for reading stays possible, opening one in any other mode is refused.
_ARCHITECTURES: dict[str, tuple[int, dict[int, int], tuple[int, ...], str]] = {
    "x86_64": (
        0xC000003E,
        {2: 24, 257: 32},  # open, openat: byte offset of their flags in seccomp_data
        (72, 16),  # fcntl, ioctl
        "29 30 31 41 42 53 56 57 58 59 62 64 65 66 67 68 69 70 71 76 77 82 83 84 85 86 87 88 90 91 92 93 94 101 109 "
        "112 129 132 133 141 142 144 155 160 165 166 170 171 188 189 190 200 203 206 220 234 235 240 241 242 243 244 "
        "245 248 249 250 253 254 255 256 258 259 260 263 264 265 266 268 272 279 280 294 297 298 300 301 302 303 304 "
        "308 310 311 314 316 319 321 322 323 424 425 428 429 430 431 432 433 434 435 437 438 442 452",
    ),
    "aarch64": (
        0xC00000B7,
        {56: 32},
        (25, 29),
        "0 5 6 7 26 27 28 33 34 35 36 37 38 39 40 41 45 46 52 53 54 55 88 97 117 118 119 122 129 130 131 138 140 154 "
        "157 161 162 164 180 181 182 183 184 185 186 187 188 189 190 191 192 193 194 195 196 197 198 199 203 217 218 "
        "219 220 221 238 239 240 241 261 262 263 264 265 268 270 271 274 276 279 280 281 282 424 425 428 429 430 431 "
        "432 433 434 435 437 438 442 452",
    ),
}
# Commands of fcntl and ioctl that name another process, which the kernel then signals at a write to the file:
# F_SETOWN, F_SETSIG, F_SETOWN_EX, FIOSETOWN, SIOCSPGRP. Tried: SIGKILL by a pipe ended any process of the same user.
_NAMING_A_PROCESS = (8, 10, 15, 0x8901, 0x8902)
_COMMAND_OFFSET = 24  # of the second argument in seccomp_data
_X32_BIT = 0x40000000
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# linux/landlock.h, documented in Documentation/userspace-api/landlock.rst; the numbers are the same on every machine.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION = 1
_RULE_PATH_BENEATH = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
# Every right that a version of the interface knows is taken: execute, write, read, remove, make, ... (13 rights),
# then refer (2), truncate (3) and ioctl on devices (5).
_RIGHTS_BY_VERSION = ((5, (1 << 16) - 1), (3, (1 << 15) - 1), (2, (1 << 14) - 1), (1, (1 << 13) - 1))
_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")


def limit_process(memory_bytes: int) -> dict[str, bool]:
    """Limits address space and files of this process and its forks, and takes away privileges and the network.

    Args:
        memory_bytes: largest address space.

    Returns:
        Name of each limit -> True if it is in force.
    """
    in_force = {
        "memory": limit_memory(memory_bytes),
        "open_files": _limit(resource.RLIMIT_NOFILE, _MAX_OPEN_FILES),
        "file_size": _limit(resource.RLIMIT_FSIZE, 0),
        "core_dumps": _limit(resource.RLIMIT_CORE, 0),
    }
    is_linux = sys.platform == "linux"
    in_force["dies_with_parent"] = is_linux and _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    in_force["no_new_privileges"] = is_linux and _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    user, group = os.geteuid(), os.getegid()
    in_force["network"] = is_linux and _libc().unshare(_CLONE_NEWUSER | _CLONE_NEWNET) == 0
    if in_force["network"]:
        _keep_ids(user, group)
    if is_linux and _libc().unshare(_CLONE_NEWIPC | _CLONE_NEWUTS) == 0:
        _libc().sethostname(_HOST_NAME, len(_HOST_NAME))
    if is_linux:
        _prctl(_PR_SET_DUMPABLE, 0)
    return in_force


def limit_memory(memory_bytes: int) -> bool:
    """Limits the address space of this process and its forks; returns False if the system refuses (macOS)."""
    return _limit(resource.RLIMIT_AS, memory_bytes)


def limit_scoring(cpu_s: int, parent: int) -> dict[str, bool]:
    """Limits a fork of a limited process further: bounds its CPU time, forbids new processes, ends it with its parent.

    Args:
        cpu_s: CPU seconds after which the kernel kills this process.
        parent: id of the parent process; if the parent has ended, this process exits.

    Returns:
        Name of each limit -> True if it is in force.
    """
    is_linux = sys.platform == "linux"
    dies = is_linux and _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a fork does not inherit it
    if os.getppid() != parent:  # it ended before that
        os._exit(0)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    return {
        "cpu": _limit(resource.RLIMIT_CPU, cpu_s),
        "processes": _limit(resource.RLIMIT_NPROC, 0),
        "dies_with_parent": dies,
    }


def forbid_system_calls() -> bool:
    """Forbids, from now on, new processes and threads, sockets, signals to others, and changes to any file.

    Returns:
        True if the kernel accepted the filter, which cannot be removed. Needs no-new-privileges.
    """
    program = _program()
    if not program:
        return False
    code = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code))  # struct sock_fprog
    return _prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(header))


def python_places() -> list[Path]:
    """Paths of this interpreter's modules, of this package, and of shared libraries."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    own = Path(__file__).parents[2]
    libraries = (Path(sys.base_prefix) / "lib", Path(sys.base_exec_prefix) / "lib")
    return [*map(Path, installed), own, *libraries, *map(Path, _SYSTEM_LIBRARIES)]


def hide_files(places: Iterable[Path]) -> bool:
    """Hides all files but `places` from this process and its forks: they cannot open, find or watch any other file.

    The process gets its own root, made of bind mounts, which becomes its working directory. Open files stay open.

    Returns:
        True if the files are hidden; False on another system, or if mounts are not allowed in a namespace.
    """
    number = _PIVOT_ROOT.get(platform.machine()) if sys.platform == "linux" else None
    root = next((point for point in _MOUNT_POINTS if Path(point).is_dir()), None)
    if number is None or root is None or _libc().unshare(_CLONE_NEWNS) != 0:
        return False
    # Opened first: the mount point may be above one of them.
    opened = {place: os.open(place, os.O_PATH | os.O_CLOEXEC) for place in sorted(set(places)) if place.exists()}
    try:
        is_made = _mount(None, "/", None, _MS_REC | _MS_PRIVATE) and _mount("tmpfs", root, "tmpfs", 0)
        if is_made and all(_bind(descriptor, Path(root + str(place))) for place, descriptor in opened.items()):
            os.chdir(root)
            if _call(number, b".", b".") == 0:
                _libc().umount2(b".", _MNT_DETACH)  # the old root, which the new one was put on
                os.chdir("/")
                return not Path("/proc").exists()
    except OSError:
        pass
    finally:
        for descriptor in opened.values():
            os.close(descriptor)
    _libc().umount2(root.encode(), _MNT_DETACH)
    return False


def leave_readable(places: Iterable[Path]) -> bool:
    """Allows, from now on, files to be opened for reading only, and only at or below `places`.

    Open files stay open. Needs no-new-privileges.

    Returns:
        True if the kernel enforces this for the whole process; False on another system, without Landlock, or if
        the process has other threads, which would keep their rights.
    """
    if sys.platform != "linux" or _num_threads() != 1:
        return False
    version = _call(_CREATE_RULESET, None, 0, _GET_VERSION)
    rights = next((rights for least, rights in _RIGHTS_BY_VERSION if version >= least), 0)
    if not rights:
        return False
    ruleset = _call(_CREATE_RULESET, struct.pack("Q", rights), 8, 0)
    if ruleset < 0:
        return False
    try:
        return all(_allow(ruleset, place) for place in places) and _call(_RESTRICT_SELF, ruleset, 0) == 0
    finally:
        os.close(ruleset)


@cache
def _program() -> bytes:
    """The seccomp filter for this machine; b"" if there is none."""
    known = _ARCHITECTURES.get(platform.machine()) if sys.platform == "linux" else None
    return b"" if known is None else _filter(*known)


def _filter(architecture: int, opens: dict[int, int], commands: tuple[int, ...], refused: str) -> bytes:
    """The classic BPF program over struct seccomp_data {int nr; u32 arch; u64 ip; u64 args[6]}."""
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse = 0x7FFF0000, 0x00050001  # SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO with EPERM
    lines: list[tuple[int, int, int, int]] = [(load, 0, 0, 4), (equal, 1, 0, architecture), (give, 0, 0, refuse)]
    lines += [(load, 0, 0, 0), (at_least, 0, 1, _X32_BIT), (give, 0, 0, refuse)]
    for number in map(int, refused.split()):
        lines += [(equal, 0, 1, number), (give, 0, 0, refuse)]
    for number, offset in opens.items():
        lines += [(equal, 0, 4, number), (load, 0, 0, offset), (any_bit, 0, 1, _WRITING)]
        lines += [(give, 0, 0, refuse), (give, 0, 0, allow)]
    for number in commands:
        lines += [(equal, 0, 2 + 2 * len(_NAMING_A_PROCESS), number), (load, 0, 0, _COMMAND_OFFSET)]
        for command in _NAMING_A_PROCESS:
            lines += [(equal, 0, 1, command), (give, 0, 0, refuse)]
        lines.append((give, 0, 0, allow))
    lines.append((give, 0, 0, allow))
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def _limit(which: int, value: int) -> bool:
    with suppress(OSError, ValueError):
        _, hard = resource.getrlimit(which)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))
        return True
    return False


def _prctl(option: int, value: int, pointer: ctypes.c_char_p | int = 0) -> bool:
    return _libc().prctl(option, ctypes.c_ulong(value), pointer, ctypes.c_ulong(0), ctypes.c_ulong(0)) == 0


@cache  # every fork inherits it
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _num_threads() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()  # hidden: threads of Python


def _keep_ids(user: int, group: int) -> None:
    """Maps the former user and group ids into the new namespace; else this process could not create any file."""
    with suppress(OSError):
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(descriptor, text.encode())
            finally:
                os.close(descriptor)


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> bool:
    words = [None if word is None else word.encode() for word in (source, target, kind)]
    return _libc().mount(*words, ctypes.c_ulong(flags), None) == 0


def _bind(descriptor: int, target: Path) -> bool:
    """Mounts an opened place below the new root, unless it is inside a mounted place. Returns False if refused."""
    if target.exists():
        return True
    source = f"/proc/self/fd/{descriptor}"
    if Path(source).is_dir():
        target.mkdir(parents=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    return _mount(source, str(target), None, _MS_BIND | _MS_REC)


def _allow(ruleset: int, place: Path) -> bool:
    """Adds a rule for one place; a place that does not exist needs none. False if the kernel refuses."""
    try:
        descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return True
    try:
        rights = _READ_FILE | (_READ_DIR if place.is_dir() else 0)
        rule = struct.pack("=Qi", rights, descriptor)  # struct landlock_path_beneath_attr is packed
        return _call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, rule, 0) == 0
    finally:
        os.close(descriptor)


def _call(number: int, *arguments: bytes | int | None) -> int:
    """Makes a system call and returns its result, negative if the kernel refused it."""
    libc = _libc()
    libc.syscall.restype = ctypes.c_long
    words = [ctypes.c_long(a) if isinstance(a, int) else ctypes.c_char_p(a) for a in arguments]
    return int(libc.syscall(ctypes.c_long(number), *words))
