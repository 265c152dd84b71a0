"""`swarm doctor LINK`: whom of the run it calls, and what it says of them."""

import socket
from pathlib import Path

import pytest

from coordinator.daemon import CoordinatorDaemon
from node import network_check
from swarm.config import CoordinatorConfig, DirectoryConfig, EnvironmentConfig, ModelConfig, NodeConfig
from swarm.errors import ConfigError
from swarm.exchange.grpc_transport import GrpcTransport
from swarm.interfaces import DialBack, PeerAddress

NONE = DirectoryConfig(kind="none")
NODE = NodeConfig(
    environments=(EnvironmentConfig(name="sort", kind="char", dataset="sort"),),
    model=ModelConfig(source="tiny", dtype="float32"),
)
pytestmark = pytest.mark.timeout(120)


async def test_a_link_whose_first_address_is_dead_is_checked_through_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    async def dial_back(_: GrpcTransport, peer: PeerAddress, timeout_s: float) -> DialBack:
        asked.append(peer.endpoint)  # a coordinator dials no caller of its own machine
        return DialBack(host="127.0.0.1", is_reached=True, detail="")

    monkeypatch.setattr(network_check, "IDLE_S", (0.0,))
    monkeypatch.setattr(GrpcTransport, "dial_back", dial_back)
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
