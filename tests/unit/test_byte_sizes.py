"""Sizes and rates as people write them."""

import pytest

from swarm.cli.shared_options import machine_overrides
from swarm.config import NodeConfig, apply_overrides, parse_config
from swarm.config.byte_sizes import byte_words, parse_bytes
from swarm.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [("20GB", 20 * 10**9), ("1.5 GiB", 3 * 2**29), ("500m", 500 * 10**6), ("70000", 70_000), ("2 TiB", 2**41)],
)
def test_a_size_is_read_in_decimal_and_binary_units(text: str, size: int) -> None:
    assert parse_bytes(text, "--max-disk") == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1.GB", "20 XB", "0", "0.1B", "2GB/s", "1e9", "\u0663GB x"])
def test_what_is_no_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--max-disk .*such as 20GB"):
        parse_bytes(text, "--max-disk")


def test_a_rate_may_end_in_per_second() -> None:
    assert parse_bytes("2MB/s", "--max-upload", is_rate=True) == parse_bytes("2MB", "--max-upload", is_rate=True)


def test_the_options_of_a_machine_are_keys_of_the_configuration() -> None:
    data = NodeConfig().model_dump(mode="json")
    apply_overrides(NodeConfig, data, machine_overrides(3, "2MB/s", "20GB"))
    config = parse_config(NodeConfig, data, "test")
    assert (config.num_threads, config.exchange.max_upload_bytes_per_s, config.disk.max_bytes) == (3, 2e6, 2e10)
    assert machine_overrides(None, "", "") == []
    apply_overrides(NodeConfig, data, machine_overrides(None, "10kB/s", ""))
    with pytest.raises(ConfigError, match=r"10000 is below 50,000"):
        parse_config(NodeConfig, data, "test")


def test_a_size_is_said_in_the_unit_in_which_it_can_be_read() -> None:
    assert [byte_words(size) for size in (12, 1500, 2.5e6, 4.84e9, 3e12)] == [
        "12 B", "1.5 kB", "2.5 MB", "4.8 GB", "3.0 TB",
    ]  # fmt: skip


def test_what_is_sent_and_what_is_passed_on_for_others_keep_to_one_upload_limit() -> None:
    def split(**exchange: int) -> tuple[int, int]:
        config = NodeConfig.model_validate({"exchange": exchange}).exchange
        return config.most_own_bytes_per_s, config.most_relayed_bytes_per_s

    assert split(max_upload_bytes_per_s=2_000_000) == (1_500_000, 500_000)
    assert split(max_upload_bytes_per_s=2_000_000, relay_bytes_per_s=100_000) == (1_900_000, 100_000)
    assert split(max_upload_bytes_per_s=2_000_000, relay_reservations=0)[0] == 2_000_000
    assert split() == (0, 8 * 2**20)
