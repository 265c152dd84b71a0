"""`swarm.connect`: a run of real processes as a source of rollouts for a Python program."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waits import HANG_S

import swarm as library
from swarm.errors import ConfigError, Unavailable

pytestmark = pytest.mark.asyncio(loop_scope="session")


def take(link: str, directory: Path, count: int) -> tuple[list[library.SourcedGroup], list[str], int]:
    with library.connect(link, directory=directory, say=lambda _: None) as source:
        first = source.take(count, timeout_s=HANG_S)
        for group in source:  # and goes on
            return [*first, group], source.peers, len(source.tokenizer.eos_ids)
    raise AssertionError


async def test_groups_come_with_tokens_log_probs_rewards_and_versions(swarm: Any, tmp_path: Path) -> None:
    link = await swarm.link()
    groups, peers, _ = await asyncio.to_thread(take, link, tmp_path / "source", 5)
    assert len({group.digest for group in groups}) == 6
    assert {group.producer for group in groups} == set(peers), "the node that generates"
    for group in groups:
        assert group.policy_id == group.producer and group.messages and group.age_steps >= 0
        assert group.rewards.shape == (len(group.rollouts),) and group.rewards.min() < group.rewards.max()
        for each in group.rollouts:
            shapes = {each.completion_ids.shape, each.logprobs.shape, each.action_mask.shape, each.steps.shape}
            assert len(shapes) == 1 and each.action_mask.all() and (each.logprobs <= 0).all()
            assert each.finish in ("stop", "length") and 0 <= each.reward <= 1
    newest = [int(group.rollouts[0].steps.max()) for group in groups]
    assert newest[-1] >= newest[0]
    columns = library.trl_columns(groups)
    assert {len(column) for column in columns.values()} == {sum(len(group.rollouts) for group in groups)}
    assert columns["reward"][:2] == [each.reward for each in groups[0].rollouts[:2]]
    assert np.isfinite(columns["logprobs"][0]).all() and set(columns["env_mask"][0]) == {1}
    # The same directory goes on with the same key, and an interrupted wait keeps what came.
    again, _, _ = await asyncio.to_thread(take, link, tmp_path / "source", 1)
    assert {group.digest for group in again}.isdisjoint(group.digest for group in groups)


async def test_waiting_in_vain_and_wrong_links_are_told(swarm: Any, tmp_path: Path) -> None:
    (config,) = swarm.configs(1)
    info = await swarm.coordinator(config)  # and no node

    def wait() -> None:
        with library.connect(info["link"], directory=tmp_path / "source", say=lambda _: None) as source:
            with pytest.raises(Unavailable, match=r"not enough groups came in time; 0 nodes are connected.*swarm why"):
                source.take(1, timeout_s=1)
            source.close()
            with pytest.raises(Unavailable, match="this source was closed"):
                source.take(1)

    await asyncio.to_thread(wait)
    with pytest.raises(ConfigError, match="does not begin with swarm://"):
        await asyncio.to_thread(library.connect, "http://10.0.0.1/demo", directory=tmp_path / "other")
