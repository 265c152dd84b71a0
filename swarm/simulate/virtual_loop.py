"""An asyncio event loop on virtual time: waiting costs nothing and every run is the same.

Invariant: the loop never blocks. When nothing is ready it jumps to the next timer; when there is
none either, it says so (VirtualDeadlock) instead of hanging. No threads, no sockets, no signals.
"""

import asyncio
import gc
import itertools
import selectors
from collections.abc import Coroutine, Generator
from typing import Any, TypeVar

Result = TypeVar("Result")

_RESOLUTION_S = 1e-6  # timers this close together run in one turn of the loop


class VirtualDeadlock(RuntimeError):
    """Nothing is ready and no timer is set, but the main coroutine is not finished: it would wait for ever."""


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that moves the loop's clock forward instead of waiting."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise VirtualDeadlock(f"nothing can happen any more at {self.loop.time():.3f} s: {self.loop.describe()}")
        if timeout > 0:
            self.loop.advance(timeout)
        return []


class _NumberedTask(asyncio.Task[Any]):
    """A task that hashes to its number of creation, so that sets of tasks iterate the same way in every run.

    asyncio keeps tasks in sets (TaskGroup, wait, all_tasks); by address their order, and so the order of
    cancellation, would differ between two runs of one seed.
    """

    def __init__(self, number: int, coro: Any, **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` moves only when nothing is left to do at the present moment.

    Blocking functions have to be called in place (see `swarm.interfaces.Offload`): a thread would make
    the order of events depend on the machine.

    Example:
        run_virtual(main())
    """

    def __init__(self, start_s: float = 0.0) -> None:
        """Begins at `start_s` on the loop's own (monotonic) time."""
        self._virtual_s = start_s
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)
        self._clock_resolution = _RESOLUTION_S
        self.unhandled: list[BaseException] = []
        numbers = itertools.count(1)
        self.set_task_factory(lambda loop, coro, **options: _NumberedTask(next(numbers), coro, loop=loop, **options))
        self.set_exception_handler(self._note_unhandled)

    def time(self) -> float:
        """Virtual seconds."""
        return self._virtual_s

    def advance(self, seconds: float) -> None:
        """Moves the time forward; called by the selector when nothing is ready."""
        self._virtual_s += seconds

    def describe(self) -> str:
        """The tasks that still wait, for the message of a deadlock."""
        waiting = sorted(task.get_name() for task in asyncio.all_tasks(self))
        return f"{len(waiting)} tasks wait: {', '.join(waiting[:10])}"

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        """Refused: a thread would make the run depend on the machine."""
        raise RuntimeError("no threads under the virtual loop: inject an Offload that calls in place")

    def _note_unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.unhandled.append(error if isinstance(error, BaseException) else RuntimeError(str(context["message"])))


class LoopClock:
    """The loop's time as a `swarm.clock.Clock`, with a wall clock that begins at `start_wall_s` seconds since 1970.

    Every node of a virtual swarm may have one of its own: a different start is a skewed clock.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, start_wall_s: float = 1_700_000_000.0) -> None:
        self._loop = loop
        self._origin_s = loop.time()
        self._start_wall_s = start_wall_s

    def now_s(self) -> float:
        """Virtual wall clock, seconds since 1970."""
        return self._start_wall_s + self.monotonic_s()

    def monotonic_s(self) -> float:
        """Virtual seconds since this clock was made."""
        return self._loop.time() - self._origin_s


def run_virtual(main: Coroutine[Any, Any, Result] | Generator[Any, Any, Result], start_s: float = 0.0) -> Result:
    """Runs a coroutine to its end in virtual time.

    Args:
        main: the coroutine.
        start_s: first value of the loop's time.

    Raises:
        VirtualDeadlock: every task waits for something that cannot come.
        ExceptionGroup: a task failed and nobody took its exception.
    """
    loop = VirtualLoop(start_s)
    gc.freeze()  # what was there before is not part of the run: the collection below looks at the run alone
    try:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            result: Result = runner.run(main)  # pyright: ignore[reportArgumentType]
        gc.collect()  # a failed task reports when it is freed
    finally:
        gc.unfreeze()
    if loop.unhandled:
        raise BaseExceptionGroup("tasks failed unseen", loop.unhandled)
    return result
