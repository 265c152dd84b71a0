"""A configuration may announce exactly the addresses that peers will dial."""

import pytest

from swarm import addresses
from swarm.addresses import (
    advertised,
    dialable_endpoint,
    dialable_multiaddress,
    endpoint_of,
    is_loopback,
    is_wildcard,
    own_address,
    subnet_of,
)
from swarm.config import CoordinatorConfig, NodeConfig, parse_config
from swarm.errors import ConfigError
from swarm.wire.adverts import is_endpoint

ENDPOINTS = ["10.0.0.1:7700", "example.org:7700", "[2001:db8::1]:7700", "node-a:1", "localhost:65535"]
MULTIADDRESSES = [
    "/ip4/203.0.113.7/tcp/7701",
    "/ip6/2001:db8::1/tcp/7701",
    "/dns4/example.org/tcp/1",
    "/dns/a-b.example/tcp/65535",
]
NOT_ENDPOINTS = (
    "|7700|:7700|0.0.0.0:7700|[::]:7700|::1:7700|h:|h:x|h:65536|h:-1|a b:1|a_b:1|[::1:7700|[10.0.0.1]:7700|[fe80::1%eth0]:1|http://h:1"
    "|h/x:1|h:1\n|h:\u0661|h:000001"
)
NOT_MULTIADDRESSES = (
    "|/|/ip4/0.0.0.0/tcp/7701|/ip6/::/tcp/7701|/ip4/1.2.3.4/tcp/0|/ip4/1.2.3.4/udp/7701|/ip4/1.2.3.4/tcp/7701/p2p/12D3"
    "|/ip4/example.org/tcp/1|/dns4//tcp/1|/ip4/1.2.3.4/tcp|1.2.3.4:7701|/ip6/1.2.3.4/tcp/1|/unix/tmp/x/tcp/1"
    "|x/ip4/1.2.3.4/tcp/1|/ip4/1.2.3.4/tcp/99999|/quic/a/tcp/1|"
)


@pytest.mark.parametrize("text", ENDPOINTS)
def test_an_endpoint_that_may_be_advertised_is_one_that_peers_accept(text: str) -> None:
    assert dialable_endpoint(text) == text
    assert is_endpoint(text)


@pytest.mark.parametrize("text", NOT_ENDPOINTS.split("|"))
def test_an_endpoint_that_nobody_could_dial_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="could dial"):
        dialable_endpoint(text)


@pytest.mark.parametrize("text", MULTIADDRESSES)
def test_a_multiaddress_names_the_host_and_port_to_dial(text: str) -> None:
    assert dialable_multiaddress(text) == text
    assert endpoint_of(text) == endpoint_of(f"{text}/p2p/12D3KooW")
    assert is_endpoint(endpoint_of(text))


@pytest.mark.parametrize("text", NOT_MULTIADDRESSES.split("|"))
def test_a_multiaddress_that_nobody_could_dial_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="could dial"):
        dialable_multiaddress(text)


def test_a_configuration_that_announces_nonsense_does_not_start_and_names_the_key() -> None:
    for kind, data, key in (
        (NodeConfig, {"exchange": {"advertise": "0.0.0.0:7700"}}, r"exchange\.advertise"),
        (NodeConfig, {"directory": {"announce": ["/ip4/0.0.0.0/tcp/7701"]}}, r"directory\.announce\.0"),
        (CoordinatorConfig, {"advertise": "somewhere"}, "advertise"),
        (CoordinatorConfig, {"directory": {"announce": ["host:7701"]}}, r"directory\.announce\.0"),
    ):
        with pytest.raises(ConfigError, match=key):
            parse_config(kind, data, "test")


@pytest.mark.parametrize("given", [8443, "0.0.0.0", ":7700", "7700", "[::1:7700", "10.0.0.1:70000", True])
@pytest.mark.parametrize("section", ["exchange.listen", "serve.listen", "telemetry.metrics_listen"])
def test_where_a_node_listens_is_host_and_port_and_the_error_names_it(given: object, section: str) -> None:
    name, _, key = section.partition(".")
    with pytest.raises(ConfigError, match=rf"{name}\.{key}: is no host:port to listen at; expected .*0\.0\.0\.0:7700"):
        parse_config(NodeConfig, {name: {key: given}}, "test")


def test_a_node_may_listen_at_every_interface_at_a_free_port_or_not_at_all() -> None:
    sections = {
        "exchange": {"listen": "0.0.0.0:0"},
        "serve": {"listen": ""},
        "telemetry": {"metrics_listen": "[::]:9100"},
    }
    config = parse_config(NodeConfig, sections, "test")
    assert (config.exchange.listen, config.telemetry.metrics_listen) == ("0.0.0.0:0", "[::]:9100")


def test_what_is_announced_may_be_left_empty() -> None:
    config = parse_config(NodeConfig, {"exchange": {"advertise": ""}, "directory": {"announce": []}}, "test")
    assert not config.exchange.advertise and not config.directory.announce


def test_a_listener_on_every_interface_is_advertised_with_an_address_of_this_machine() -> None:
    assert advertised("", "127.0.0.1:7700") == "127.0.0.1:7700"
    assert advertised("example.org:7700", "0.0.0.0:7700") == "example.org:7700"
    for listen in ("0.0.0.0:7700", "[::]:7700"):
        assert is_wildcard(listen)
        assert dialable_endpoint(advertised("", listen)).endswith(":7700")


def test_an_address_of_the_day_on_which_a_node_joined_is_replaced_by_todays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def own(towards: str) -> str:
        asked.append(towards)
        return "192.168.7.9"

    monkeypatch.setattr(addresses, "own_address", own)
    assert advertised("192.168.1.2:0", "0.0.0.0:0", "swarm.example.org") == "192.168.7.9:0"
    assert asked == ["swarm.example.org"]
    assert advertised("192.168.1.2:7700", "0.0.0.0:7700") == "192.168.1.2:7700", "the owner's own"
    assert advertised("192.168.1.2:0", "192.168.1.2:0") == "192.168.1.2:0"
    monkeypatch.setattr(addresses, "own_address", lambda: "127.0.0.1")
    assert advertised("192.168.1.2:0", "0.0.0.0:0") == "192.168.1.2:0", "no network yet"


def test_the_way_to_this_machine_itself_is_loopback_and_to_nowhere_too() -> None:
    assert own_address("127.0.0.1") == own_address("no-such-host.invalid") == "127.0.0.1"


@pytest.mark.parametrize(
    ("host", "subnet"),
    [
        ("1.2.3.4", "1.2.3.0/24"),
        ("::ffff:1.2.3.4", "1.2.3.0/24"),
        ("[2a00:1450:4001::8]", "2a00:1450:4001::/48"),
        ("127.0.0.7", "127.0.0.7"),
        ("10.1.2.3", "10.1.2.3"),
        ("fe80::1%eth0", "fe80::1"),
        ("example.org", "example.org"),
    ],
)
def test_a_public_address_stands_for_its_subnet_and_any_other_for_itself(host: str, subnet: str) -> None:
    assert subnet_of(host) == subnet


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.0.1", "::1", "[::1]", "[::ffff:127.0.0.1]", "localhost"])
def test_a_host_that_leads_to_this_machine_alone_is_loopback_however_it_is_written(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["10.0.0.7", "0.0.0.0", "[::]", "::ffff:10.0.0.7", "swarm.example.org", "127.example.org"]
)
def test_no_other_host_is_loopback(host: str) -> None:
    assert not is_loopback(host)
