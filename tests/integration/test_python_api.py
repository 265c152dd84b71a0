"""Training from Python: ten lines that learn, and what a caller may give."""

import random
from pathlib import Path
from typing import Any

import pytest

import swarm
from swarm.errors import ConfigError

pytestmark = pytest.mark.timeout(180)


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
