"""Mistakes that a first-time user makes, and the sentence that each of them is answered with."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from coordinator.daemon import CoordinatorDaemon
from swarm.config import CoordinatorConfig, EnvironmentConfig, ModelConfig, NodeConfig
from swarm.errors import ConfigError, Unavailable
from swarm.identity import Identity
from swarm.plugins import load_object
from swarm.wire.join_link import JoinLink, fetch_manifest

FINGERPRINT = "ab" * 32


def link_to(address: str) -> JoinLink:
    return JoinLink.parse(f"swarm://{address}/demo#{FINGERPRINT}")


async def test_a_coordinator_signs_no_task_that_nobody_can_build(tmp_path: Path) -> None:
    sections = {
        "shift": EnvironmentConfig(name="mine", kind="char", dataset="shift"),
        "gdc": EnvironmentConfig(name="mine", kind="reasoning_gym", dataset="gdc"),
        "inner": EnvironmentConfig(name="mine", kind="retry", params={"inner": {"kind": "char", "dataset": "inner"}}),
    }
    for dataset, section in sections.items():
        node = NodeConfig(environments=(section,), model=ModelConfig(source="tiny", dtype="float32"))
        config = CoordinatorConfig(dir=tmp_path / dataset, listen="127.0.0.1:0", node=node)
        with pytest.raises(ConfigError, match=f"environment mine: dataset '{dataset}' is (unknown|none of)"):
            async with CoordinatorDaemon(config):
                pass
    # Only those who train need the file.
    own = EnvironmentConfig(name="mine", kind="jsonl", dataset="not_here.jsonl", digest=FINGERPRINT)
    node = NodeConfig(environments=(own,), model=ModelConfig(source="tiny", dtype="float32"))
    config = CoordinatorConfig(dir=tmp_path / "own", listen="127.0.0.1:0", http_listen="127.0.0.1:0", node=node)
    async with CoordinatorDaemon(config) as daemon:
        assert daemon.link


async def test_a_name_that_does_not_resolve_and_a_port_that_speaks_http_are_told() -> None:
    with pytest.raises(Unavailable, match=r"the name no\.such\.host\.invalid does not resolve"):
        await fetch_manifest(link_to("no.such.host.invalid:7800"), Identity.create(), 5.0)
    page = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
    thread = threading.Thread(target=page.serve_forever)
    thread.start()
    try:
        with pytest.raises(Unavailable, match=r"speaks another protocol; is it the port of a status page\?"):
            await fetch_manifest(link_to(f"127.0.0.1:{page.server_port}"), Identity.create(), 5.0)
    finally:
        page.shutdown()
        page.server_close()
        thread.join()


def test_a_reward_that_imports_the_file_beside_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("worth = 1.0\n")
    (tmp_path / "mine.py").write_text("from helper import worth\n")
    with pytest.raises(ConfigError, match=r"files beside mine\.py are not imported: write it all in one file"):
        load_object(f"{tmp_path / 'mine.py'}:score")
    (tmp_path / "mine.py").write_text("import no_such_package_at_all\n")
    with pytest.raises(ConfigError, match=r"No module named 'no_such_package_at_all'$"):
        load_object(f"{tmp_path / 'mine.py'}:score")
