"""A worker without a trainer takes versions and generates: by pull, by push, in turn; and batches that it gives up."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import pytest
from waits import until

from swarm.clock import SystemClock
from swarm.config import FollowConfig, NodeConfig
from swarm.episode import EpisodeOutcome
from swarm.errors import Unavailable
from swarm.loops import update_weights
from swarm.loops.update_weights import FollowWeightsLoop
from swarm.loops.worker import Worker
from swarm.testing.builders import ToyTokenizer, make_group
from swarm.testing.nodes import inline
from swarm.types import ApplyReport, FinishReason, PatchChain, PolicyVersion, RolloutGroup

TRAINER = "t" * 64


def version(step: int) -> PolicyVersion:
    return PolicyVersion(policy_id=TRAINER, step=step, digest=bytes([step]) * 32)


@dataclass
class Engine:
    """Generates when it is let; `cancel` ends that at once."""

    version: PolicyVersion = field(default_factory=lambda: version(0))
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    num_cancelled: int = 0
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.num_cancelled += 1
        self.is_cancelled = True
        self.gate.set()


class FakeApplier:
    """UpdatePlanner are versions here; the engine takes each but those in `refused`."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.version = version(0)
        self.refused: set[int] = set()
        self.taken: list[int] = []

    def target(self, chain: Any) -> PolicyVersion:
        return chain[-1]

    def apply(self, chain: Any) -> ApplyReport:
        if chain[-1].step in self.refused:
            self.refused.discard(chain[-1].step)
            return ApplyReport(version=self.version, error="canary differs")
        self.engine.version = self.version = chain[-1]
        self.taken.append(chain[-1].step)
        return ApplyReport(version=self.version)


class FakeExchange:
    """The agent: a newest version, always room for a group, and what was put."""

    def __init__(self) -> None:
        self.newest = 0
        self.changed = asyncio.Event()
        self.put_steps: list[int] = []
        self.reports: list[ApplyReport] = []
        self.has_first = False

    def publish(self, step: int) -> None:
        self.newest = step
        self.changed.set()

    async def next_update(self, held: PolicyVersion, *, wait: bool) -> PatchChain | None:
        while wait and self.has_first and self.newest == held.step:
            self.changed.clear()
            await self.changed.wait()
        if self.has_first and self.newest == held.step:
            return None
        self.has_first = True
        return (version(self.newest),)  # type: ignore[return-value]

    async def report_update(self, report: ApplyReport) -> None:
        self.reports.append(report)

    async def wait_capacity(self) -> int:
        return 1

    async def num_asked(self) -> int:
        return len(self.put_steps)

    async def put(self, group: RolloutGroup, outcomes: Sequence[EpisodeOutcome] = ()) -> float:
        self.put_steps.append(group.oldest_step)
        return 0.0


def swarm_of(
    mode: Literal["pull", "push"], *, in_flight: bool = True, max_age_steps: int = 2
) -> tuple[FollowWeightsLoop, FakeExchange, Engine, FakeApplier]:
    engine, exchange = Engine(), FakeExchange()
    applier = FakeApplier(engine)
    config = NodeConfig(follow=FollowConfig(mode=mode, in_flight=in_flight))
    config = config.model_copy(update={"replay": config.replay.model_copy(update={"max_age_steps": max_age_steps})})

    async def ask(first: int, count: int) -> list[RolloutGroup]:
        began = engine.version
        await engine.gate.wait()
        engine.gate.clear()
        group = make_group(TRAINER, step=began.step)
        if engine.is_cancelled:
            engine.is_cancelled = False
            rollouts = tuple(replace(rollout, finish=FinishReason.ABORTED) for rollout in group.rollouts)
            group = replace(group, rollouts=rollouts)
        return [group]

    worker = Worker(
        config=config,
        exchange=exchange,  # type: ignore[arg-type]
        generator=engine,  # type: ignore[arg-type]
        produce=lambda first, count: [],
        evaluate=lambda tasks: [],
        learner=None,
        tokenizer=ToyTokenizer(),
        evaluation_tasks={},
        clock=SystemClock(),
        offload=inline,
        ask=ask,
    )
    return FollowWeightsLoop(worker, applier), exchange, engine, applier  # type: ignore[arg-type]


@asynccontextmanager
async def running(follower: FollowWeightsLoop) -> AsyncGenerator[None]:
    task = asyncio.create_task(follower.run())
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_pull_takes_the_newest_version_before_each_batch() -> None:
    follower, exchange, engine, applier = swarm_of("pull")

    async with running(follower):
        for step in (1, 4, 5):
            engine.gate.set()
            await until(lambda: not engine.gate.is_set())
            exchange.publish(step)  # in the middle of a batch: nothing is taken before it has ended
            engine.gate.set()
            await until(lambda step=step: applier.version.step == step)
    assert applier.taken == [0, 1, 4, 5] and set(exchange.put_steps) <= {0, 1, 4, 5}


