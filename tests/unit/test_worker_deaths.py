"""A worker that dies again and again."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from node import worker, worker_process
from node.worker_process import MOST_IN_STEP, WorkerProcess
from swarm.config import NodeConfig
from swarm.errors import ConfigError, Unavailable
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.nodes import make_agent, make_context

SAME = (1, "IndexError: 3")


@pytest.mark.parametrize(
    ("ends", "is_in_step", "num_starts"),
    [
        ([SAME] * 9, False, 2),
        ([SAME, (1, "IndexError: 4"), SAME, SAME], False, 4),
        ([(1, "")] * 5, False, 6),  # passing causes
        ([(-9, "")] * 5, False, 6),
        ([SAME] * 99, True, MOST_IN_STEP),
    ],
)
async def test_the_same_exception_twice_without_a_step_starts_no_third_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: list[Any], is_in_step: bool, num_starts: int
) -> None:
    waiting, started = [*ends, (0, "")], list[Any]()

    async def run_once(*_: object) -> tuple[int | None, str]:
        started.append(waiting.pop(0))
        return started[-1]

    async def at_once(*_: object) -> None: ...

    monkeypatch.setattr(worker_process, "_run_once", run_once)
    monkeypatch.setattr(worker_process.Backoff, "wait", at_once)
    context = make_context(NodeConfig(dir=tmp_path))
    agent = make_agent(context, MemoryGroupStore(context.clock, 2**20))
    agent.journal._has_drawn = is_in_step
    given_up = pytest.raises(ConfigError, match=r"same error and without a step between.*IndexError: 3")
    with given_up if num_starts < len(waiting) else nullcontext():
        await WorkerProcess(lambda _: None).run(context.config, agent)
    assert len(started) == num_starts


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (IndexError("list\nof 3"), "IndexError: list of 3"),
        (Unavailable("server"), ""),
        (RuntimeError("CUDA out of memory. Tried 3 GiB"), ""),
        (ExceptionGroup("tasks", [KeyError("a")]), "KeyError: 'a'"),
    ],
)
def test_an_exception_that_does_not_pass_by_itself_is_reported(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    shown: str,
) -> None:
    async def work(*_: object) -> bool:
        raise error

    monkeypatch.setattr(worker, "work", work)
    assert worker.exit_code(NodeConfig(dir=tmp_path), tmp_path, None) == worker.EXIT_FAILED
    assert capsys.readouterr().out.strip() == shown
