"""Frequency of checkpoints: by steps, by the bytes that they cost, and not at the end where nobody asks."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from workers import PlainLearner, QuietExchange, make_worker

from swarm.clock import ManualClock
from swarm.config import NodeConfig
from swarm.learn.checkpoint import LONGEST_PAUSE_S, SMALL_BYTES, checkpoint_pause_s
from swarm.loops.learn_loop import learn_loop
from swarm.types import Draw, PolicyVersion, StepReport

STEP_S = 7.0


class Draws(QuietExchange):
    """The agent's side: draws without end, some of them journalled already."""

    def __init__(self, num_journalled: int) -> None:
        super().__init__()
        self.num_journalled = num_journalled

    async def redraw(self, from_step: int) -> list[Draw]:
        return [_draw(step) for step in range(from_step, self.num_journalled + 1)]

    async def draw(self, version: PolicyVersion) -> Draw:
        return _draw(version.step + 1)


class Steps(PlainLearner):
    """A learner whose steps take STEP_S; notes when it was saved."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock, self.saved = clock, list[int]()

    def step(self, draw: Draw) -> StepReport:
        self.clock.advance(STEP_S)
        return super().step(draw)

    def save(self) -> None:
        self.saved.append(self.version.step)


def _draw(step: int) -> Draw:
    group = SimpleNamespace(scored=SimpleNamespace(digest=b""))
    return Draw(step=step, groups=cast("Any", (group,)), num_zero_variance=0)


async def saved_at(pause_s: float, num_journalled: int = 0, **changes: Any) -> Sequence[int]:
    """Steps after which a run of 40 steps, a checkpoint every 2 of them at most, was saved."""
    clock = ManualClock()
    learner = Steps(clock)
    config = NodeConfig.model_validate({"learner": {"checkpoint_every": 2, "num_steps": 40}, **changes})
    options: dict[str, Any] = {"clock": clock, "saves_when_stopped": True, "checkpoint_pause_s": pause_s}
    worker = make_worker(config, Draws(num_journalled), learner, **options)
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
