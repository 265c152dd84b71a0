"""Counts of the kernel for the TCP sockets of this process, and their sum: bytes on the wire.

Invariant: counts come from TCP_INFO of each open socket, so nothing of other processes is in them and no
relay stands between the peers. Linux only; elsewhere `tcp_counts` returns None.
"""

import os
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HEADER_BYTES: Final = 52  # IPv4 20, TCP 20, timestamps option 12
_BYTES_RECEIVED_AT: Final = 128  # offsets in struct tcp_info of linux/tcp.h, unchanged since Linux 4.1
_SEGMENTS_IN_AT: Final = 140


@dataclass(frozen=True, slots=True)
class TcpCounts:
    """Totals over the sockets of a process, both directions of all its connections as received here."""

    payload_bytes: int  # what TCP delivered: TLS records with all that is in them
    segments: int  # packets that arrived, bare acknowledgements included

    @property
    def wire_bytes(self) -> int:
        """Payload and the headers of every packet."""
        return self.payload_bytes + HEADER_BYTES * self.segments

    def __sub__(self, other: "TcpCounts") -> "TcpCounts":
        return TcpCounts(self.payload_bytes - other.payload_bytes, self.segments - other.segments)

    def __add__(self, other: "TcpCounts") -> "TcpCounts":
        return TcpCounts(self.payload_bytes + other.payload_bytes, self.segments + other.segments)


def tcp_counts() -> TcpCounts | None:
    """Received so far on every connected TCP socket that is open in this process; None where the kernel cannot say."""
    if sys.platform != "linux":
        return None
    total = TcpCounts(0, 0)
    for entry in list(Path("/proc/self/fd").iterdir()):
        info = _tcp_info(int(entry.name))
        if info is not None:
            total += TcpCounts(
                struct.unpack_from("Q", info, _BYTES_RECEIVED_AT)[0], struct.unpack_from("I", info, _SEGMENTS_IN_AT)[0]
            )
    return total


def _tcp_info(descriptor: int) -> bytes | None:
    """struct tcp_info of a connected TCP socket, or None for any other descriptor."""
    try:
        if not Path(f"/proc/self/fd/{descriptor}").readlink().name.startswith("socket:"):
            return None
        with socket.socket(fileno=os.dup(descriptor)) as duplicate:
            if duplicate.type != socket.SOCK_STREAM or duplicate.family == socket.AF_UNIX:
                return None
            duplicate.getpeername()  # a listening socket has none
            info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    except OSError:
        return None
    return info if len(info) >= _SEGMENTS_IN_AT + 4 else None
