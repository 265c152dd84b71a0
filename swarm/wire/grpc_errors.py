"""gRPC errors: the table between this project's errors and gRPC status codes.

Invariant: a peer can cause only Unavailable, Unauthenticated, NotHeld or TooLarge; all others come from our own agent.
"""

import asyncio
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, TypeVar, cast

import grpc

from swarm.errors import (
    ConfigError,
    NotHeld,
    RolloutFailed,
    StorageFull,
    SwarmError,
    TooLarge,
    Unauthenticated,
    Unavailable,
)
from swarm.wire.rollout_groups import Malformed

# Subclasses before their bases: the first match decides.
_TABLE: Final[tuple[tuple[type[Exception], grpc.StatusCode], ...]] = (
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (Unavailable, grpc.StatusCode.UNAVAILABLE),
    (NotHeld, grpc.StatusCode.NOT_FOUND),
    (TooLarge, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (RolloutFailed, grpc.StatusCode.ABORTED),
    (StorageFull, grpc.StatusCode.FAILED_PRECONDITION),
    (ConfigError, grpc.StatusCode.INVALID_ARGUMENT),
    (Malformed, grpc.StatusCode.INVALID_ARGUMENT),
    (LookupError, grpc.StatusCode.NOT_FOUND),
)
_BACK: Final[dict[grpc.StatusCode, type[SwarmError]]] = {
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.NOT_FOUND: NotHeld,
    grpc.StatusCode.RESOURCE_EXHAUSTED: TooLarge,
}
_BACK_LOCAL: Final[dict[grpc.StatusCode, type[SwarmError]]] = {
    **_BACK,
    grpc.StatusCode.ABORTED: RolloutFailed,
    grpc.StatusCode.FAILED_PRECONDITION: StorageFull,
    grpc.StatusCode.INVALID_ARGUMENT: ConfigError,
}
_MAX_DETAIL_CHARS: Final = 200

Context = grpc.aio.ServicerContext[Any, Any]
Method = TypeVar("Method", bound=Callable[..., Awaitable[Any]])


def status_of(error: Exception) -> grpc.StatusCode:
    """The gRPC status code of an error; UNKNOWN if the table has none."""
    return next((code for kind, code in _TABLE if isinstance(error, kind)), grpc.StatusCode.UNKNOWN)


def error_of(error: grpc.RpcError, what: str, *, is_made_here: bool = False) -> SwarmError:
    """The error of this project for a failed call, by its status code; Unavailable for every other code.

    Args:
        error: the error that gRPC raised.
        what: the call and its other end, for the message.
        is_made_here: True if the other end is our own agent, whose errors all keep their kind.
    """
    call = error if isinstance(error, (grpc.aio.AioRpcError, grpc.Call)) else None
    code = grpc.StatusCode.UNKNOWN if call is None else call.code()
    details = "" if call is None else (call.details() or "")[:_MAX_DETAIL_CHARS]
    kind = (_BACK_LOCAL if is_made_here else _BACK).get(code, Unavailable)
    return kind(f"{what}: {code.name.lower()}: {details!a}")


def rpc(method: Method) -> Method:
    """Decorates a servicer's method: an error of this project, or a LookupError, ends the call with its status.

    Example:
        @rpc
        async def Fetch(self, request: pb.FetchRequest, context: Context) -> None: ...
    """

    @wraps(method)
    async def answer(self: object, request: object, context: Context) -> object:
        try:
            return await method(self, request, context)
        except (SwarmError, Malformed, LookupError) as error:
            if isinstance(error, SwarmError) and error.pause_s:
                await asyncio.sleep(error.pause_s)  # slows down callers that are refused again and again
            await context.abort(status_of(error), str(error)[:_MAX_DETAIL_CHARS])
            raise AssertionError("abort() raises") from None

    return cast(Method, answer)


@contextmanager
def calling(what: str, *kinds: type[SwarmError]) -> Generator[None]:
    """Context for reading a peer's answer: converts an error of gRPC to one of `kinds` (`error_of`), or Unavailable."""
    try:
        yield
    except grpc.RpcError as error:
        meaning = error_of(error, what)
        raise meaning if type(meaning) in kinds else Unavailable(str(meaning)) from None
    except Malformed as error:
        raise Unavailable(f"{what}: {error.detail}") from None
    except asyncio.CancelledError:
        # gRPC cancels the reader of a closed channel; a cancellation of our own is raised again.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise Unavailable(f"{what}: the connection was closed") from None
