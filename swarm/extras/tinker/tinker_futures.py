"""Requests that are answered later: each runs under an id, and its reply is kept for the client to fetch.

Invariant: a request is not done again while its id runs or has a kept reply. Kept replies are bounded in number and in
bytes of protobuf; the oldest are dropped first.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

from swarm.errors import ConfigError, NonFiniteStep, Unavailable
from swarm.serving.openai_requests import RequestRefused
from swarm.types import JsonDict

logger = logging.getLogger(__name__)

MAX_OPEN: Final = 4096  # requests under way
MAX_OPEN_OF_OWNER: Final = 1024  # one that skipped a number waits with all that follow, and locks nobody else out
MAX_KEPT: Final = 8192  # answered ones
MAX_KEPT_BYTES: Final = 256 * 2**20  # of protobuf answers

Reply = bytes | JsonDict  # protobuf or JSON
Work = Coroutine[Any, Any, Reply]


class Promises:
    """Runs work under an id, and keeps the reply.

    Example:
        promises.begin("model:1", "session", work())
        reply = await promises.wait("model:1", timeout_s=30)
    """

    def __init__(self) -> None:
        self._open: dict[str, asyncio.Task[Reply]] = {}
        self._owners: dict[str, str] = {}
        self._done: OrderedDict[str, Reply] = OrderedDict()
        self._num_bytes = 0

    def begin(self, request_id: str, owner: str, work: Work) -> None:
        """Starts work, unless its id runs or has a kept reply. Raises RequestRefused if too many requests run.

        Args:
            request_id: id of the request.
            owner: session that the request counts for; `cancel_of` finds it by this name.
            work: coroutine that makes the reply; an error of the work becomes a reply as well.
        """
        if request_id in self._open or request_id in self._done:
            work.close()
            return
        if len(self._open) >= MAX_OPEN:
            work.close()
            raise RequestRefused(f"{len(self._open)} requests are under way, of at most {MAX_OPEN}", status=429)
        if sum(each == owner for each in self._owners.values()) >= MAX_OPEN_OF_OWNER:
            work.close()
            raise RequestRefused(f"{MAX_OPEN_OF_OWNER} requests of this session are under way", status=429)
        self._owners[request_id] = owner
        task = self._open[request_id] = asyncio.create_task(_reply(work, request_id))
        task.add_done_callback(lambda task: self._keep(request_id, task))

    async def wait(self, request_id: str, timeout_s: float) -> Reply | None:
        """Waits for a reply; returns None if it takes longer.

        Raises:
            RequestRefused: the id is unknown, or its reply was dropped.
        """
        task = self._open.get(request_id)
        if task is not None:
            await asyncio.wait({task}, timeout=timeout_s)
            if not task.done():
                return None
            await asyncio.sleep(0)  # its callback runs first
        if request_id not in self._done:
            raise RequestRefused(f"request_id: {request_id[:80]!r} is unknown, or was answered long ago", status=410)
        return self._done[request_id]

    def cancel(self, request_id: str) -> None:
        """Cancels a request that runs, so that its reply is an error; does nothing for any other id."""
        if request_id in self._open:
            self._open[request_id].cancel()

    def cancel_of(self, owner: str) -> None:
        """Cancels all running requests of an owner."""
        for request_id in [each for each, own in self._owners.items() if own == owner]:
            self.cancel(request_id)

    def _keep(self, request_id: str, task: "asyncio.Task[Reply]") -> None:
        del self._open[request_id], self._owners[request_id]
        reply: Reply = _error("it was cancelled", "user") if task.cancelled() else task.result()
        self._done[request_id] = reply
        self._num_bytes += len(reply) if isinstance(reply, bytes) else 0
        while len(self._done) > MAX_KEPT or (self._num_bytes > MAX_KEPT_BYTES and len(self._done) > 1):
            _, oldest = self._done.popitem(last=False)
            self._num_bytes -= len(oldest) if isinstance(oldest, bytes) else 0


class RequestOrder:
    """Lets requests of one model through in the order of their numbers, from `first` on."""

    def __init__(self, first: int = 1) -> None:
        self._next = first
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def turn(self, number: int) -> AsyncGenerator[None]:
        """Waits until all lower numbers had their turns, and holds that of `number` until the `with` ends.

        Raises:
            RequestRefused: this number had its turn before.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._next >= number)
            if self._next > number:
                raise RequestRefused(f"seq_id: {number} was done before; the next one is {self._next}")
        try:
            yield
        finally:
            async with self._changed:
                self._next = number + 1
                self._changed.notify_all()


async def _reply(work: Work, request_id: str) -> Reply:
    """The reply of the work, or its error in the form of a reply."""
    try:
        return await work
    except (RequestRefused, ConfigError, NonFiniteStep) as error:
        return _error(str(error), "user")
    except Unavailable as error:
        return _error(str(error), "server")
    except Exception:  # task boundary: one request must not end the others
        logger.exception("request failed", extra={"request": request_id})
        return _error("this request failed; the server's log says why", "server")


def _error(message: str, category: str) -> JsonDict:
    return {"error": message, "category": category}
