"""Bounds on the rollouts of a group at admission."""

import pytest

from swarm.config import GeneratorConfig, NodeConfig, parse_config
from swarm.errors import ConfigError
from swarm.exchange.checks.admission_checks import check_form
from swarm.exchange.checks.admission_limits import AdmissionLimits
from swarm.testing.builders import ToyTokenizer, make_group
from swarm.types import RefusalReason


def is_admitted(num_rollouts: int, limits: AdmissionLimits) -> bool:
    group = make_group(texts=["7"] * num_rollouts)
    finding = check_form(group, ToyTokenizer(), limits)
    assert finding is None or finding[0] is RefusalReason.WRONG_GROUP_SIZE, finding
    return finding is None


def test_without_a_largest_group_every_group_has_the_group_size() -> None:
    limits = AdmissionLimits(group_size=8)
    assert [size for size in (1, 2, 7, 8, 9, 64) if is_admitted(size, limits)] == [8]


def test_a_largest_group_admits_from_two_to_that_many() -> None:
    limits = AdmissionLimits(group_size=8, largest_group=32)
    assert [size for size in (1, 2, 7, 8, 9, 32, 33, 64) if is_admitted(size, limits)] == [2, 7, 8, 9, 32]


def test_the_configuration_decides_and_refuses_a_largest_group_below_the_group_size() -> None:
    config = NodeConfig(generator=GeneratorConfig(group_size=4, largest_group=16))
    assert AdmissionLimits.from_config(config).largest_group == 16
    with pytest.raises(ConfigError, match=r"largest_group: 3 is below group_size 4"):
        parse_config(NodeConfig, {"generator": {"group_size": 4, "largest_group": 3}}, "test")
