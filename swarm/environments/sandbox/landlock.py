"""Takes the file system away from the current process but for named places, which stay readable (Linux Landlock).

Invariant: standard library only; what is reported as in force was accepted by the kernel and cannot be undone.
"""

import ctypes
import os
import struct
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

# linux/landlock.h, documented in Documentation/userspace-api/landlock.rst; the numbers are the same on every machine.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION = 1
_RULE_PATH_BENEATH = 1
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
# Every right that a version of the interface knows is taken: execute, write, read, remove, make, ... (13 rights),
# then refer (2), truncate (3) and ioctl on devices (5).
_RIGHTS_BY_VERSION = ((5, (1 << 16) - 1), (3, (1 << 15) - 1), (2, (1 << 14) - 1), (1, (1 << 13) - 1))
_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")


def python_places() -> list[Path]:
    """Where this interpreter finds its modules and shared libraries, and this package."""
    installed = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    own = Path(__file__).parents[2]
    libraries = (Path(sys.base_prefix) / "lib", Path(sys.base_exec_prefix) / "lib")
    return [*map(Path, installed), own, *libraries, *map(Path, _SYSTEM_LIBRARIES)]


def leave_readable(places: Iterable[Path]) -> bool:
    """From now on files can be opened for reading at and below `places` only, and for nothing else anywhere.

    What is open stays open. Needs no-new-privileges.

    Returns:
        Whether the kernel enforces it for the whole process: False on another system, without Landlock, or when
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


def _num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _allow(ruleset: int, place: Path) -> bool:
    """Adds one place; one that does not exist needs no rule."""
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
    """A system call; negative when the kernel refused it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    words = [ctypes.c_long(a) if isinstance(a, int) else ctypes.c_char_p(a) for a in arguments]
    return int(libc.syscall(ctypes.c_long(number), *words))
