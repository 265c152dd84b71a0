"""Right answers that are worth less than an empty one before a training starts."""

import pytest

from node.sampled_tasks import SampledEnvironment, SampledTask, is_upside_down
from swarm.config import EnvironmentConfig
from swarm.types import Message, Task


def sampled(*worth: tuple[float | None, float | None]) -> SampledEnvironment:
    """An environment whose right and empty answers are worth these."""
    tasks = tuple(
        SampledTask(
            task=Task(env="own", task_id=number, messages=(Message(role="user", content="q"),)),
            prompt_ids=(),
            prompt="",
            reference="a",
            actions=("a",),
            num_action_tokens=1,
            reward=right,
            empty_reward=empty,
        )
        for number, (right, empty) in enumerate(worth)
    )
    section = EnvironmentConfig.model_validate({"name": "own", "kind": "char", "dataset": "sort"})
    return SampledEnvironment(section=section, verifier="1", num_tasks=9, max_turns=1, tasks=tasks)


@pytest.mark.parametrize(
    ("worth", "expected"),
    [
        (((0.0, 0.75),), True),
        (((0.0, 0.75), (1.0, 0.0)), False),  # of one question alone
        (((0.0, 0.0),), False),  # a reward of the form, which the bare answer has not
        (((1.0, 0.0),), False),
        (((None, 0.5),), False),  # nobody knows a right answer
        (((0.2, None),), False),  # of several turns
        ((), False),
    ],
)
def test_each_right_answer_has_to_be_worth_less(
    worth: tuple[tuple[float | None, float | None], ...], expected: bool
) -> None:
    assert is_upside_down(sampled(*worth)) is expected
