"""Open files of this process: limit, descriptors, and inspection of a socket when no descriptor is free."""

import contextlib
import errno
import os
import resource
import socket
import sys
from collections.abc import Generator, Iterable
from pathlib import Path
from typing import Final

# Files that a process opens besides its gRPC server's connections: four for each of 512 relayed connections, 256
# sockets of connections not yet relayed, pages, and others.
_OTHER_FILES: Final = 3328
_OPEN_MAX: Final = 10240  # most that macOS allows a process, though its hard limit is "unlimited"
_SHARE_OF_PAGES: Final = 8  # under a low limit, one file in so many may be a page's connection
_SHARE_OF_RELAYED: Final = 12  # one relayed connection for so many files: it opens up to four, so a third of all
_DESCRIPTORS: Final = Path("/proc/self/fd") if sys.platform == "linux" else Path("/dev/fd")


def allow_descriptors(num_connections: int) -> int:
    """Raises the limit of open files as far as allowed; returns the number of connections that then fit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = num_connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return num_connections
    most = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    for wanted in (most, max(soft, min(most, _OPEN_MAX))):
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
            break
    return min(num_connections, max(soft - _OTHER_FILES, soft // 2))


def places_for_pages(most: int) -> int:
    """Number of connections for pages that the current limit of open files allows, at most `most`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else min(most, soft // _SHARE_OF_PAGES)


def places_for_relayed(most: int) -> int:
    """Number of relayed connections that the current limit of open files allows, at most `most`."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else min(most, soft // _SHARE_OF_RELAYED)


class DescriptorPin:
    """A reserved descriptor through which to inspect a socket of other code, even if a flood left no descriptor free.

    Example:
        pin = DescriptorPin()
        with pin.held(descriptor) as held:
            held.getpeername()
        pin.close()
    """

    def __init__(self) -> None:
        self._nothing = os.open(os.devnull, os.O_RDONLY)
        self._pin = os.dup(self._nothing)

    def close(self) -> None:
        """Closes the reserved descriptors."""
        os.close(self._pin)
        os.close(self._nothing)

    @contextlib.contextmanager
    def held(self, descriptor: int) -> Generator[socket.socket]:
        """Yields the socket of a descriptor, valid even if its owner closes it. Raises OSError if it is not open."""
        os.dup2(descriptor, self._pin, inheritable=False)
        try:
            held = socket.socket(fileno=self._pin)
            try:
                yield held
            finally:
                held.detach()
        finally:
            os.dup2(self._nothing, self._pin, inheritable=False)


def open_descriptors() -> Iterable[int]:
    """File descriptors of this process, perhaps with some that are not open. Raises OSError if listing them fails."""
    try:
        return map(int, os.listdir(_DESCRIPTORS))  # noqa: PTH208 - thousands of them, ten times a second
    except OSError as error:
        if error.errno != errno.EMFILE:  # the listing takes a descriptor itself; without a free one all are open
            raise
        return range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
