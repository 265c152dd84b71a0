"""Workers of which a test shows only the part that matters: learner, agent's side, and reports."""

from collections.abc import Sequence
from typing import Any, cast

from swarm.clock import ManualClock
from swarm.config import NodeConfig
from swarm.loops import Worker
from swarm.testing.nodes import inline
from swarm.types import Attempt, Draw, Evaluation, PolicyVersion, StepReport


def make_report(version: PolicyVersion, **changes: Any) -> StepReport:
    """The report of a step, with nothing special about it."""
    fields: dict[str, Any] = {"loss": 0.0, "grad_norm": 0.0, "num_tokens": 1, "was_skipped": False}
    fields |= {"diagnostics": {}, "seconds": {}, **changes}
    return StepReport(version=version, **fields)


class QuietExchange:
    """The agent's side of a worker, which draws nothing and notes the evaluations."""

    def __init__(self) -> None:
        self.evaluations: list[Evaluation] = []

    async def redraw(self, from_step: int) -> list[Draw]:
        return []

    async def begin_again(self, step: int, passed: object = None) -> Attempt:
        return Attempt()

    async def publish(self, *_: object) -> None: ...

    async def report_step(self, report: StepReport) -> None: ...

    async def report_evaluations(self, evaluations: Sequence[Evaluation]) -> None:
        self.evaluations += evaluations

    async def report_checkpoint(self, next_draw: int, error: str) -> None: ...


class PlainLearner:
    """A learner that makes a step of each draw and keeps nothing."""

    def __init__(self, policy_id: str = "a" * 64) -> None:
        self.version, self.next_draw = PolicyVersion(policy_id=policy_id, step=0), 1

    def step(self, draw: Draw) -> StepReport:
        self.version = PolicyVersion(policy_id=self.version.policy_id, step=self.version.step + 1)
        self.next_draw = draw.step + 1
        return make_report(self.version, draw_step=draw.step)

    def snapshot(self) -> tuple[PolicyVersion, object]:
        return self.version, None

    def evaluated(self, evaluations: Sequence[Evaluation]) -> None: ...

    def save(self) -> None: ...


def make_worker(config: NodeConfig, exchange: object, learner: object, **changes: Any) -> Worker:
    """A worker that generates nothing."""
    plain: dict[str, Any] = {
        "generator": None,
        "tokenizer": None,
        "evaluation_tasks": {},
        "produce": lambda first, count: [],
        "evaluate": lambda tasks: [],
        "clock": ManualClock(),
        "offload": inline,
    }
    return Worker(config=config, exchange=cast(Any, exchange), learner=cast(Any, learner), **{**plain, **changes})
