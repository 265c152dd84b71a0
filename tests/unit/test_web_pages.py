"""Pages about nodes in a browser: nothing without the key, nothing of a peer as markup, and new events as they come."""

import re
from pathlib import Path

import pytest

from swarm.config import NODE_FILE
from swarm.events import PolicyEvaluated, StepMade
from swarm.model.tokenizer import CharTokenizer
from swarm.pages.swarm_map import MAX_LINKS, MapLink, MapNode, swarm_map
from swarm.report.node_directory import NodeReports
from swarm.report.token_view import tokens_in_update
from swarm.report.web_pages import WebPages
from swarm.telemetry import EventLog
from swarm.telemetry.shown_updates import TRAINED, ShownRollout, ShownUpdate, read_update, write_update
from swarm.testing.trained_node import make_trained_node

KEY = "a-key-that-nobody-guesses"
HOSTILE = "<img src=x onerror=alert(1)>\u202e\x1b[2J"


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node whose name, whose log and whose newest step somebody hostile wrote."""
    path = tmp_path / "node"
    make_trained_node(path)
    text = (path / NODE_FILE).read_text()
    (path / NODE_FILE).write_text(re.sub(r'(?m)^name = ".*"$', 'name = "<img src=x onerror=alert(1)>"', text, count=1))
    rollout = ShownRollout(
        digest="ab" * 32,
        place=0,
        reward=1.0,
        age_steps=1,
        token_ids=[5, 6],
        kinds=[TRAINED, TRAINED],
        generator=[-1.0, None],
        learner=[-0.5, -2.0],
        advantages=[1.0, 1.0],
        weights=[0.25, -0.125],
        bounded=[False, True],
    )
    write_update(path, ShownUpdate(step=1, recipe=HOSTILE, rollouts=[rollout]))
    return path


class Pages:
    """The pages of some nodes, as a browser asks for them."""

    def __init__(self, *paths: Path) -> None:
        self.now_s = 0.0
        self._pages = WebPages(paths, KEY, lambda: self.now_s)

    def read(self, path: str) -> str:
        page = self._pages.page_of(path)
        assert page is not None and page.status == 200, path
        assert "script-src 'self'" in page.headers["Content-Security-Policy"]
        assert page.headers["Referrer-Policy"] == "no-referrer", "the key is in the address"
        return page.body.decode()

    def status(self, path: str) -> int:
        page = self._pages.page_of(path)
        return 404 if page is None else page.status


def test_there_is_nothing_without_the_key(node: Path) -> None:
    pages = Pages(node)
    inside = ("", "style.css", "page.js", "node/0/")
    assert all(pages.status(f"/{KEY}/{rest}") == 200 for rest in inside)
    for key in ("", "a-key", KEY[:-1], KEY + "x", KEY.upper()):
        assert all(pages.status(f"/{key}/{rest}") == 404 for rest in inside)
    for rest in ("node/1/", "node/0", "node/-1/", "../node/0/", "node/0/group/zz/", "node/0/group/../", "status.json"):
        assert pages.status(f"/{KEY}/{rest}") == 404


def test_every_link_leads_somewhere_and_nothing_of_others_is_markup(node: Path) -> None:
    pages, seen, waiting = Pages(node), set[str](), [f"/{KEY}/"]
    assert "<h1>letters: &lt;img src=x onerror=alert(1)&gt;</h1>" in pages.read(f"/{KEY}/"), "the name of the node"
    while waiting:
        path = waiting.pop()
        seen.add(path)
        html = pages.read(path)
        assert "<img" not in html and "\x1b" not in html and "\u202e" not in html
        tags = re.sub(r'"[^"]*"', "", html)
        assert not re.search(r"<[^>]* (on\w+|style)=", tags), "the page's own security policy forbids both"
        assert re.findall(r"<script[^>]*>", html) == [f'<script src="/{KEY}/page.js" defer>']
        found = re.findall(r'(?:href|src)="([^#"][^"]*)"', html)
        assert all(each.startswith(f"/{KEY}/") for each in found), "nothing from elsewhere"
        waiting += [each for each in found if each not in seen | set(waiting) and each.endswith("/")]
    assert seen == {f"/{KEY}/", f"/{KEY}/node/0/", f"/{KEY}/node/0/group/{'ab' * 32}/"}


def test_a_step_is_shown_token_by_token(node: Path) -> None:
    html = Pages(node).read(f"/{KEY}/node/0/")
    assert "&lt;img src=x onerror=alert(1)&gt;" in html, "the name of the recipe"
    update = read_update(node, 1)
    assert update is not None
    (view,) = tokens_in_update(update, "ab" * 32, CharTokenizer())
    up, down = view.tokens
    assert up.css == "up5" and "ratio 1.65" in up.tip and "weight +0.25" in up.tip
    assert down.css == "down3 bounded" and "ratio" not in down.tip and "clipped" in down.tip


def test_what_happens_meanwhile_is_shown_and_what_was_read_is_not_read_again(node: Path) -> None:
    pages = Pages(node)
    assert "step 1;" not in pages.read(f"/{KEY}/")
    log = EventLog(node / "events.jsonl")
    for step in (1, 2):
        log.write(StepMade(step=step, draw_step=step, digest="", loss=0.0, grad_norm=0.0, num_tokens=1))
    log.write(PolicyEvaluated(step=2, env="sort", split="held_out", accuracy=0.5, num_problems=8, majority_baseline=0))
    log.close()
    pages.now_s += 60.0
    html = pages.read(f"/{KEY}/")
    assert "step 2;" in html
    again = NodeReports([node])
    first, second = again.read(), again.read()
    assert first.swarm.nodes[0].steps == second.swarm.nodes[0].steps
    assert len(second.swarm.nodes[0].steps) == 3, "each once"


def test_a_node_that_is_not_there_yet_is_said(tmp_path: Path) -> None:
    pages = Pages(tmp_path / "later")
    assert "no directory of a node that was started" in pages.read(f"/{KEY}/")
    make_trained_node(tmp_path / "later")
    assert "held out" in pages.read(f"/{KEY}/")


@pytest.mark.parametrize("count", [1, 2, 40, 41, 1200])
def test_a_map_of_any_size_is_bounded_and_says_what_it_leaves_out(count: int) -> None:
    nodes = [MapNode(key=str(index), name=f"node <{index}>", is_live=True, tip="") for index in range(count)]
    links = [
        MapLink(source=str(index), learner=str((index + hop) % count), weight=float(hop), tip="")
        for index in range(count)
        for hop in (1, 2)
    ]
    drawn = str(swarm_map(nodes, links))
    assert drawn.count("<circle") == min(count, 1000) and drawn.count("<path") <= MAX_LINKS
    assert "nan" not in drawn and "inf" not in drawn and "node <" not in drawn
    assert ("weaker links" in drawn) == (count > 150) and ("nodes" in drawn) == (count > 1000)
