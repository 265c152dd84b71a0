"""Groups that the worker hands over: whole ones only, and each question once."""

import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from swarm.activity import ignore_progress
from swarm.clock import SystemClock
from swarm.config import NodeConfig
from swarm.episode import EpisodeOutcome
from swarm.flow import Backoff
from swarm.loops.generate_loop import generate, make_groups
from swarm.loops.worker import Overlap
from swarm.testing.builders import make_group
from swarm.testing.nodes import inline
from swarm.types import FinishReason, RolloutGroup


class Exchange:
    """Numbers questions by what was handed over, as the agent does."""

    def __init__(self) -> None:
        self.numbers: list[int] = []

    async def num_asked(self) -> int:
        return len(self.numbers)

    async def put(self, group: RolloutGroup, outcomes: Sequence[EpisodeOutcome] = ()) -> float:
        self.numbers.append(group.task_id)
        return 0.0


def worker_that_cancels(exchange: Exchange, *batches: set[int]) -> Any:
    """Question number n is task n; those of the batch's set come back cancelled."""
    left = list(batches)

    def produce(first: int, count: int) -> list[RolloutGroup]:
        cancelled = left.pop(0) if left else set[int]()
        return [
            cut(make_group(task_id=n)) if n in cancelled else make_group(task_id=n) for n in range(first, first + count)
        ]

    clock = SystemClock()
    return SimpleNamespace(
        config=NodeConfig(),
        exchange=exchange,
        learner=None,
        ask=None,
        produce=produce,
        offload=inline,
        clock=clock,
        overlap=Overlap(clock),
        cut_off=(-1, 0),
        on_progress=ignore_progress,
    )


def cut(group: RolloutGroup) -> RolloutGroup:
    return replace(group, rollouts=(*group.rollouts[:-1], replace(group.rollouts[-1], finish=FinishReason.ABORTED)))


async def test_a_cancelled_question_and_those_after_it_are_asked_again_and_none_twice() -> None:
    exchange = Exchange()
    worker = worker_that_cancels(exchange, {1, 3}, {1, 2, 3, 4}, set())
    for _ in range(4):
        await generate(worker, 4, Backoff(random.Random(0)))
    assert exchange.numbers == list(range(9))


async def test_a_question_that_its_server_cuts_off_each_time_stops_no_other() -> None:
    """A server whose context is too short for one prompt; nobody cancels, and no other weights come."""
    exchange = Exchange()
    worker = worker_that_cancels(exchange, *[{2, 5}] * 20)
    for _ in range(8):
        await generate(worker, 4, Backoff(random.Random(0)))
    assert exchange.numbers[:2] == [0, 1]
    assert max(exchange.numbers) > 6 and len(set(exchange.numbers)) == len(exchange.numbers)


async def test_what_was_stored_before_a_kill_is_not_handed_over_again() -> None:
    exchange = Exchange()
    await make_groups(worker_that_cancels(exchange, set()), first=0, count=4, num_stored=3)
    assert exchange.numbers == [3]
