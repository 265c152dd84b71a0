"""Exceptions of the project, ordered by what the caller does next.

SwarmError
+-- ConfigError        stop; the message names the key and the fix
+-- Unavailable        retry with backoff and jitter (network, peer, coordinator, DHT)
|   +-- Unauthenticated  the other side could not prove who it is: drop it, do not retry as is
|   |   +-- OtherNode    it proved to be another node than the one expected
|   +-- Forged         what it sent is not what was asked for by digest: ask another one, avoid this one for a while
+-- NotHeld            this holder lacks it: ask another one
+-- TooLarge           over a size limit: drop, do not retry
+-- RolloutFailed      record on the rollout and go on
|   +-- OverBudget     its party's episodes took their time of this minute: nothing is said of these
+-- WeightsRefused     the engine keeps its old weights and version: report, and take the next version
+-- NonFiniteStep      skip the update, keep the old version
+-- StorageFull        the disk is full: stop accepting, keep serving, tell the operator

What a peer sent and we will not use is no exception but a `swarm.types.Refused` value.
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

    pause_s = 0.0  # that a remote caller waits for this answer


class ConfigError(SwarmError, ValueError):
    """The configuration cannot work. The message names the key, the value and the fix."""


class Unavailable(SwarmError, ConnectionError):
    """A remote side did not answer in time or refused the connection; a later attempt may succeed."""


class Unauthenticated(Unavailable):
    """The remote side did not prove its identity, or did not accept the proof of ours."""


class OtherNode(Unauthenticated):
    """The remote side proved its identity, and it is another node than the one that was expected."""

    def __init__(self, message: str, found: str) -> None:
        """`found`: the node id that was proved."""
        super().__init__(message)
        self.found = found


class Forged(Unavailable):
    """Data of the remote side does not hash to the digest that was asked for."""


class NotHeld(SwarmError, LookupError):
    """The holder that was asked does not have the content."""


class TooLarge(SwarmError, ValueError):
    """A size limit was exceeded before anything was allocated for the content."""


class RolloutFailed(SwarmError, RuntimeError):
    """Generation or scoring of one rollout failed; the group goes on without it."""


class OverBudget(RolloutFailed):
    """Groups of one party have taken the seconds of a minute that they may: nothing, or too little, was tried."""


class WeightsRefused(SwarmError, ValueError):
    """An engine refused the weights it was given; it still serves the version before."""


class NonFiniteStep(SwarmError, ArithmeticError):
    """Loss or gradient was not finite; the update was skipped and the old version kept."""


class StorageFull(SwarmError, OSError):
    """The store has no room left; nothing already stored is lost."""


def is_disk_full(error: BaseException) -> bool:
    """True if an error of the operating system means a full disk or quota, or a failing device."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL


def described(error: Exception) -> str:
    """Class, message and place of an error of local code, in ASCII: the message may hold what a stranger wrote."""
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
    """A package that is not installed as an error that names the extra with it; None where no extra has it."""
    package = (error.name or "").partition(".")[0]
    if package not in _EXTRAS:
        return None
    return ConfigError(f"{package} is not installed: pip install 'swarm-trainer[{_EXTRAS[package]}]'")
