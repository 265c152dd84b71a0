"""Spare scoring processes: forked ahead of need, and those that are done with ended, both while others are served.

Invariant: no more than NUM_SPARE wait, none before somebody needed one, and `close` leaves nothing behind.
"""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, Final

from swarm.environments.sandbox.scoring_process import ScoringProcess, ScoringProcesses
from swarm.errors import ConfigError, RolloutFailed

logger = logging.getLogger(__name__)

NUM_SPARE: Final = 4  # of 2.5 MB each


class SpareProcesses:
    """Scoring processes that nobody uses yet.

    Example:
        process = spares.take() or await processes.start()
        ...
        spares.end(process)  # it is not waited for
    """

    def __init__(self, processes: ScoringProcesses) -> None:
        self._processes = processes
        self._waiting: list[ScoringProcess] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_filling = False
        self.num_started = 0

    def take(self) -> ScoringProcess | None:
        """One that waits, None where there is none; another one is begun for it."""
        taken = None
        while self._waiting and taken is None:
            process = self._waiting.pop()
            if process.reader.at_eof():  # killed by somebody else
                self.end(process)
            else:
                taken = process
        if not self._is_filling:
            self._is_filling = True
            self._begin(self._fill())
        return taken

    def end(self, process: ScoringProcess) -> None:
        """Shuts a process down in the background; its result is not needed."""
        process.writer.close()  # at once: `close` may cancel the task before it begins
        self._begin(self._end(process))

    async def close(self) -> None:
        """Ends those that wait."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for process in self._waiting:
            process.writer.close()
        self._waiting.clear()

    async def _fill(self) -> None:
        try:
            while len(self._waiting) < NUM_SPARE:
                self._waiting.append(await self._processes.start())
                self.num_started += 1
        except (RolloutFailed, ConfigError):
            logger.debug("no spare scoring process could be started", exc_info=True)  # whoever needs one says so
        finally:
            self._is_filling = False

    async def _end(self, process: ScoringProcess) -> None:
        await self._processes.end(process)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
