"""Loops of a node beside its agent, every few seconds: status file, pause, a line of progress, peers on the disk.

Invariant: no loop holds up the agent: files are read and written in threads.
"""

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from node.pause import paused_since
from node.status_figures import STATUS
from swarm.errors import StorageFull
from swarm.exchange.agent import Agent
from swarm.loops.own_advert import own_report
from swarm.peers.address_book import KNOWN_PEERS, save_known_peers
from swarm.peers.peer_clocks import PeerClocks
from swarm.peers.reputation import REPUTATION, save_reputation
from swarm.process import write_json
from swarm.telemetry import EventLog, Telemetry
from swarm.telemetry.warning_log import STATUS_WITHOUT_ROOM
from swarm.types import JsonDict

logger = logging.getLogger(__name__)

STATUS_EVERY_S: Final = 1.0
PAUSE_LOOK_S: Final = 1.0
REMEMBER_EVERY_S: Final = 10.0
PROGRESS_EVERY_S: Final = 9.0  # somebody who waits sees a line within ten seconds


async def write_status(
    directory: Path, figures: Callable[[], JsonDict], telemetry: Telemetry, events: EventLog
) -> None:
    """Writes status.json and the present metrics every STATUS_EVERY_S, until cancelled."""
    path, was_written = directory / STATUS, True
    while True:
        status = figures()
        telemetry.snapshot(status)
        events.flush()
        try:
            await asyncio.to_thread(write_json, path, status)
            was_written = True
        except StorageFull as error:
            if was_written:
                logger.error(STATUS_WITHOUT_ROOM, extra={"error": str(error)})
            was_written = False
        await asyncio.sleep(STATUS_EVERY_S)


async def follow_pause(agent: Agent) -> None:
    """Applies `swarm pause` and `swarm resume` within PAUSE_LOOK_S, until cancelled."""
    while True:
        await asyncio.sleep(PAUSE_LOOK_S)
        await look_for_pause(agent)


async def look_for_pause(agent: Agent) -> None:
    """Pauses or resumes the agent, by the newest `swarm pause` or `swarm resume`."""
    directory = agent.config.dir
    since_s = await asyncio.to_thread(paused_since, directory)
    if since_s is not None and not agent.is_paused:
        agent.pause(since_s)
        logger.warning("paused: no batch or step begins until: swarm resume", extra={"dir": str(directory)})
    elif since_s is None and agent.is_paused:
        agent.resume()
        logger.warning("goes on after a pause")


async def remember_peers(agent: Agent) -> None:
    """Saves the peers that answered, to be dialled after a restart, and the charged peers, until cancelled."""
    path, written = agent.config.dir / KNOWN_PEERS, agent.address_book.to_remember()
    had_charged = True  # the file of the process before may name some
    while True:
        await asyncio.sleep(REMEMBER_EVERY_S)
        charged = agent.reputation.to_remember()
        if charged or had_charged:
            await asyncio.to_thread(save_reputation, agent.config.dir / REPUTATION, charged)
        had_charged = bool(charged)
        peers = agent.address_book.to_remember()
        if peers and peers != written:  # a node that is cut off keeps what it knew
            written = peers
            await asyncio.to_thread(save_known_peers, path, peers)


async def log_progress(agent: Agent, clocks: PeerClocks, is_finished: Callable[[], bool]) -> None:
    """Logs one line every PROGRESS_EVERY_S, and a clock that became wrong, until every step is made."""
    tokens = 0
    while not is_finished():
        await asyncio.sleep(PROGRESS_EVERY_S)
        made, tokens = agent.own_groups.tokens_generated - tokens, agent.own_groups.tokens_generated
        report = own_report(agent, made / PROGRESS_EVERY_S)
        num_groups = sum(edge.num_groups for edge in report.edges)
        fields = {
            "step": report.head.step,
            "does": "" if (activity := agent.local.activity) is None else activity.words(),
            "reward": report.reward_mean,
            "local": report.num_local,
            "external": report.num_external,
            "age": sum(edge.age_mean_steps * edge.num_groups for edge in report.edges) / max(num_groups, 1),
            "tokens_per_s": report.tokens_per_s,
            "peers": len(agent.peers.connected | agent.streams.readers),
        }
        logger.info("progress", extra=fields)
        if clock := clocks.new_finding():
            logger.warning(clock)
