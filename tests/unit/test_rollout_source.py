"""Groups that a source of rollouts keeps where not enough came in time."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.python_api.rollout_source import RolloutSource
from swarm.config import EnvironmentConfig, ModelConfig, NodeConfig
from swarm.errors import Unavailable


def test_groups_that_are_put_back_make_room_for_younger_ones_and_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = (EnvironmentConfig(name="sort", kind="char", dataset="sort"),)
    source = RolloutSource(
        NodeConfig(dir=tmp_path, environments=environments, model=ModelConfig(source="tiny")), max_waiting=3
    )
    older = [SimpleNamespace(digest=name, age_steps=1) for name in "abc"]

    def next_one(end_s: float | None) -> Any:
        if older:
            return older.pop(0)
        source._waiting.extend([("d", 0), ("e", 0)])  # they came while the others were taken
        raise Unavailable("no more")

    monkeypatch.setattr(source, "_next", next_one)
    with pytest.raises(Unavailable):
        source.take(4, timeout_s=0.0)
    assert [digest for digest, _ in source._waiting] == ["c", "d", "e"] and source.num_dropped == 2
