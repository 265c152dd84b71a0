"""The virtual event loop: waiting is free, runs repeat, nothing hangs or is swallowed."""

import asyncio
import random
import time

import pytest

from swarm.simulate.virtual.loop import LoopClock, VirtualDeadlock, run_virtual


def test_a_thousand_seconds_of_sleep_take_none() -> None:
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(1.0)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(1000.0)


def test_timers_fire_in_order_of_their_time_and_time_stands_still_between() -> None:
    async def main() -> list[tuple[float, str]]:
        loop, log = asyncio.get_running_loop(), []

        async def wake(name: str, delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            log.append((loop.time(), name))

        await asyncio.gather(wake("c", 3.0), wake("a", 1.0), wake("b", 2.0))
        return log

    assert run_virtual(main(), start_s=10.0) == [(11.0, "a"), (12.0, "b"), (13.0, "c")]


def test_asyncio_timeouts_are_virtual() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(3600):
                await asyncio.get_running_loop().create_future()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(3600.0)


def test_a_deadlock_is_an_error_that_names_the_waiting_task() -> None:
    async def main() -> None:
        await asyncio.create_task(asyncio.Event().wait(), name="the stuck one")

    with pytest.raises(VirtualDeadlock, match="the stuck one"):
        run_virtual(main())


def test_an_exception_that_nobody_takes_fails_the_run() -> None:
    async def fail() -> None:
        raise ValueError("lost")

    async def main() -> str:
        task = asyncio.create_task(fail())
        await asyncio.sleep(1.0)
        del task
        return "done"

    with pytest.raises(BaseExceptionGroup) as caught:
        run_virtual(main())
    assert [str(error) for error in caught.value.exceptions] == ["lost"]


def test_a_failed_task_that_something_still_holds_is_reported_once_and_one_that_was_asked_is_not() -> None:
    kept: list[asyncio.Task[None]] = []

    async def fail(why: str) -> None:
        raise KeyError(why)

    async def main() -> None:
        kept.extend(asyncio.create_task(fail(why)) for why in ("unseen", "seen"))
        await asyncio.sleep(1.0)
        assert kept[1].exception() is not None

    with pytest.raises(BaseExceptionGroup) as caught:
        run_virtual(main())
    kept.clear()
    assert [str(error) for error in caught.value.exceptions] == ["'unseen'"]


def test_a_failed_future_in_a_cycle_is_reported() -> None:
    async def main() -> None:
        future = asyncio.get_running_loop().create_future()
        future.set_exception(KeyError("unseen"))
        cycle: list[object] = [future]
        cycle.append(cycle)

    with pytest.raises(BaseExceptionGroup) as caught:
        run_virtual(main())
    assert [str(error) for error in caught.value.exceptions] == ["'unseen'"]


def test_the_exception_of_main_comes_through_as_it_is() -> None:
    async def main() -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        run_virtual(main())


def test_threads_are_refused() -> None:
    async def main() -> None:
        await asyncio.to_thread(time.time)

    with pytest.raises(RuntimeError, match="no threads"):
        run_virtual(main())


def _event_log(seed: int) -> list[tuple[float, int, str]]:
    rng = random.Random(seed)

    async def main() -> list[tuple[float, int, str]]:
        loop = asyncio.get_running_loop()
        log: list[tuple[float, int, str]] = []

        async def worker(number: int) -> None:
            try:
                while True:
                    await asyncio.sleep(rng.random())
                    log.append((loop.time(), number, "tick"))
            finally:
                log.append((loop.time(), number, "cancelled"))

        async def stop() -> None:
            await asyncio.sleep(20.0)
            raise KeyError("stop")

        try:
            async with asyncio.TaskGroup() as group:
                for number in range(50):
                    group.create_task(worker(number))
                group.create_task(stop())
        except* KeyError:
            pass
        return log

    return run_virtual(main())


def test_a_seed_gives_the_same_event_log_down_to_the_order_of_cancellation() -> None:
    first, padding = _event_log(1), [object() for _ in range(10_000)]  # other addresses for the second run
    assert _event_log(1) == first and padding
    assert _event_log(2) != first
    assert sum(kind == "cancelled" for _, _, kind in first) == 50


def test_the_clock_follows_the_loop_and_may_be_skewed() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        right, skewed = LoopClock(loop, 1000.0), LoopClock(loop, 1000.0 + 3600)
        await asyncio.sleep(5.0)
        assert right.now_s() == pytest.approx(1005.0) and right.monotonic_s() == pytest.approx(5.0)
        assert skewed.now_s() - right.now_s() == pytest.approx(3600.0)

    run_virtual(main(), start_s=77.0)
