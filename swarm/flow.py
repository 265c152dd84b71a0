"""Flow primitives: a broadcast signal, loops in pieces, backoff, token buckets, bounded tables and a running mean.

Invariant: no code here reads a clock or seeds a random source; both are passed in, and every table is bounded.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

FIRST_RETRY_S: Final = 0.2
LONGEST_RETRY_S: Final = 10.0

Key = TypeVar("Key")
Value = TypeVar("Value")


class Signal:
    """Broadcast that wakes the tasks waiting for a change. For one event loop; not thread-safe.

    `fire` never waits, and wakes only tasks that wait already; a woken task has to check its condition again.

    Example:
        signal = Signal()
        await signal.until(lambda: queue.is_ready)  # in one task
        signal.fire()  # in another
    """

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], Callable[[], bool] | None] = {}  # in order of arrival
        self.num_fired = 0

    def fire(self) -> None:
        """Wakes every waiter whose condition holds, and every waiter without a condition."""
        self.num_fired += 1
        waiters, self._waiters = self._waiters, {}
        for waiter, holds in waiters.items():
            if waiter.done():
                continue
            if holds is not None and not holds():
                self._waiters[waiter] = holds  # sleeps on: waking a task costs more than asking
            else:
                waiter.set_result(None)

    async def wait(self, holds: Callable[[], bool] | None = None) -> None:
        """Waits for the next `fire`; with `holds`, for the next `fire` at which `holds()` is true."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters[waiter] = holds
        try:
            await waiter
        finally:
            self._waiters.pop(waiter, None)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until `holds()` is true, which is checked now, at each `fire` and again before the return."""
        while not holds():
            await self.wait(holds)


async def in_pieces(items: Iterable[Value], at_once: int) -> AsyncGenerator[Value]:
    """Yields the items, and lets other tasks of the event loop run after every `at_once` items."""
    for number, item in enumerate(items, 1):
        yield item
        if number % at_once == 0:
            await asyncio.sleep(0)


class Backoff:
    """Exponential backoff with jitter: a base that doubles up to `longest_s`, times a random factor of 0.5 to 1.0.

    Example:
        backoff = Backoff(random.Random(node_id))
        while not await try_once():
            await backoff.wait()
    """

    def __init__(
        self, rng: random.Random | None, first_s: float = FIRST_RETRY_S, longest_s: float = LONGEST_RETRY_S
    ) -> None:
        """Sets the source of jitter, which should be seeded differently at each node; None means no jitter."""
        self._rng = rng
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def reset(self) -> None:
        """Restarts at `first_s`, after a success."""
        self._next_s = self._first_s

    def next_s(self) -> float:
        """Returns the wait in seconds after one more failure, and doubles the base up to `longest_s`."""
        wait_s = self._next_s * (1.0 if self._rng is None else self._rng.uniform(0.5, 1.0))
        self._next_s = min(2 * self._next_s, self._longest_s)
        return wait_s

    async def wait(self) -> None:
        """Sleeps for the seconds that `next_s` returns."""
        await asyncio.sleep(self.next_s())


@dataclass(slots=True)
class TokenBucket:
    """Token bucket: starts full, refills evenly, and lets at most `burst + per_s * t` events through in t seconds.

    `per_s` and `burst` may be changed at any time; the next call uses the new values.

    Example:
        bucket = TokenBucket(per_s=10.0, burst=60.0, at_s=clock.monotonic_s())
        if not bucket.try_take(clock.monotonic_s()): ...  # over the limit
    """

    per_s: float  # tokens
    burst: float  # tokens
    at_s: float  # of the last refill, monotonic
    tokens: float = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.burst

    def try_take(self, now_s: float, keep: float = 0.0) -> bool:
        """Takes one token; returns False, and takes none, if fewer than `keep` tokens would remain."""
        self._refill(now_s)
        if self.tokens < 1.0 + keep:
            return False
        self.tokens -= 1.0
        return True

    def spend(self, now_s: float, num_tokens: int = 1) -> bool:
        """Takes `num_tokens` tokens; if there are fewer, takes all of them and returns False."""
        self._refill(now_s)
        is_enough = self.tokens >= num_tokens
        self.tokens = max(0.0, self.tokens - num_tokens)
        return is_enough

    def put_back(self, now_s: float) -> None:
        """Puts one token back, at most up to `burst`, for an event that turned out to cost nothing."""
        self._refill(now_s)
        self.tokens = min(self.burst, self.tokens + 1.0)

    def _refill(self, now_s: float) -> None:
        self.tokens = min(self.burst, self.tokens + (now_s - self.at_s) * self.per_s)
        self.at_s = now_s


class BoundedTable(dict[Key, Value], Generic[Key, Value]):
    """A dict of at most `limit` entries: setting a key makes its entry the newest, and the oldest entry makes room.

    `update` and `|=` set keys, and so does `setdefault` for a missing key. If `is_kept` holds for the oldest entry,
    it becomes the newest and the next entry is tried, for up to `limit // 2` entries at a time.

    Example:
        heads = BoundedTable[NodeId, PolicyVersion](limit=4096)
        heads[peer] = version
    """

    def __init__(self, limit: int, is_kept: Callable[[Key], bool] | None = None) -> None:
        """Creates an empty table; `is_kept` is True for a key whose entry should be evicted after other entries."""
        assert limit >= 0, limit
        super().__init__()
        self._limit = limit
        self._is_kept = is_kept

    def __setitem__(self, key: Key, value: Value) -> None:
        self.pop(key, None)
        super().__setitem__(key, value)
        if len(self) > self._limit:
            self._make_room()

    def _make_room(self) -> None:
        if self._is_kept is not None:
            for _ in range(self._limit // 2):
                oldest = next(iter(self))
                if not self._is_kept(oldest):
                    break
                super().__setitem__(oldest, self.pop(oldest))
        del self[next(iter(self))]

    # dict's own methods do not call `__setitem__` and would exceed the bound
    setdefault = MutableMapping.setdefault
    update = MutableMapping.update

    def __ior__(self, other: Any) -> "BoundedTable[Key, Value]":
        self.update(other)
        return self


class DecayingSums(Generic[Key]):
    """A sum for each key that halves every half-life; only the `max_keys` keys changed last are remembered.

    Example:
        used_s = DecayingSums[NodeId](half_life_s=30.0, max_keys=4096)
        used_s.add(peer, 0.05, clock.monotonic_s())
    """

    def __init__(self, half_life_s: float, max_keys: int) -> None:
        self._half_life_s = half_life_s
        self._sums = BoundedTable[Key, tuple[float, float]](max_keys)  # at a time

    def of(self, key: Key, now_s: float) -> float:
        """The sum of a key at `now_s`; 0 for an unknown key."""
        total, at_s = self._sums.get(key, (0.0, now_s))
        return total * 0.5 ** ((now_s - at_s) / self._half_life_s)

    def add(self, key: Key, amount: float, now_s: float) -> None:
        """Adds `amount` to the sum of a key at `now_s`."""
        self._sums[key] = (self.of(key, now_s) + amount, now_s)


class RateLimiter(Generic[Key]):
    """A token bucket for each key; only the `max_keys` keys used last are remembered.

    Example:
        calls = RateLimiter[NodeId](per_s=50.0, burst=200.0, max_keys=20_000)
        if not calls.try_take(node_id, clock.monotonic_s()): ...
    """

    def __init__(self, per_s: float, burst: float, max_keys: int) -> None:
        self._per_s, self._burst = per_s, burst
        self._buckets = BoundedTable[Key, TokenBucket](max_keys)

    def try_take(self, key: Key, now_s: float) -> bool:
        """As `TokenBucket.try_take`, in the bucket of a key."""
        return self._touch(key, now_s).try_take(now_s)

    def spend(self, key: Key, now_s: float, num_tokens: int = 1) -> bool:
        """As `TokenBucket.spend`, in the bucket of a key."""
        return self._touch(key, now_s).spend(now_s, num_tokens)

    def put_back(self, key: Key, now_s: float) -> None:
        """As `TokenBucket.put_back`, in the bucket of a key."""
        self._touch(key, now_s).put_back(now_s)

    def __len__(self) -> int:
        return len(self._buckets)

    def _touch(self, key: Key, now_s: float) -> TokenBucket:
        bucket = self._buckets.get(key) or TokenBucket(self._per_s, self._burst, now_s)
        self._buckets[key] = bucket
        return bucket


@dataclass(slots=True)
class RunningMean:
    """Exponential moving mean, which starts at the first value.

    Example:
        interval_s = RunningMean(memory=0.8)
        interval_s.add(2.5)
    """

    memory: float  # share of the old mean that stays, 0 to 1
    value: float | None = None  # None before the first

    def add(self, value: float) -> None:
        """Updates the mean with one more value."""
        self.value = value if self.value is None else self.memory * self.value + (1 - self.memory) * value
