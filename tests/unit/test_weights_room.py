"""A trainer whose disk cannot hold what it publishes does not start."""

from pathlib import Path
from typing import Any, cast

import pytest

from node.build import build_worker
from swarm.config import EnvironmentConfig, ModelConfig, NodeConfig, WeightsConfig
from swarm.errors import ConfigError
from swarm.model.network import load_model
from swarm.model.version_digest import published_state
from swarm.testing.builders import make_identity
from swarm.types import Role

SORT = EnvironmentConfig(name="sort", kind="char", dataset="sort")
TINY = ModelConfig(source="tiny", dtype="bfloat16")


def start(directory: Path, store_bytes: int) -> None:
    weights = WeightsConfig(publish=True, store_bytes=store_bytes)
    config = NodeConfig(dir=directory, roles=(Role.TRAINER,), model=TINY, weights=weights, environments=(SORT,))
    build_worker(config, make_identity(1).node_id, cast(Any, None)).close()


def test_a_trainer_whose_weight_store_has_no_room_for_its_versions_says_how_much_it_needs(tmp_path: Path) -> None:
    size = sum(tensor.nbytes for tensor in published_state(load_model(TINY).network).values())
    with pytest.raises(ConfigError, match=r"^weights\.store_bytes: .* at least \d+$") as caught:
        start(tmp_path, size)
    least = int(str(caught.value).split()[-1])
    assert 1.5 * size <= least < 1.6 * size
    start(tmp_path, least)
