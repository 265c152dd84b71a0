"""A trainer whose disk cannot hold what it publishes does not start."""

from pathlib import Path

import pytest

from node.engines import load_engines
from swarm.config import ModelConfig, NodeConfig, WeightsConfig
from swarm.errors import ConfigError
from swarm.model import load_model, published_state
from swarm.objectives.methods import recipes_of
from swarm.testing.builders import make_identity
from swarm.types import Role, Task

TINY = ModelConfig(source="tiny", dtype="bfloat16")


def start(directory: Path, store_bytes: int) -> None:
    def task_of(env: str, task_id: int) -> Task:
        raise AssertionError("nothing is learned here")

    weights = WeightsConfig(publish=True, store_bytes=store_bytes)
    config = NodeConfig(dir=directory, roles=(Role.TRAINER,), model=TINY, weights=weights)
    load_engines(config, make_identity(1).node_id, recipes_of(config), task_of, []).close()


def test_a_trainer_whose_weight_store_has_no_room_for_its_versions_says_how_much_it_needs(tmp_path: Path) -> None:
    size = sum(tensor.nbytes for tensor in published_state(load_model(TINY).network).values())
    with pytest.raises(ConfigError, match=r"^weights\.store_bytes: .* at least \d+$") as caught:
        start(tmp_path, size)
    least = int(str(caught.value).split()[-1])
    assert 1.5 * size <= least < 1.6 * size
    start(tmp_path, least)
