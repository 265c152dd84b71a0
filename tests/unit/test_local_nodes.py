"""Further nodes of a training on one machine: what their configuration has of the first."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from node.local_nodes import LocalNodes
from swarm.config import EnvironmentConfig, ExchangeConfig, ModelConfig, NodeConfig, load_config


@pytest.mark.parametrize(
    ("exchange", "expected"),
    [
        (ExchangeConfig(listen="0.0.0.0:7700", advertise="10.0.0.7:7700"), ("0.0.0.0:0", "10.0.0.7:0")),
        (ExchangeConfig(listen="127.0.0.1:7700"), ("127.0.0.1:0", "")),
    ],
)
def test_each_listens_at_a_port_of_its_own(tmp_path: Path, exchange: ExchangeConfig, expected: tuple[str, str]) -> None:
    config = NodeConfig(
        dir=tmp_path,
        environments=(EnvironmentConfig(name="sort", kind="char", dataset="sort"),),
        model=ModelConfig(source="tiny"),
        exchange=exchange,
    )
    first = cast(Any, SimpleNamespace(maddrs=["/ip4/127.0.0.1/tcp/1"], agent=SimpleNamespace(node_id="a" * 64)))
    path = LocalNodes(config=config, num_trainers=1, num_generators=0)._write(2, True, first)
    found = load_config(NodeConfig, path)
    assert (found.exchange.listen, found.exchange.advertise) == expected
    assert found.directory.bootstrap == ("/ip4/127.0.0.1/tcp/1",) and found.seed == config.seed + 1
