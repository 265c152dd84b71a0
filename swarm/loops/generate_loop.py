"""Generation loop: makes groups when there is capacity, with the newest weights, and hands them to the agent.

Invariant: groups are handed over in the order of their questions, one for each question. A group with a cancelled
rollout is handed over only if it was cut off MAX_ASKED times in a row: the agent drops it.
"""

import asyncio
import logging
import random
from typing import Final

from swarm.activity import GENERATING, WAITING_FOR_ROOM
from swarm.errors import RolloutFailed, Unavailable, WeightsRefused
from swarm.flow import Backoff
from swarm.loops.worker import Worker
from swarm.types import FinishReason

logger = logging.getLogger(__name__)

MAX_ASKED: Final = 3  # attempts at a question whose answers are cut off: few are cancelled twice for new weights


async def generate_loop(worker: Worker) -> None:
    """Generates whenever admission capacity allows, always with the newest weights, until cancelled."""
    backoff = Backoff(random.Random(worker.config.seed))
    while True:
        await generate(worker, await worker.exchange.wait_capacity(), backoff)


async def generate(worker: Worker, capacity: int, backoff: Backoff) -> None:
    """Makes the next batch, at most `capacity` groups; logs a failure of engine or agent, and waits a while."""
    count = min(capacity, worker.config.generator.groups_per_batch)
    try:
        await make_groups(worker, await worker.exchange.num_asked(), count)
    except (RolloutFailed, Unavailable, WeightsRefused) as error:
        logger.error("a batch could not be made", extra={"error": str(error)})
        await backoff.wait()
    else:
        worker.on_progress(WAITING_FOR_ROOM)
        backoff.reset()


async def make_groups(worker: Worker, first: int, count: int, num_stored: int = 0) -> None:
    """Asks `count` questions from number `first` on and hands over all but the first `num_stored` groups.

    Ends at the first group that was cut off and is asked again. Raises RolloutFailed, Unavailable or WeightsRefused.
    """
    learner, began_s = worker.learner, worker.clock.monotonic_s()
    with worker.overlap.doing("generate"):
        if learner is not None and learner.version != worker.generator.version:
            version, weights = learner.snapshot()
            await worker.offload(worker.generator.load, version, weights)
        if worker.ask is None:
            groups = await worker.offload(worker.produce, first, count)
        else:
            groups = await worker.ask(first, count)
        worker.on_progress(GENERATING, len(groups), count)
        await slow_down(worker, began_s)
    for number, group in enumerate(groups[num_stored:], first + num_stored):
        is_cut_off = any(rollout.finish is FinishReason.ABORTED for rollout in group.rollouts)
        if is_cut_off and _is_asked_again(worker, number):
            return
        await worker.exchange.put(group)


def _is_asked_again(worker: Worker, number: int) -> bool:
    """Counts a question whose answers were cut off; True if it is to be asked again, MAX_ASKED times in all.

    Questions are numbered by the groups handed over, so this one and the later ones are asked again, with newer
    weights. Whole groups among them are no loss: a batch is cancelled where all of it would arrive too old. A server
    that cuts an answer off for lack of context does so again.
    """
    before, num_asked = worker.cut_off
    worker.cut_off = (number, num_asked + 1 if number == before else 1)
    return worker.cut_off[1] < MAX_ASKED


async def slow_down(worker: Worker, began_s: float) -> None:
    """Waits until work that began at `began_s` (monotonic) has taken `faults.slow_factor` times as long."""
    extra = worker.config.faults.slow_factor - 1.0
    if extra > 0:
        await asyncio.sleep(extra * (worker.clock.monotonic_s() - began_s))
