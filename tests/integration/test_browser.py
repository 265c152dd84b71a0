"""The page of a node in headless Chromium: it changes while it is open, under its own security policy."""

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.events import StepMade
from swarm.report.web_pages import WebPages
from swarm.telemetry import EventLog, page_server
from swarm.telemetry.page_server import Page, PageServer
from swarm.testing.trained_node import make_trained_node

CHROMIUM = shutil.which("chromium")
KEY = "a-key-of-the-tests"
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--enable-logging=stderr"),
)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium in the PATH (Debian: apt install chromium)"),
]


@pytest.fixture
def node(tmp_path: Path) -> Path:
    make_trained_node(tmp_path / "node")
    return tmp_path / "node"


@pytest.fixture
def address(node: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of the pages of the node; at their third reading it has made another step. The browser's clock runs ahead as
    fast as it can: nothing is shown again because it was made a moment ago."""
    monkeypatch.setattr(page_server, "_PAGE_S", 0.0)
    num_read = 0
    pages = WebPages([node], KEY, lambda: 1e6 * num_read)

    def page_of(path: str) -> Page | None:
        nonlocal num_read
        num_read += path == f"/{KEY}/"
        if num_read == 3:
            log = EventLog(node / "events.jsonl")
            log.write(StepMade(step=7, draw_step=7, digest="", loss=0.0, grad_norm=0.0, num_tokens=1))
            log.close()
        return pages.page_of(path)

    server = PageServer(page_of)
    yield f"http://127.0.0.1:{server.start('127.0.0.1', 0)}/{KEY}/"
    server.stop()


def dump(address: str, folder: Path, wait_ms: int) -> tuple[str, str]:
    """The page as it stands after a while, and what the browser complained of."""
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder}", f"--virtual-time-budget={wait_ms}", "--dump-dom", address]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    complaints = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(complaints)


def test_an_open_page_changes_with_its_node_and_nothing_breaks_its_own_policy(address: str, tmp_path: Path) -> None:
    html, complaints = dump(address, tmp_path / "profile", wait_ms=15000)
    assert "step 7;" in html and not complaints, complaints
