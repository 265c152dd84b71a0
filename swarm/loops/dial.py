"""Dials of advertised addresses: one peer, or trials of several strangers at a time.

Invariant: groups, and weights from sources other than the trainer, come only over connections made by `dial`, which
keeps to the bounds of the address book and records the result there. At most MAX_TRIALS trials are under way.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from swarm.errors import OtherNode, Unavailable
from swarm.exchange.agent import Agent
from swarm.exchange.grpc_transport import DIAL_TIMEOUT_S
from swarm.interfaces import PeerAddress, PeerClient, Transport
from swarm.loops.choose_peers import MAX_TRIALS
from swarm.types import short

logger = logging.getLogger(__name__)

TOGETHER_S: Final = 0.05  # answers this soon after the first lead to one choice: 30 ms among 2,000 adverts


async def dial(agent: Agent, transport: Transport, address: PeerAddress) -> PeerClient:
    """Connects to a peer, which proved its key, and records the result in the address book.

    Raises:
        Unavailable: the peer did not answer, or may not be dialled now.
        Unauthenticated: another node answered, or the peer refused our proof.
    """
    book, is_alive = agent.address_book, agent.is_alive(address.node_id)
    caller = agent.peers.inbound.get(address.node_id, "")
    if not book.begin_dial(address, is_alive=is_alive):
        raise Unavailable(f"{address.endpoint} is not dialled now: it failed before, or too many others did")
    try:
        client = await transport.connect(address, DIAL_TIMEOUT_S)
    except OtherNode as error:
        book.record_other(address, error.found, caller)
        raise
    except Unavailable as error:
        book.newest_error = str(error)
        book.record_failure(address, caller)
        raise
    book.record_answer(address, is_alive=is_alive)
    return client


class AddressTrials:
    """Dials under way to addresses where nobody has proved a key yet; `tasks` owns them."""

    def __init__(self, agent: Agent, transport: Transport, tasks: asyncio.TaskGroup) -> None:
        self._agent, self._transport, self._tasks = agent, transport, tasks
        self._under_way: dict[PeerAddress, asyncio.Task[bool]] = {}

    def begin(self, addresses: Sequence[PeerAddress]) -> None:
        """Starts to dial addresses, in order, while there is room; skips addresses that are being dialled."""
        self._under_way = {address: task for address, task in self._under_way.items() if not task.done()}
        for address in addresses:
            if address not in self._under_way and len(self._under_way) < MAX_TRIALS:
                name = f"try {short(address.node_id)}"
                self._under_way[address] = self._tasks.create_task(self._is_answered(address), name=name)

    async def answered(self, timeout_s: float) -> bool:
        """Waits until an address answers; False once all trials have failed, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._under_way:
                    await asyncio.wait(self._under_way.values(), return_when=asyncio.FIRST_COMPLETED)
                    await asyncio.sleep(TOGETHER_S)
                    over = [address for address, task in self._under_way.items() if task.done()]
                    answers = [self._under_way.pop(address).result() for address in over]
                    if any(answers):
                        return True
        except TimeoutError:
            pass
        return False

    async def _is_answered(self, address: PeerAddress) -> bool:
        try:
            client = await dial(self._agent, self._transport, address)
        except Unavailable as error:
            logger.debug("address did not answer", extra={"peer": short(address.node_id), "error": str(error)})
            return False
        await client.close()
        return True
