"""A stop in the middle of a checkpoint: it is written once, and the stop waits for it."""

import asyncio
import threading
from typing import Any, cast

import pytest
from workers import PlainLearner, QuietExchange, make_worker

from swarm.config import NodeConfig
from swarm.loops.learn_loop import learn_loop
from swarm.types import Draw, PolicyVersion


class OneDraw(QuietExchange):
    """The agent's side: a single draw, and what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.is_drawn = False
        self.saved: list[str] = []

    async def draw(self, version: PolicyVersion) -> Draw:
        if self.is_drawn:
            await asyncio.Event().wait()
        self.is_drawn = True
        return Draw(step=1, groups=(), num_zero_variance=0)

    async def report_checkpoint(self, next_draw: int, error: str) -> None:
        self.saved.append(error)


class SlowDisk(PlainLearner):
    """A learner whose save takes until it is let go; counts saves that are under way together."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.num_saves = self.num_together = self.most_together = 0

    def save(self) -> None:
        self.num_saves += 1
        self.num_together += 1
        self.most_together = max(self.most_together, self.num_together)
        self.begun.set()
        self.may_end.wait()
        self.num_together -= 1


async def test_a_stop_in_the_middle_of_a_checkpoint_writes_it_once() -> None:
    exchange, learner = OneDraw(), SlowDisk()
    config = NodeConfig.model_validate({"learner": {"checkpoint_every": 1, "num_steps": 0}})
    worker = make_worker(config, exchange, learner, offload=asyncio.to_thread, saves_when_stopped=True)
    running = asyncio.ensure_future(learn_loop(worker, cast(Any, learner)))
    assert await asyncio.to_thread(learner.begun.wait, 10.0)
    running.cancel()
    for _ in range(10):
        await asyncio.sleep(0)
    has_stopped = running.done()
    learner.may_end.set()  # before any claim: a thread waits for it
    assert not has_stopped
    with pytest.raises(asyncio.CancelledError):
        await running
    assert (learner.num_saves, learner.most_together) == (1, 1)
    assert exchange.saved == [""], "the agent knows of one checkpoint"
