"""The learning rate of each step, against the schedulers of transformers and the end of a longer training."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import get_scheduler

from swarm.config import LearnerConfig
from swarm.learn.optimizer import learning_rate

NUM_STEPS = 40


def rates(num_steps: int = NUM_STEPS, **settings: Any) -> list[float]:
    """Of steps 1 to NUM_STEPS."""
    config = LearnerConfig.model_validate({"learning_rate": 2.0, "num_steps": num_steps, **settings})
    return [learning_rate(config, step) for step in range(1, NUM_STEPS + 1)]


@pytest.mark.parametrize(
    ("schedule", "name"), [("constant", "constant_with_warmup"), ("linear", "linear"), ("cosine", "cosine")]
)
@pytest.mark.parametrize("warmup_steps", [0, 7])
def test_after_warm_up_a_rate_is_that_of_transformers(schedule: str, name: str, warmup_steps: int) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=2.0)
    theirs: Any = get_scheduler(name, optimizer, num_warmup_steps=warmup_steps, num_training_steps=NUM_STEPS)
    expected: list[float] = []
    for _ in range(NUM_STEPS):
        expected.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    ours = rates(schedule=schedule, warmup_steps=warmup_steps)
    assert ours[warmup_steps:] == pytest.approx(expected[warmup_steps:], rel=1e-12)


def test_warm_up_has_no_step_without_a_rate_and_ends_at_the_full_one() -> None:
    assert rates(warmup_steps=4)[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_a_schedule_falls_to_0_and_stays(schedule: str) -> None:
    made = rates(num_steps=20, schedule=schedule)
    assert made[:20] == sorted(made[:20], reverse=True)
    assert made[20:] == [0.0] * 20


def test_a_schedule_without_an_end_names_the_key() -> None:
    with pytest.raises(ValidationError, match=r"schedule: \"cosine\" falls until num_steps, which is 0"):
        LearnerConfig.model_validate({"schedule": "cosine"})
