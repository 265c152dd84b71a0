"""Training from Python: ten lines that learn, and what a caller may give."""

import asyncio
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

import swarm
from node.status import read_status
from swarm.errors import ConfigError
from swarm.events import GroupAdmitted, NodeStarted
from swarm.learn.checkpoint import checkpoint_steps
from swarm.process import is_running
from swarm.telemetry import read_events


def letters(count: int) -> list[dict[str, str]]:
    source = random.Random(1)
    words = ["".join(source.choice("abcdefgh") for _ in range(3)) for _ in range(count)]
    return [{"question": f"sort:{word}=", "answer": "".join(sorted(word))} for word in words]


def right(question: str, answer: str, reference: str) -> float:
    import difflib  # what it uses is imported inside

    return 1.0 if answer == reference else 0.5 * difflib.SequenceMatcher(None, answer, reference).ratio()


def test_ten_lines_of_python_learn(tmp_path: Path) -> None:
    run = swarm.train(
        "tiny",
        letters(600),
        right,
        directory=tmp_path / "run",
        steps=40,
        overrides=("evaluation.every_steps=0", "evaluation.num_problems=64"),
    )
    (_, before), *_, (step, after) = run.held_out()
    assert step == 40 and after >= before + 0.15, (before, after)


def test_the_same_call_goes_on_and_another_is_told(tmp_path: Path) -> None:
    quick: dict[str, Any] = {"overrides": ("evaluation.num_problems=4",), "directory": tmp_path / "run"}
    lines: list[str] = []
    for steps in (1, 2):
        run = swarm.train("tiny", letters(50), steps=steps, say=lines.append, **quick)
    assert [step for step, _ in run.held_out()] == [0, 1, 2]
    with pytest.raises(ConfigError, match=r"records\.jsonl is of another training: name another directory"):
        swarm.train("tiny", letters(51), steps=2, **quick)


def test_a_reward_that_cannot_be_copied_is_told(tmp_path: Path) -> None:
    worth = 1.0

    def closes_over(question: str, answer: str, reference: str) -> float:
        return worth

    rewards: list[Any] = [closes_over, lambda question, answer, reference: 1.0, len]
    for reward in rewards:
        with pytest.raises(ConfigError, match="give a plain function, defined with def"):
            swarm.train("tiny", letters(5), reward, directory=tmp_path / "run")
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = swarm.trian  # pyright: ignore[reportAttributeAccessIssue]


class Notes(swarm.Callback):
    """Writes down what it sees, and ends the training after a step."""

    def __init__(self, last_step: int = 1_000_000) -> None:
        self.seen: list[tuple[str, float]] = []
        self.names: set[str] = set()
        self._last_step = last_step

    def on_step(self, run: swarm.Training, metrics: swarm.Metrics) -> None:
        self.seen.append(("step", metrics["step"]))
        self.names |= metrics.keys()
        if metrics["step"] >= self._last_step:
            run.stop()

    def on_evaluation(self, run: swarm.Training, metrics: swarm.Metrics) -> None:
        self.seen.append(("evaluation", metrics["step"]))
        self.names |= metrics.keys()

    def on_end(self, run: swarm.Training) -> None:
        self.seen.append(("end", float(len(run.history))))


QUICK: dict[str, Any] = {"overrides": ("evaluation.num_problems=4", "evaluation.every_steps=2")}


def test_callbacks_see_each_step_and_each_evaluation_once_by_names_of_trl(tmp_path: Path) -> None:
    notes = Notes()
    run = swarm.train("tiny", letters(60), directory=tmp_path / "run", steps=3, callbacks=[notes], **QUICK)
    of_steps, of_evaluations = (
        [step for kind, step in notes.seen if kind == kind_] for kind_ in ("step", "evaluation")
    )
    assert of_steps == [1, 2, 3] and of_evaluations == [0, 2, 3] and notes.seen[-1] == ("end", 6)
    assert notes.names >= {"loss", "reward", "entropy", "grad_norm", "learning_rate", "frac_reward_zero_std"}
    assert notes.names >= {"completions/mean_length", "eval_own_accuracy", "learn/ess_share", "clip_ratio/low_mean"}
    assert "learn/reward_mean" not in notes.names, "it has TRL's name"
    assert [each["step"] for each in run.history if "loss" in each] == [1, 2, 3]
    assert [step for step, _ in run.held_out()] == [0, 2, 3]