async def test_pull_gives_up_a_batch_that_would_arrive_too_old_and_takes_nothing_before_it_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(update_weights, "POLL_S", 0.01)
    follower, exchange, engine, applier = swarm_of("pull", max_age_steps=2)

    async with running(follower):
        await until(lambda: applier.taken == [0])
        await asyncio.sleep(0.02)  # a batch is in the making
        exchange.publish(2)
        await asyncio.sleep(0.05)
        assert not engine.num_cancelled and applier.taken == [0]
        exchange.publish(3)
        await until(lambda: engine.num_cancelled >= 1 and applier.taken == [0, 3])
        assert not exchange.put_steps
        engine.gate.set()
        await until(lambda: exchange.put_steps == [3])


async def test_pull_looks_for_no_version_while_one_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exchange takes a report to be of the chain that it handed out last."""
    monkeypatch.setattr(update_weights, "POLL_S", 0.01)
    follower, exchange, engine, applier = swarm_of("pull")
    worker = follower._worker
    offload, num_handed = worker.offload, list[int]()
    next_update = exchange.next_update

    async def counted(held: PolicyVersion, *, wait: bool) -> PatchChain | None:
        num_handed.append(held.step)
        return await next_update(held, wait=wait)

    async def slow(function: Callable[..., Any], /, *arguments: object) -> Any:
        before = len(num_handed)
        await asyncio.sleep(0.05)
        assert len(num_handed) == before
        return await offload(function, *arguments)

    exchange.next_update, worker.offload = counted, slow  # type: ignore[method-assign, assignment]

    async with running(follower):
        await until(lambda: applier.taken == [0])
        exchange.publish(1)
        engine.gate.set()
        await until(lambda: applier.taken == [0, 1])
        await until(lambda: num_handed[-3:] == [1, 1, 1], "a look while a batch is made")


async def test_push_takes_versions_while_a_batch_is_made() -> None:
    follower, exchange, engine, applier = swarm_of("push")

    async with running(follower):
        await until(lambda: applier.taken == [0])
        exchange.publish(1)
        await until(lambda: applier.taken == [0, 1])  # the gate is still shut
        exchange.publish(2)
        await until(lambda: applier.taken == [0, 1, 2])
        assert not exchange.put_steps and not engine.num_cancelled
        engine.gate.set()
        await until(lambda: len(exchange.put_steps) == 1)


async def test_in_turn_a_version_waits_for_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(update_weights, "POLL_S", 0.01)
    follower, exchange, engine, applier = swarm_of("push", in_flight=False)

    async with running(follower):
        await until(lambda: applier.taken == [0])
        await asyncio.sleep(0.02)  # a batch is in the making
        exchange.publish(1)
        await asyncio.sleep(0.05)
        assert applier.taken == [0]
        engine.gate.set()
        await until(lambda: applier.taken == [0, 1])
        assert exchange.put_steps == [0] and not engine.num_cancelled


@pytest.mark.parametrize("in_flight", [True, False])
async def test_a_batch_that_would_arrive_too_old_is_given_up_and_asked_again(
    in_flight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update_weights, "POLL_S", 0.01)
    follower, exchange, engine, applier = swarm_of("push", in_flight=in_flight, max_age_steps=2)

    async with running(follower):
        await until(lambda: applier.taken == [0])
        await asyncio.sleep(0.02)
        for step in (1, 2):
            exchange.publish(step)
            await asyncio.sleep(0.04)
        assert not engine.num_cancelled
        exchange.publish(3)  # also while the first of them still waits for its turn
        await until(lambda: engine.num_cancelled >= 1 and applier.version.step == 3)
        assert not exchange.put_steps
        engine.gate.set()
        await until(lambda: len(exchange.put_steps) == 1)
        assert exchange.put_steps == [3]


async def test_a_batch_of_a_version_that_is_no_more_is_given_up() -> None:
    follower, exchange, engine, applier = swarm_of("push")
    exchange.publish(5)

    async with running(follower):
        await until(lambda: applier.taken == [5])
        await asyncio.sleep(0.02)
        exchange.publish(3)  # the trainer was killed and went on from a checkpoint
        await until(lambda: applier.version.step == 3)
        assert engine.num_cancelled == 1


async def test_a_refused_version_is_reported_and_the_old_one_generates_on(monkeypatch: pytest.MonkeyPatch) -> None:
    follower, exchange, engine, applier = swarm_of("push")
    applier.refused = {1}

    async with running(follower):
        await until(lambda: applier.taken == [0])
        exchange.publish(1)
        await until(lambda: bool(exchange.reports[-1].error))
        engine.gate.set()
        await until(lambda: exchange.put_steps == [0])
        await until(lambda: applier.taken == [0, 1])  # tried again after a while


async def test_an_engine_that_is_away_is_waited_for() -> None:
    follower, exchange, engine, _ = swarm_of("pull")
    asked = follower._worker.ask
    assert asked is not None
    failures = [Unavailable("the engine ended")]

    async def ask(first: int, count: int) -> list[RolloutGroup]:
        if failures:
            raise failures.pop()
        return await asked(first, count)

    follower._worker.ask = ask

    async with running(follower):
        engine.gate.set()
        await until(lambda: exchange.put_steps == [0])
