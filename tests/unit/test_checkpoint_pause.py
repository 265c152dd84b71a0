"""How often checkpoints are written: by steps, by the bytes that they cost, and not at the end where nobody asks."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.clock import ManualClock
from swarm.config import NodeConfig
from swarm.interfaces import LocalExchange
from swarm.learn.checkpoint import LONGEST_PAUSE_S, SMALL_BYTES, checkpoint_pause_s
from swarm.loops import Worker
from swarm.loops.learn_loop import learn_loop
from swarm.types import Attempt, Draw, PolicyVersion, StepReport

STEP_S = 7.0


class Draws:
    """The agent's side: draws without end, some of them journalled already."""

    def __init__(self, clock: ManualClock, num_journalled: int) -> None:
        self.clock, self.num_journalled = clock, num_journalled

    async def redraw(self, next_draw: int) -> list[Draw]:
        return [_draw(step) for step in range(next_draw, self.num_journalled + 1)]

    async def begin_again(self, step: int, passed: object = None) -> Attempt:
        return Attempt()

    async def draw(self, version: PolicyVersion) -> Draw:
        return _draw(version.step + 1)

    async def publish(self, *_: object) -> None: ...

    async def report_step(self, report: StepReport) -> None: ...

    async def report_evaluations(self, evaluations: object) -> None: ...

    async def report_checkpoint(self, next_draw: int, error: str) -> None: ...


class Steps:
    """A learner whose steps take STEP_S; notes when it was saved."""

    def __init__(self, clock: ManualClock) -> None:
        self.version, self.next_draw = PolicyVersion(policy_id="a" * 64, step=0), 1
        self.clock, self.saved = clock, list[int]()

    def step(self, draw: Draw) -> StepReport:
        self.clock.advance(STEP_S)
        self.version, self.next_draw = PolicyVersion(policy_id="a" * 64, step=draw.step), draw.step + 1
        figures: dict[str, Any] = {"diagnostics": {}, "seconds": {}, "was_skipped": False}
        return StepReport(version=self.version, loss=0.0, grad_norm=0.0, num_tokens=1, **figures)

    def snapshot(self) -> tuple[PolicyVersion, object]:
        return self.version, None

    def evaluated(self, evaluations: object) -> None: ...

    def save(self) -> None:
        self.saved.append(self.version.step)


def _draw(step: int) -> Draw:
    group = SimpleNamespace(scored=SimpleNamespace(digest=b""))
    return Draw(step=step, groups=cast("Any", (group,)), num_zero_variance=0)


async def saved_at(pause_s: float, num_journalled: int = 0, **changes: Any) -> Sequence[int]:
    """Steps after which a run of 40 steps, a checkpoint every 2 of them at most, was saved."""
    clock = ManualClock()
    learner = Steps(clock)
    data = {"learner": {"checkpoint_every": 2, "num_steps": 40}, **changes}

    async def offload(work: Any, *arguments: Any) -> Any:
        return work(*arguments)

    parts: dict[str, Any] = {"generator": None, "tokenizer": None, "evaluation_tasks": {}, "learner": learner}
    worker = Worker(
        config=NodeConfig.model_validate(data),
        exchange=cast("LocalExchange", Draws(clock, num_journalled)),
        produce=lambda first, count: [],
        evaluate=lambda tasks: [],
        clock=clock,
        offload=cast("Any", offload),
        saves_when_stopped=True,
        checkpoint_pause_s=pause_s,
        **parts,
    )
    await learn_loop(worker, cast("Any", learner))
    return learner.saved


async def test_checkpoints_come_no_sooner_after_each_other_than_their_size_allows() -> None:
    assert await saved_at(0.0) == [*range(2, 41, 2)]
    assert await saved_at(10 * STEP_S) == [10, 20, 30, 40]
    assert await saved_at(11 * STEP_S) == [12, 24, 36, 40]
    assert await saved_at(1000 * STEP_S) == [40]


async def test_a_restart_saves_what_it_made_again_so_that_one_that_dies_often_gets_on() -> None:
    assert (await saved_at(1000 * STEP_S, num_journalled=6))[0] == 2
    assert (await saved_at(1000 * STEP_S, num_journalled=1))[0] == 2


async def test_without_one_at_the_end_nothing_is_written_that_nobody_asked_for() -> None:
    assert await saved_at(1000 * STEP_S, disk={"checkpoint_at_end": False}) == []
    assert await saved_at(30 * STEP_S, disk={"checkpoint_at_end": False}) == [30]


@pytest.mark.parametrize(
    ("size", "pause_s"), [(SMALL_BYTES, 0.0), (1_600_000_000, 800.0), (84_000_000_000, LONGEST_PAUSE_S)]
)
def test_a_pause_is_as_long_as_the_bytes_take_at_their_rate(size: int, pause_s: float) -> None:
    assert checkpoint_pause_s(size) == pause_s
