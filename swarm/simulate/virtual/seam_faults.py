"""Faults at the seams of one virtual node: full disk, failing verifier, slow threads, checkpoints that cannot be saved.

Invariant: a failing call raises the exception of the real part; which calls fail follows from the seed and the order of
calls.
"""

import asyncio
import errno
import random
from collections.abc import Callable, Sequence

from swarm.clock import CLOCK_SKEW_S, Clock
from swarm.episode import Actions, EpisodeOutcome
from swarm.errors import RolloutFailed, StorageFull
from swarm.interfaces import Offload, Producer, Result, Verdict, Verifier
from swarm.simulate.virtual.faults import SeamRates, WrongClock


class SeamFaults:
    """Random failures at the seams of one node; from `until_s` (monotonic seconds) on nothing fails.

    Example:
        faults = SeamFaults(plan.seams, seed="7 0", clock=clock, until_s=12.0)
        context = NodeContext(..., offload=faults.offload(asyncio.to_thread))
    """

    def __init__(self, rates: SeamRates, seed: str, clock: Clock, until_s: float) -> None:
        self._rates = rates
        self._rng = random.Random(f"seams {seed}")
        self._clock = clock
        self._until_s = until_s

    def before_write(self, size_bytes: int) -> None:
        """Fails some writes of the group store. Raises OSError(ENOSPC)."""
        if self._happens(self._rates.full_disk):
            raise OSError(errno.ENOSPC, "no space left on device")

    def before_save(self) -> None:
        """Fails some writes of checkpoints. Raises StorageFull."""
        if self._happens(self._rates.unsaved_checkpoint):
            raise StorageFull(errno.ENOSPC, "no space left on device")

    def offload(self, inner: Offload) -> Offload:
        """Returns `inner` with a random wait before some calls."""

        async def slow(function: Callable[..., Result], /, *arguments: object) -> Result:
            if self._happens(self._rates.slow_thread):
                await asyncio.sleep(self._rng.uniform(0.0, self._rates.slow_thread_s))
            return await inner(function, *arguments)

        return slow if self._rates.slow_thread else inner

    def verifier(self, inner: Verifier) -> Verifier:
        """Returns `inner` with RolloutFailed raised in some calls."""
        return _FailingVerifier(inner, lambda: self._happens(self._rates.failing_verifier))

    def _happens(self, rate: float) -> bool:
        return rate > 0 and self._clock.monotonic_s() < self._until_s and self._rng.random() < rate


class _FailingVerifier:
    """`Verifier` that raises RolloutFailed if `fails` returns True, as after the death of its confined process."""

    def __init__(self, inner: Verifier, fails: Callable[[], bool]) -> None:
        self._inner = inner
        self._fails = fails

    async def verify(
        self, env: str, task_id: int, episodes: Sequence[Actions], producer: Producer | None = None
    ) -> Verdict:
        if self._fails():
            raise RolloutFailed("the verifier's process ended")
        return await self._inner.verify(env, task_id, episodes, producer)

    async def step(self, env: str, task_id: int, actions: Actions) -> EpisodeOutcome:
        if self._fails():
            raise RolloutFailed("the verifier's process ended")
        return await self._inner.step(env, task_id, actions)


class NodeClock:
    """The clock of one machine: its wall clock may be wrong and may jump, its monotonic time is true."""

    def __init__(self, true: Clock, wrong: WrongClock | None) -> None:
        self._true = true
        self._wrong = wrong

    def now_s(self) -> float:
        now_s = self._true.now_s()
        if self._wrong is None:
            return now_s
        has_jumped = self._true.monotonic_s() >= self._wrong.jumps_at_s
        return now_s + self._wrong.skew_s + (self._wrong.jump_s if has_jumped else 0.0)

    @property
    def is_off(self) -> bool:
        """True while the wall clock is wrong by more than CLOCK_SKEW_S, which honest nodes are allowed."""
        return abs(self.now_s() - self._true.now_s()) > CLOCK_SKEW_S

    def monotonic_s(self) -> float:
        return self._true.monotonic_s()
