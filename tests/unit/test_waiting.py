"""Somebody who waits sees what the command waits for: work without output, a training, and an end."""

import asyncio
import os
import queue
import signal
import subprocess
import sys

import pytest

from node.training_watch import TrainingWatch
from swarm import command_line as module
from swarm import process
from swarm.command_line import waiting
from swarm.config import NodeConfig
from swarm.process import run_until_signal


def test_work_without_output_is_named_with_its_progress_and_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_S", 0.01)
    monkeypatch.setattr(module, "EVERY_S", 0.01)
    lines = queue.Queue[str]()
    with waiting("loading the model", say=lines.put) as wait:
        first = lines.get()
        wait.now("evaluating 3/8")
        while not (line := lines.get()).startswith("evaluating 3/8, "):
            assert line.startswith("loading")
    assert first.startswith("loading the model, ") and first.endswith(" s")
    while not lines.empty():
        lines.get()
    with waiting("reading", is_quiet=True, say=lines.put):
        pass
    assert lines.empty(), "nothing comes after the end, or where a program reads the output"


def test_ctrl_c_ends_work_that_leaves_nothing_behind_though_a_thread_computes() -> None:
    code = (
        "import asyncio, time\nfrom swarm.command_line import ending_at_once\n"
        "def compute():\n    print('computes', flush=True)\n    time.sleep(3600)\n"
        "with ending_at_once():\n    asyncio.run(asyncio.to_thread(compute))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"computes\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate()
        assert process.returncode == 130 and b"stopped" in said


def test_a_training_says_what_it_does_and_how_many_groups_the_next_step_has() -> None:
    said = list[str]()
    config = NodeConfig.model_validate({"environments": [{"name": "sort", "kind": "char", "dataset": "sort"}]})
    watch = TrainingWatch(config, said.append, is_patient=True, quiet_s=0.0, num_with_signal=lambda: 2)
    watch.tick("loading the model")
    watch._doing_s -= 30
    watch.tick("loading the model")
    watch.num_groups = 9
    watch.tick("generating 3/8")
    assert said[:2] == ["step 0  loading the model", "step 0  loading the model (30 s)"]
    assert said[-1] == "step 0  generating 3/8; 2 of 4 groups for step 1"


async def test_an_end_that_takes_long_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "STILL_S", 0.01)
    said, told = list[str](), asyncio.Event()

    def say(line: str) -> None:
        said.append(line)
        if "still stopping" in line:
            told.set()

    async def work() -> None:
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        try:
            await asyncio.Event().wait()
        finally:
            await told.wait()  # a step that is ended first

    assert await run_until_signal(work(), say)
    num_said = len(said)
    await asyncio.sleep(0.05)
    assert len(said) == num_said, "nothing is said after the end"


@pytest.mark.parametrize("is_kept", [False, True])
async def test_a_closed_terminal_drains_unless_the_process_is_to_outlive_it(is_kept: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if is_kept else signal.SIG_DFL)
    try:

        async def work() -> None:
            os.kill(os.getpid(), signal.SIGHUP)
            if not is_kept:
                await asyncio.Event().wait()

        assert await run_until_signal(work(), lambda line: None) is not is_kept
    finally:
        signal.signal(signal.SIGHUP, before)
