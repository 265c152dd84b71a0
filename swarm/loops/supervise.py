"""Supervision of a loop: logs its failures, counts and reports unexpected ones, and restarts the loop with backoff.

Invariant: no failure is swallowed; the broad `except` here logs, counts and reports it.
"""

import logging
import random
from collections.abc import Awaitable, Callable

from swarm.errors import ConfigError, Unavailable
from swarm.exchange.agent import Agent
from swarm.flow import LONGEST_RETRY_S, Backoff

logger = logging.getLogger(__name__)


async def supervise(name: str, loop: Callable[[], Awaitable[None]], agent: Agent, rng: random.Random) -> None:
    """Runs a loop until it returns; after a failure, logs it and begins the loop again with backoff.

    An Unavailable is logged at INFO only once until the loop worked for a while; other failures are also counted.

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


async def run_once(name: str, work: Callable[[], Awaitable[None]], agent: Agent) -> None:
    """Runs work once; a failure is logged, counted and reported.

    Raises:
        ConfigError: from the work; trying again would not help.
    """
    try:
        await work()
    except ConfigError:
        raise
    except Exception as error:
        logger.exception("work failed", extra={"work": name})
        agent.record_failure(name, error)
