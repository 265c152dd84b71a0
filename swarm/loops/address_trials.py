"""Trials of addresses where nobody proved a key yet: dials of several at a time, for the address book.

Invariant: at most MAX_TRIALS are under way, and whoever answers is told of at once: nobody waits for the dead ones.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from swarm.errors import Unavailable
from swarm.exchange.agent import Agent
from swarm.interfaces import PeerAddress, Transport
from swarm.loops.choose_peers import MAX_TRIALS
from swarm.loops.dial import dial
from swarm.types import short

logger = logging.getLogger(__name__)

TOGETHER_S: Final = 0.05  # answers that come so soon after the first lead to one choice: 30 ms among 2,000 adverts


class AddressTrials:
    """The dials that are under way.

    Args:
        agent: of the node.
        transport: dials.
        tasks: owns the dials.

    Example:
        trials.begin(choice.trials)
        while await trials.answered(timeout_s=2.0):
            ...  # somebody proved a key: choose again
    """

    def __init__(self, agent: Agent, transport: Transport, tasks: asyncio.TaskGroup) -> None:
        self._agent, self._transport, self._tasks = agent, transport, tasks
        self._under_way: dict[PeerAddress, asyncio.Task[bool]] = {}

    def begin(self, addresses: Sequence[PeerAddress]) -> None:
        """Dials those that are not under way, the first ones first, as long as there is room."""
        self._under_way = {address: task for address, task in self._under_way.items() if not task.done()}
        for address in addresses:
            if address not in self._under_way and len(self._under_way) < MAX_TRIALS:
                name = f"try {short(address.node_id)}"
                self._under_way[address] = self._tasks.create_task(self._is_answered(address), name=name)

    async def answered(self, timeout_s: float) -> bool:
        """Waits until an address answers; False once all have failed, or after `timeout_s`."""
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
            logger.debug("address tried in vain", extra={"peer": short(address.node_id), "error": str(error)})
            return False
        await client.close()
        return True