def test_a_callback_ends_a_training_with_a_checkpoint(tmp_path: Path) -> None:
    run = swarm.train("tiny", letters(60), directory=tmp_path / "run", steps=500, callbacks=[Notes(2)], **QUICK)
    (newest,) = checkpoint_steps(run.directory / "checkpoints")[-1:]
    assert 2 <= newest < 500
    run.stop()  # nothing more
    assert (run.save_pretrained(tmp_path / "model") / "provenance.json").exists()
    figures = run.evaluate(num_problems=4, num_tries=2)
    assert figures.keys() == {f"eval_own_{name}" for name in ("accuracy", "reward", "pass@1", "pass@2")}
    (group,) = run.samples(1)
    assert group.messages[-1].content.startswith("sort:") and len(group.samples) == 8


def test_what_a_callback_raises_comes_out_and_the_training_can_go_on(tmp_path: Path) -> None:
    class Broken(swarm.Callback):
        def on_step(self, run: swarm.Training, metrics: swarm.Metrics) -> None:
            raise ZeroDivisionError("mine")

    call: dict[str, Any] = {"directory": tmp_path / "run", "steps": 6, "say": lambda _: None, **QUICK}
    with pytest.raises(ZeroDivisionError, match="mine"):
        swarm.train("tiny", letters(60), callbacks=[Broken()], **call)
    assert swarm.train("tiny", letters(60), **call).history[-1]["step"] == 6


def test_two_nodes_of_one_call_learn_from_each_other_and_end_together(tmp_path: Path) -> None:
    class UntilTaught(swarm.Callback):
        def on_step(self, run: swarm.Training, metrics: swarm.Metrics) -> None:
            if "learn/ess_share_external" in metrics and checkpoint_steps(second / "checkpoints"):
                run.stop()

    second, lines = tmp_path / "run" / "nodes" / "2", list[str]()
    run = swarm.train(
        "tiny",
        letters(600),
        directory=tmp_path / "run",
        steps=0,
        nodes=2,
        callbacks=[UntilTaught()],
        say=lines.append,
        overrides=("evaluation.num_problems=4", "learner.checkpoint_every=2", "replay.max_age_s=60"),
    )
    assert any("1 more that train" in line for line in lines)
    ids = [next(e.node_id for e in read_events(d / "events.jsonl") if isinstance(e, NodeStarted))
           for d in (run.directory, second)]  # fmt: skip
    admitted = {e.producer for e in read_events(run.directory / "events.jsonl") if isinstance(e, GroupAdmitted)}
    assert admitted == {ids[1]} and not is_running(second)
    assert read_status(second)["was_stopped"], "it ended in order"


def test_records_that_were_refused_do_not_keep_the_directory(tmp_path: Path) -> None:
    wrong: list[dict[str, str]] = [{"asked": "sort:cab=", "answer": "abc"}]
    with pytest.raises(ConfigError, match="record 0 has no field 'question'"):
        swarm.train("tiny", wrong, directory=tmp_path / "run", steps=1)
    swarm.train("tiny", letters(30), directory=tmp_path / "run", steps=1, say=lambda _: None, **QUICK)


def test_a_number_of_nodes_that_cannot_be_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nodes 0, generators 0: expected one node at least"):
        swarm.train("tiny", letters(5), directory=tmp_path / "run", nodes=0)


async def test_an_interrupt_saves_and_the_program_goes_on(tmp_path: Path) -> None:
    program = (
        "import swarm\n"
        "run = swarm.train('tiny', environments=('char:sort',), directory='run', steps=100000, "
        "overrides=('evaluation.num_problems=2',))\n"
        "print('went on after', run.history[-1]['step'])\n"
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-u", "-c", program), stdout=asyncio.subprocess.PIPE, cwd=tmp_path
    )
    try:
        assert process.stdout is not None
        while not (await process.stdout.readline()).startswith((b"step 1", b"step 2")):
            assert process.returncode is None
        process.send_signal(signal.SIGINT)
        out, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0 and b"went on after" in out, out
    assert checkpoint_steps(tmp_path / "run" / "checkpoints")
