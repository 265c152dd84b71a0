"""What every loop shares: waiting longer after each failure, and the boundary at which a failure is told.

Invariant: no failure is swallowed; the broad `except` here logs, counts and reports it.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable

from swarm.errors import ConfigError, Unavailable
from swarm.exchange.agent import Agent

logger = logging.getLogger(__name__)

FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 10.0


class Backoff:
    """Exponential waits with full jitter, from `first_s` to `longest_s`."""

    def __init__(self, rng: random.Random, first_s: float = FIRST_RETRY_S, longest_s: float = LONGEST_RETRY_S) -> None:
        self._rng = rng
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def reset(self) -> None:
        """After a success: the next wait is the first again."""
        self._next_s = self._first_s

    async def wait(self) -> None:
        """Sleeps, and doubles the next wait."""
        await asyncio.sleep(self._rng.uniform(0.5, 1.0) * self._next_s)
        self._next_s = min(2 * self._next_s, self._longest_s)


async def supervise(name: str, loop: Callable[[], Awaitable[None]], agent: Agent, rng: random.Random) -> None:
    """Runs a loop until it returns; a failure is logged, counted, reported, and the loop begins again.

    Where nobody answers, that is told once, and again only after the loop worked for a while.

    Raises:
        ConfigError: from the loop; trying again would not help.
    """
    backoff, level = Backoff(rng), logging.INFO
    while True:
        began_s = agent.clock.monotonic_s()
        try:
            await loop()
            return
        except ConfigError:
            raise
        except Unavailable as error:
            level = logging.INFO if agent.clock.monotonic_s() - began_s > LONGEST_RETRY_S else level
            logger.log(level, "loop interrupted", extra={"loop": name, "error": str(error)})
            level = logging.DEBUG
        except Exception as error:
            logger.exception("loop failed", extra={"loop": name})
            agent.record_failure(name, error)
        await backoff.wait()
