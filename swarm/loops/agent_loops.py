"""The agent's own loops: announce, repair, heartbeat, tidy up, and the streams of groups and weights.

Invariant: no loop holds up another, and each goes on after a failure other than a ConfigError.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress

from swarm.errors import ConfigError, Unauthenticated, Unavailable
from swarm.exchange.agent import Agent
from swarm.flow import Backoff, TokenBucket
from swarm.interfaces import CoordinatorClient, Discovery, Transport
from swarm.loops.fetch_weights import follow_loop, watch_ledger_loop
from swarm.loops.neighbours import neighbours_loop
from swarm.loops.own_advert import own_advert, own_report, wait_offer_changed
from swarm.loops.supervise import supervise
from swarm.version_history import MAX_RECORDED

logger = logging.getLogger(__name__)

TIDY_EVERY_S = 30.0
REPAIR_EVERY_S = 20.0  # at most: a round pings a few dozen peers
LOOKUPS_PER_REPAIR = 10  # a directory that is asked often finds peers of a swarm that changes fast
CHANGES_PER_S = 1 / 8  # changes of an advert that are announced at once
CHANGES_BURST = 4.0
CHANGE_PAUSE_S = 0.5  # between two looks whether one more may be announced
CREDIT_PAUSE_S = 1.0  # between two looks for late credit
KEPT_SHARE = 0.9  # of the store's budget after tidying: a full store takes groups again


async def run_agent(
    agent: Agent,
    transport: Transport,
    directory: Discovery | None,
    coordinator: CoordinatorClient | None,
    rng: random.Random,
) -> None:
    """Runs every loop of the agent until cancelled, or until one raises a ConfigError (in an ExceptionGroup)."""
    async with asyncio.TaskGroup() as tasks:

        def start(name: str, loop: Callable[[], Awaitable[None]]) -> None:
            tasks.create_task(supervise(name, loop, agent, rng), name=name)

        if directory is not None:
            start("announce", lambda: announce_loop(agent, directory, rng))
            start("neighbours", lambda: neighbours_loop(agent, transport, directory, rng))
            start("repair", lambda: repair_loop(agent, directory, rng))
        if coordinator is not None:
            start("heartbeat", lambda: heartbeat_loop(agent, coordinator, rng))
        follower = agent.weight_follower
        if follower is not None:
            if directory is None:
                raise ConfigError(
                    'directory.kind: a node without a trainer of its own finds one there; set it to "dht"'
                )
            start("follow", lambda: follow_loop(agent, follower, transport, directory, rng))
        if follower is not None and coordinator is not None:
            start("ledger", lambda: watch_ledger_loop(follower, coordinator))
        if agent.config.weights.publish:
            start("credit", lambda: credit_loop(agent))
        start("tidy", lambda: tidy_loop(agent))


async def announce_loop(agent: Agent, directory: Discovery, rng: random.Random) -> None:
    """Keeps our advert in the directory; announces changes at once, unless they come faster than CHANGES_PER_S."""
    changes = TokenBucket(CHANGES_PER_S, CHANGES_BURST, agent.clock.monotonic_s())
    while True:
        advert = own_advert(agent)
        await directory.announce(advert)
        pause_s = agent.config.exchange.advert_every_s * rng.uniform(0.8, 1.0)
        with suppress(TimeoutError):
            async with asyncio.timeout(pause_s):
                await wait_offer_changed(agent, advert)
                # relays may take and drop a reservation without end, and refuse nodes that announce too often
                while not changes.try_take(agent.clock.monotonic_s()):  # noqa: ASYNC110 - the clock decides
                    await asyncio.sleep(CHANGE_PAUSE_S)


async def repair_loop(agent: Agent, directory: Discovery, rng: random.Random) -> None:
    """Keeps the directory connected by calls of `Discovery.maintain`."""
    while True:
        pause_s = min(REPAIR_EVERY_S, LOOKUPS_PER_REPAIR * agent.config.exchange.lookup_every_s)
        await asyncio.sleep(pause_s * rng.uniform(0.8, 1.2))
        await directory.maintain()


async def tidy_loop(agent: Agent) -> None:
    """Tidies the store every TIDY_EVERY_S, down to KEPT_SHARE of its budget."""
    while True:
        await asyncio.sleep(TIDY_EVERY_S)
        await agent.tidy(int(KEPT_SHARE * agent.config.exchange.store_bytes))


async def credit_loop(agent: Agent) -> None:
    """Expires credit for groups that followers did not deliver in time, for which no other event may come."""
    ledger = agent.credit_ledger
    while True:
        await asyncio.sleep(CREDIT_PAUSE_S)
        if ledger.expire():
            agent.context.changed.fire()  # that credit is free for other followers, and for our own generator


async def heartbeat_loop(agent: Agent, coordinator: CoordinatorClient, rng: random.Random) -> None:
    """Reports figures, takes advice, and hands in the versions that the ledger does not have yet.

    A coordinator that is away is logged once, and again when it answers; a refusal is logged in both states.
    """
    tokens, at_s = agent.own_groups.tokens_generated, agent.clock.monotonic_s()
    backoff, is_away = Backoff(rng), False
    while True:
        now_s = agent.clock.monotonic_s()
        rate = (agent.own_groups.tokens_generated - tokens) / max(now_s - at_s, 1e-9)
        tokens, at_s = agent.own_groups.tokens_generated, now_s
        try:
            agent.coordinator_view.apply_advice(await coordinator.heartbeat(own_report(agent, rate)))
            await hand_in_versions(agent, coordinator)
        except Unavailable as error:
            if isinstance(error, Unauthenticated):
                if not agent.coordinator_view.refusal:
                    refused = "no session with the coordinator: it refuses this node, or has another key"
                    logger.warning(refused, extra={"error": str(error)})
                agent.coordinator_view.refusal = str(error)
            elif not is_away:
                away = "the coordinator does not answer; the node goes on without it"
                logger.warning(away, extra={"error": str(error)})
            is_away = True
            await backoff.wait()
            continue
        if is_away:
            logger.info("the coordinator answers again")
        is_away, agent.coordinator_view.refusal = False, ""
        backoff.reset()
        await asyncio.sleep(agent.config.coordinator.heartbeat_s)


async def hand_in_versions(agent: Agent, coordinator: CoordinatorClient) -> None:
    """Hands in the versions that the ledger lacks, oldest first. Raises Unavailable; the rest then stays pending."""
    pending = agent.coordinator_view.pending_versions
    while pending:
        oldest = pending[:MAX_RECORDED]
        await coordinator.record_versions(oldest)
        del pending[: len(oldest)]
