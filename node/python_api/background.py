"""A coroutine that runs in its own thread and event loop, and its messages to the thread that started it.

Invariant: a coroutine can be started where an event loop runs already (a notebook), and its starter also ends it.
"""

import asyncio
import queue
import signal
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Generic, TypeVar

Message = TypeVar("Message")
Result = TypeVar("Result")
_END = object()


class Background(Generic[Message]):
    """Runs `work(send)` in its own thread; `messages()` yields the messages that `work` sends, until `work` ends.

    Example:
        with Background[str](lambda send: count(send)) as background:
            for message in background.messages(): ...
    """

    def __init__(self, work: Callable[[Callable[[Message], None]], Coroutine[Any, Any, None]]) -> None:
        self._work = work
        self._sent = queue.SimpleQueue[Any]()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_stopped = False
        self._error: BaseException | None = None
        # Children of the process die with the thread that made them (Linux), so this one lives as long as its loop.
        self._thread = threading.Thread(target=self._run, name="swarm", daemon=True)

    def __enter__(self) -> "Background[Message]":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Cancels the work, and waits until it has cleaned up."""
        self.stop()
        self._thread.join()

    def stop(self) -> None:
        """Cancels the work, from any thread; does nothing once the work is over."""
        self._is_stopped = True
        if self._loop is not None and self._task is not None:
            with suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._task.cancel)

    def messages(self) -> Iterator[Message]:
        """Yields the messages of the work until it ends. Raises the error that ended it, unless it was cancelled."""
        while (message := self._sent.get()) is not _END:
            yield message
        if self._error is not None and not isinstance(self._error, asyncio.CancelledError):
            raise self._error

    @contextmanager
    def stopped_by_signals(self) -> Generator[None]:
        """Context in which the first Ctrl-C or SIGTERM stops the work, and a second one acts as it did before.

        Has no effect outside the main thread.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

        def stop(*_: object) -> None:
            restore()
            self.stop()

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        for number in before:
            signal.signal(number, stop)
        try:
            yield
        finally:
            restore()

    def _run(self) -> None:
        async def work() -> None:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            if not self._is_stopped:  # else it was stopped before it began
                await self._work(self._sent.put)

        try:
            asyncio.run(work())
        except BaseException as error:
            self._error = error
        finally:
            self._sent.put(_END)


def run_apart(make: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Runs a coroutine in its own thread (blocking), also where an event loop runs already; returns its result."""
    found: list[Result] = []

    async def work(_: object) -> None:
        found.append(await make())

    with Background[None](work) as background:
        for _ in background.messages():
            pass
    return found[0]
