"""Two nodes as processes, and episodes of several turns: each replays and learns what the other one played."""

from typing import Any

import pytest

from swarm.config import EnvironmentConfig
from swarm.events import GroupRefused, GroupsDrawn, events_of
from swarm.simulate.local.processes import Process

pytestmark = pytest.mark.asyncio(loop_scope="session")

RETRY = EnvironmentConfig(name="again", kind="retry", params={"inner": {"kind": "char", "dataset": "sort"}})
OTHER = EnvironmentConfig(name="once_more", kind="retry", params={"inner": {"kind": "char", "dataset": "reverse"}})


def learned(process: Process) -> int:
    """Groups of the other node that a node learned from."""
    process.read_events()
    draws = events_of(GroupsDrawn, process.events)
    return sum(not group.is_own_policy for draw in draws for group in draw.groups)


async def test_nodes_learn_from_episodes_of_environments_that_only_others_play(swarm: Any) -> None:
    ada_config, bell_config = (
        config.model_copy(
            update={
                "environments": (RETRY, OTHER),
                "generator": config.generator.model_copy(
                    update={"env_weights": {own: 1.0}, "max_new_tokens": 6, "max_episode_tokens": 64}
                ),
            }
        )
        for config, own in zip(swarm.configs(2), ("again", "once_more"), strict=True)
    )
    ada = await swarm.node(ada_config)
    bell = await swarm.node(bell_config, bootstrap=tuple(ada.status()["dht"]))
    await swarm.until(lambda: bool(learned(ada) and learned(bell)), "no node learned from an episode of the other")
    for process in (ada, bell):
        refused = [event.reason for event in events_of(GroupRefused, process.events)]
        assert not {"wrong_episode", "other_environment", "bad_tokens", "false_reward"} & set(refused), refused
