"""What is tried before a training starts: which rewards are upside down, and that one stall is no failing reward."""

from typing import Any

import pytest

from node.sampled_tasks import SampledEnvironment, SampledTask, is_upside_down, sample_environments
from swarm.config import EnvironmentConfig, NodeConfig
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.errors import ConfigError, RolloutFailed
from swarm.interfaces import Verdict
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


@pytest.mark.parametrize("num_failing", [1, 2])
async def test_an_answer_is_scored_again_where_the_first_try_failed(
    num_failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    verify, calls = SandboxVerifier.verify, list[Any]()

    async def stalled(self: SandboxVerifier, env: str, task_id: int, episodes: Any) -> Verdict:
        calls.append(episodes)
        if len(calls) <= num_failing:
            raise RolloutFailed("scoring took longer than timeout_s 5")
        return await verify(self, env, task_id, episodes)

    monkeypatch.setattr(SandboxVerifier, "verify", stalled)
    section = EnvironmentConfig.model_validate({"name": "own", "kind": "char", "dataset": "sort"})
    config = NodeConfig.model_validate({"environments": [section]})
    if num_failing == 2:
        with pytest.raises(ConfigError, match=r"the reward failed on the answer .*: scoring took longer"):
            await sample_environments(config, None, num_tasks=1)
    else:
        ((first,),) = [each.tasks for each in await sample_environments(config, None, num_tasks=1)]
        assert first.reward == 1.0 and calls[0] == calls[1]
