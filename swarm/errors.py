"""Exceptions of the project, ordered by what the caller does next.

SwarmError
+-- ConfigError        stop; the message names the key and the fix
+-- Unavailable        retry with backoff and jitter (network, peer, coordinator, DHT)
|   +-- Unauthenticated  the other side could not prove who it is: drop it, do not retry as is
|   |   +-- OtherNode    it proved to be another node than the one expected
|   +-- Forged         its data does not match the digest asked for: ask another one, avoid this one for a while
+-- NotHeld            this holder lacks it: ask another one
+-- TooLarge           over a size limit: drop, do not retry
+-- RolloutFailed      record on the rollout and go on
|   +-- OverBudget     its party has used up its scoring time: no verdict on these episodes
+-- WeightsRefused     the engine keeps its old weights and version: report, and take the next version
+-- NonFiniteStep      skip the update, keep the old version
+-- StorageFull        the disk is full: stop accepting, keep serving, warn the operator

Data of a peer that this node refuses is no exception but a `swarm.types.Refused` value.
"""

import errno
import traceback
from pathlib import Path
from typing import Final

# A disk that fails is often remounted read-only.
_DISK_FULL: Final = frozenset({errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EFBIG, errno.EROFS})
_MESSAGE_CHARS: Final = 300  # of an error of local code


class SwarmError(Exception):
    """Base of every exception raised on purpose by this project."""

    pause_s = 0.0  # wait of this node before it answers a remote caller with this error


class ConfigError(SwarmError, ValueError):
    """A configuration, file or command that cannot work. The message names the cause and the fix."""


class Unavailable(SwarmError, ConnectionError):
    """A remote side did not answer in time, refused, or broke off; a later attempt may succeed."""


class Unauthenticated(Unavailable):
    """The remote side did not prove its identity, or did not accept our proof."""


class OtherNode(Unauthenticated):
    """The remote side proved to be another node than the expected one."""

    def __init__(self, message: str, found: str) -> None:
        """Stores `found`, the node id that the remote side proved."""
        super().__init__(message)
        self.found = found


class Forged(Unavailable):
    """Data from a remote side does not match the requested digest."""


class NotHeld(SwarmError, LookupError):
    """The holder does not have the requested content."""


class TooLarge(SwarmError, ValueError):
    """Content exceeds a size limit, or a request breaks a bound."""


class RolloutFailed(SwarmError, RuntimeError):
    """Generation or scoring of a rollout or its group failed; the node goes on without it."""


class OverBudget(RolloutFailed):
    """One party has used up its scoring time, so its episodes were not replayed, or not to the end."""


class WeightsRefused(SwarmError, ValueError):
    """An engine refused new weights and still serves the previous version."""


class NonFiniteStep(SwarmError, ArithmeticError):
    """Loss or gradient was not finite; the update was skipped and the old version kept."""


class StorageFull(SwarmError, OSError):
    """A write failed because the disk or a byte budget is full or the disk refused it; stored data is not lost."""


def is_disk_full(error: BaseException) -> bool:
    """True for an OSError of a full disk or quota, a file-size limit, or a failing or read-only device."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL


def described(error: BaseException) -> str:
    """Class, shortened message and place of a raised error of local code, in ASCII: the message may be hostile."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    text = "more than sandbox.memory_bytes allows" if isinstance(error, MemoryError) else str(error)
    message = ascii(text)[1:-1][:_MESSAGE_CHARS]
    return f"{type(error).__name__}: {message} ({Path(frame.filename).name}:{frame.lineno} in {frame.name})"


_EXTRAS: Final = {
    **dict.fromkeys(("torch", "transformers", "tokenizers", "safetensors", "gguf", "accelerate"), "learn"),
    **dict.fromkeys(("starlette", "uvicorn"), "serve"),
    "hivemind": "dht",
}


def missing_extra(error: ImportError) -> ConfigError | None:
    """Converts an ImportError to a ConfigError that names the extra with the package; None if no extra installs it."""
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRAS:
        return None
    return ConfigError(f"{package} is not installed: pip install 'swarm-trainer[{_EXTRAS[package]}]'")
