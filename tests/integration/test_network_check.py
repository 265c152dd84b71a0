"""`swarm doctor LINK`: the peers of the run that it calls, and its report on them."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coordinator.daemon import CoordinatorDaemon
from node import network_check
from swarm.cli import main as cli
from swarm.config import CoordinatorConfig, DirectoryConfig, EntryConfig, EnvironmentConfig, ModelConfig, NodeConfig
from swarm.errors import ConfigError, Unavailable
from swarm.interfaces import DialBack, PeerAddress
from swarm.relay.relaying_transport import RelayingTransport

NONE = DirectoryConfig(kind="none")
NODE = NodeConfig(
    environments=(EnvironmentConfig(name="sort", kind="char", dataset="sort"),),
    model=ModelConfig(source="tiny", dtype="float32"),
)


async def test_a_link_whose_first_address_is_dead_is_checked_through_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def dial_back(_: RelayingTransport, peer: PeerAddress, timeout_s: float) -> DialBack:
        asked.append(peer.endpoint)  # a coordinator dials no caller of its own machine
        return DialBack(host="127.0.0.1", is_reached=True, detail="")

    monkeypatch.setattr(network_check, "IDLE_S", (0.0,))
    monkeypatch.setattr(RelayingTransport, "dial_back", dial_back)
    config = CoordinatorConfig(
        dir=tmp_path,
        run_id="two-addresses",
        listen="127.0.0.1:0",
        http_listen="127.0.0.1:0",
        node=NODE,
        directory=NONE,
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        dead = f"127.0.0.1:{server.getsockname()[1]}"
    async with CoordinatorDaemon(config) as coordinator:
        alive = coordinator.link.removeprefix("swarm://").partition("/")[0]
        report = await network_check.check_network(coordinator.link.replace(alive, f"{dead},{alive}"))
    assert asked == [alive]
    assert (report.reached, report.unreached) == ((alive,), (dead,))
    assert f"out: {alive} answer, {dead} not; idle connections are kept 0 s or more" in report.lines()[0]


async def test_on_the_coordinators_own_machine_it_says_where_to_run_it(tmp_path: Path) -> None:
    config = CoordinatorConfig(
        dir=tmp_path, run_id="here", listen="127.0.0.1:0", http_listen="127.0.0.1:0", node=NODE, directory=NONE
    )
    async with CoordinatorDaemon(config) as coordinator:
        with pytest.raises(ConfigError, match=r"the coordinator is on this machine.*run this on the machine"):
            await network_check.check_network(coordinator.link)


async def busy(*_: object) -> tuple[float, bool]:
    raise Unavailable("the machine is busy")


async def test_a_run_that_admits_some_asks_for_the_key_that_is_to_join(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_check, "_idle_kept_s", busy)  # which is another reason, and not the first
    entry = EntryConfig(kind="invited", members=("ab" * 32,))
    config = CoordinatorConfig(
        dir=tmp_path,
        run_id="some",
        listen="127.0.0.1:0",
        http_listen="127.0.0.1:0",
        node=NODE.model_copy(update={"entry": entry}),
        directory=NONE,
    )
    async with CoordinatorDaemon(config) as coordinator:
        with pytest.raises(ConfigError, match=r"--dir DIR") as caught:  # a key of this moment is no good to invite
            await network_check.check_network(coordinator.link)
        assert "swarm-node invite" not in str(caught.value)


def report_of(**fields: Any) -> network_check.NetworkReport:
    plain = network_check.NetworkReport(
        is_dialable=False,
        host="203.0.113.5",
        listened="7700",
        detail="no TLS connection: Connection refused",
        relay_ms=20.0,
        reached=("198.51.100.1:443",),
        unreached=(),
        idle_s=18.0,
        is_idle_kept=True,
    )
    return replace(plain, **fields)


def test_what_would_be_better_is_of_a_router_or_of_a_firewall(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_check, "own_address", lambda _: "192.168.1.2")
    assert "forward a TCP port of the router to 192.168.1.2" in report_of().lines()[2]
    monkeypatch.setattr(network_check, "own_address", lambda _: "203.0.113.5")
    assert "have the firewall let a TCP port in" in report_of().lines()[2]


def test_what_the_coordinators_own_machine_can_dial_says_nothing_of_others() -> None:
    first = report_of(is_dialable=True, host="198.51.100.1").lines()[0]
    assert "nobody else tried" in first and "others can dial it" not in first


@pytest.mark.parametrize(("ahead_s", "words"), [(7200.0, "7200 s ahead of"), (-500.0, "500 s behind"), (100.0, "")])
def test_a_clock_that_peers_would_refuse_is_said_first(ahead_s: float, words: str) -> None:
    lines = report_of(clock_ahead_s=ahead_s).lines()
    assert len(lines) == (4 if words else 3)
    assert words in lines[0] and ("set the clock" in lines[0]) is bool(words)


@pytest.mark.parametrize(("ahead_s", "code"), [(0.0, 0), (7200.0, 1)])
def test_the_exit_code_says_whether_a_node_here_could_take_part(
    ahead_s: float, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check_network(link: str, directory: Path | None) -> network_check.NetworkReport:
        return report_of(clock_ahead_s=ahead_s)

    monkeypatch.setattr(network_check, "check_network", check_network)
    found = CliRunner().invoke(cli.app, ["doctor", f"swarm://h:1/demo#{'ab' * 32}"])
    assert found.exit_code == code and "this network: seen as" in found.output


def test_a_link_that_is_empty_or_cut_is_told_before_the_wait() -> None:
    """Such as "$(swarm-coordinator link)" where none runs: the check of this machine would look like an answer."""
    for link in ("", f"swarm://h:1/demo#{'ab' * 31}"):
        found = CliRunner().invoke(cli.app, ["doctor", link])
        assert found.exit_code == 2 and "join link" in found.output and "20 seconds" not in found.output
