"""How a node without a trainer of its own generates: it takes another node's versions, in one of two modes.

`pull` (sequential): before each batch the newest version is taken, and never during one.
`push` (asynchronous): versions are taken as they come; a batch in the making goes on with the new weights
(`follow.in_flight`) or ends first.
In both a batch that would arrive too old is given up.

Invariant: no group is made before the first version was taken: every token is of a version that its trainer signed.
"""

import asyncio
import logging
import random

from swarm.exchange.staleness import is_hopeless
from swarm.flow import Backoff
from swarm.loops.generate_loop import generate
from swarm.loops.worker import Worker
from swarm.types import PatchChain, PolicyVersion
from swarm.weights.apply import Applier

logger = logging.getLogger(__name__)

LOOK_AGAIN_S = 1.0  # for a newer version while a batch ends


class Following:
    """The loops of a worker that follows.

    Example:
        await Following(worker, applier).run()
    """

    def __init__(self, worker: Worker, applier: Applier) -> None:
        self._worker = worker
        self._applier = applier
        self._turn = asyncio.Lock()  # a batch, or a version: in turn where nothing is taken in flight
        self._began: PolicyVersion | None = None  # what the batch in the making began with
        self._backoff = Backoff(random.Random(worker.config.seed))
        self._engine_backoff = Backoff(random.Random(worker.config.seed))

    async def run(self) -> None:
        """Follows and generates until cancelled."""
        await self._take_newest(wait=True)
        if self._worker.config.follow.mode == "pull":
            await self._pull()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._generate(), name="generate")
            tasks.create_task(self._take_each(), name="take versions")

    async def _pull(self) -> None:
        while True:
            capacity = await self._worker.exchange.wait_capacity()
            await self._take_newest(wait=False)
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch_the_batch())
                await self._make_batch(capacity)
                watching.cancel()

    async def _generate(self) -> None:
        while True:
            capacity = await self._worker.exchange.wait_capacity()
            async with self._turn:
                await self._make_batch(capacity)

    async def _make_batch(self, capacity: int) -> None:
        self._began = self._worker.generator.version
        try:
            await generate(self._worker, capacity, self._engine_backoff)
        finally:
            self._began = None

    async def _take_newest(self, *, wait: bool) -> None:
        """Becomes the newest known version; with `wait`, once there is one that can be had."""
        while (way := await self._worker.exchange.next_update(self._applier.version, wait=wait)) is not None:
            if await self._take(way):
                return

    async def _take_each(self) -> None:
        while True:
            way = await self._worker.exchange.next_update(self._applier.version, wait=True)
            assert way is not None
            self._give_up_what_is_hopeless(self._applier.target(way))
            if self._worker.config.follow.in_flight:
                await self._take(way)
            else:
                await self._take_in_turn()

    async def _take_in_turn(self) -> None:
        """Takes the newest version after the batch in the making, which is given up once it has become hopeless."""
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(self._watch_the_batch())
            async with self._turn:
                watching.cancel()
                way = await self._worker.exchange.next_update(self._applier.version, wait=False)
                if way is not None:
                    await self._take(way)

    async def _watch_the_batch(self) -> None:
        """Only while no version is taken: a report is of the way that was handed out last."""
        while True:
            await asyncio.sleep(LOOK_AGAIN_S)
            way = await self._worker.exchange.next_update(self._applier.version, wait=False)
            if way is not None:
                self._give_up_what_is_hopeless(self._applier.target(way))

    async def _take(self, way: PatchChain) -> bool:
        """False where the engine serves what it served before; then some time has passed, too."""
        report = await self._worker.offload(self._applier.apply, way)
        await self._worker.exchange.applied(report)
        if not report.error:
            self._backoff.reset()
            return True
        logger.error("a version was not taken", extra={"step": report.version.step, "error": report.error})
        await self._backoff.wait()
        return False

    def _give_up_what_is_hopeless(self, target: PolicyVersion) -> None:
        """Cancels a batch whose oldest tokens would be too old for anyone by the time it arrives, or whose version is
        no more: the trainer went back to an earlier one."""
        began, max_age_steps = self._began, self._worker.config.replay.max_age_steps
        if began is not None and is_hopeless(began, target, max_age_steps):
            steps = {"began": began.step, "head": target.step, "max_age_steps": max_age_steps}
            logger.info("cancelled a batch that nobody could use on arrival", extra=steps)
            self._worker.generator.cancel()
