"""A whole node learns by a recipe over turns from episodes that it plays, with its worker in a process of its own."""

from pathlib import Path

import pytest

from node.daemon import Daemon
from swarm.config import (
    DirectoryConfig,
    EnvironmentConfig,
    EvaluationConfig,
    GeneratorConfig,
    LearnerConfig,
    ModelConfig,
    NodeConfig,
    ReplayConfig,
)


@pytest.mark.parametrize("recipe", ["gigpo", pytest.param("igpo", marks=pytest.mark.sweep)])
async def test_a_node_learns_by_states_or_answers_from_its_own_episodes(recipe: str, tmp_path: Path) -> None:
    grid = EnvironmentConfig(name="grid", kind="grid_world", params={"style": "char", "max_turns": 3})
    config = NodeConfig(
        dir=tmp_path / "node",
        worker="process",
        environments=(grid,),
        model=ModelConfig(source="tiny", dtype="float32"),
        generator=GeneratorConfig(group_size=4, max_new_tokens=2),
        learner=LearnerConfig(recipe=recipe, num_steps=2),
        replay=ReplayConfig(local_groups=2, external_groups=0, keep_zero_variance=True),
        directory=DirectoryConfig(kind="none"),
        evaluation=EvaluationConfig(num_problems=2),
    )
    async with Daemon(config) as daemon:
        await daemon.run()  # it ends with the last step
        assert daemon.status()["step"] == 2
        groups = await daemon.agent.store.load_scored(4)
    turns = [transition for group in groups for outcome in group.outcomes for transition in outcome.transitions]
    assert len(turns) > 16 and all(turn.state_key and not turn.messages for turn in turns)
