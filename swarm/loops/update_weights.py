"""Generation with another node's weights: takes the versions of the followed trainer, in one of two modes.

- `pull` (sequential): before each batch the newest version is loaded, and never during one.
- `push` (asynchronous): versions are loaded as they come; a running batch goes on with the new weights
  (`follow.in_flight`) or ends first.

In both modes a batch that would be too old on arrival is cancelled.

Invariant: no group is made before the first version was loaded: every token is of a version that its trainer signed.
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

POLL_S = 1.0  # for a newer version while a batch runs


class FollowWeightsLoop:
    """The loops of a worker that follows a trainer."""

    def __init__(self, worker: Worker, applier: Applier) -> None:
        self._worker = worker
        self._applier = applier
        self._engine_lock = asyncio.Lock()  # a batch, or a load: in turn unless `follow.in_flight`
        self._batch_version: PolicyVersion | None = None  # what the running batch began with; None between batches
        self._load_backoff = Backoff(random.Random(worker.config.seed))
        self._engine_backoff = Backoff(random.Random(worker.config.seed))

    async def run(self) -> None:
        """Follows and generates until cancelled."""
        await self._load_newest(wait=True)
        if self._worker.config.follow.mode == "pull":
            await self._pull()
        else:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._generate(), name="generate")
                tasks.create_task(self._load_each(), name="load versions")

    async def _pull(self) -> None:
        while True:
            capacity = await self._worker.exchange.wait_capacity()
            await self._load_newest(wait=False)
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch_batch())
                await self._make_batch(capacity)
                watching.cancel()

    async def _generate(self) -> None:
        while True:
            capacity = await self._worker.exchange.wait_capacity()
            async with self._engine_lock:
                await self._make_batch(capacity)

    async def _make_batch(self, capacity: int) -> None:
        self._batch_version = self._worker.generator.version
        try:
            await generate(self._worker, capacity, self._engine_backoff)
        finally:
            self._batch_version = None

    async def _load_newest(self, *, wait: bool) -> None:
        """Loads the newest known version, if there is one; with `wait`, waits for one."""
        while (chain := await self._next_chain(wait=wait)) is not None:
            if await self._load(chain):
                return

    async def _load_each(self) -> None:
        while True:
            chain = await self._next_chain(wait=True)
            assert chain is not None
            self._cancel_if_too_old(self._applier.target(chain))
            if self._worker.config.follow.in_flight:
                await self._load(chain)
                continue
            async with asyncio.TaskGroup() as tasks:
                watching = tasks.create_task(self._watch_batch())
                async with self._engine_lock:
                    watching.cancel()
                    newest = await self._next_chain(wait=False)  # maybe newer than what the batch was waited for with
                    if newest is not None:
                        await self._load(newest)

    async def _watch_batch(self) -> None:
        """Cancels the running batch once it is too old.

        Must not run during a load: the agent takes the report of a load to be about the chain that it handed out last.
        """
        while True:
            await asyncio.sleep(POLL_S)
            chain = await self._next_chain(wait=False)
            if chain is not None:
                self._cancel_if_too_old(self._applier.target(chain))

    async def _next_chain(self, *, wait: bool) -> PatchChain | None:
        return await self._worker.exchange.next_update(self._applier.version, wait=wait)

    async def _load(self, chain: PatchChain) -> bool:
        """Loads a version; False, after a pause, if the engine keeps serving the previous one."""
        report = await self._worker.offload(self._applier.apply, chain)
        await self._worker.exchange.report_update(report)
        if not report.error:
            self._load_backoff.reset()
            return True
        extra = {"step": report.version.step, "error": report.error}
        logger.error("a version could not be loaded; trying again after a pause", extra=extra)
        await self._load_backoff.wait()
        return False

    def _cancel_if_too_old(self, target: PolicyVersion) -> None:
        """Cancels a batch that nobody could use on arrival: too old, or of a version that the trainer abandoned."""
        version, max_age_steps = self._batch_version, self._worker.config.replay.max_age_steps
        if version is not None and is_hopeless(version, target, max_age_steps):
            extra = {"batch_step": version.step, "head_step": target.step, "max_age_steps": max_age_steps}
            logger.info("cancelled a batch that nobody could use on arrival", extra=extra)
            self._worker.generator.cancel()
