"""A directory that somebody hostile wrote ends no reader: wrong kinds of values, pipes, nesting, endless queries."""

import copy
import io
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from logged_events import example
from rich.console import Console

import swarm.trained.newest_groups as stores
from node.status import problems, read_status, status_rows
from swarm.config import NODE_FILE
from swarm.diagnosis import diagnose, read_snapshot
from swarm.diagnosis.status_file import read_status_file
from swarm.errors import ConfigError, SwarmError
from swarm.events import KINDS, to_json
from swarm.identity import Identity
from swarm.report.html import render_html
from swarm.report.node_directory import NodeReports
from swarm.report.watch import WatchedNode, view
from swarm.telemetry.warning_log import WARNINGS
from swarm.testing.trained_node import make_trained_node

A = "a" * 64
COUNTS = [
    *("num_put", "num_admitted", "num_local_used", "num_external_used", "num_set_aside", "num_failures", "known_peers"),
    *("num_entry_refused", "num_events_lost", "tokens_generated", "published_step", "bytes_sent", "bytes_received"),
    *("replay_groups", "replay_bytes", "written_bytes", "max_disk_bytes", "step", "pid"),
]
STATUS: dict[str, Any] = {
    **dict.fromkeys(COUNTS, 3),
    **dict.fromkeys(("name", "run_id", "clock", "who_counts", "newest_dial_error", "coordinator_refusal"), "words"),
    **{"node_id": A, "advice": "ok", "endpoints": ["h:1"], "peers": [A], "dht": ["/ip4/1"], "standing": {A: "member"}},
    **{"at_s": 9e3, "started_at_s": 1.0, "last_step_at_s": 8e3, "paused_since_s": 1.0, "scoring_s": 3.0},
    **{"reward_mean": 0.5, "refusals": {"too_old": 3}, "newest_refusals": {"too_old": [A, "why"]}},
    **{"evaluations": {"sort/held_out": 0.5}, "environments": {"sort": "own"}, "dials": {"answered": 1, "failed": 9}},
    **{"guard": {"guard_idle_draws": 9.0, "guard_held_sources": 2.0}, "differs_from_run": [["key", "1", "2"]]},
    "worker": {"what": "learning", "done": 1, "total": 3, "num_tokens": 1, "at_s": 8e3},
    "own_since_step": {"num_put": 9, "num_with_signal": 0, "num_unscored": 1, "error": "e"},
    "followers": {A: {"granted": 1, "delivered": 1, "expired": 0}},
    "relayed": {"reservations": 1, "connections": 1, "bytes": 1, "sockets": 0},
    "reach": {
        **{"kind": "outward", "host": "h", "detail": "d"},
        "relays": [{"node_id": A, "endpoint": "h:1", "delay_ms": 3}],
    },
    "following": {
        **{"policy": A, "candidates": [A], "trainers_without_weights": [A], "is_trainer_connected": True, "credit": 0},
        **{"served_step": 1, "head_step": 2, "last_error": "e"},
    },
}
WRONG: tuple[Any, ...] = (None, "x", 10**30, 2**62, 1e308, [[]], {"a": {"b": []}})


def wrong_ones(whole: Any) -> Iterator[Any]:
    """Copies of a JSON value, each with another value in one place."""
    for place in places(whole):
        for wrong in WRONG:
            changed = copy.deepcopy(whole)
            inner = changed
            for key in place[:-1]:
                inner = inner[key]
            inner[place[-1]] = wrong
            yield changed


def places(whole: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if at:
        yield at
    items = whole.items() if isinstance(whole, dict) else enumerate(whole) if isinstance(whole, list) else ()
    for key, inner in items:
        yield from places(inner, (*at, key))


@pytest.fixture
def node(tmp_path: Path) -> Path:
    path = tmp_path / "node"
    make_trained_node(path)
    return path


def show(node: Path) -> None:
    watched = WatchedNode(node)
    watched.refresh(9_010.0)
    Console(file=io.StringIO()).print(view([watched]))


READERS: dict[str, Callable[[Path], object]] = {
    "status": lambda node: status_rows(read_status(node)),
    "why": lambda node: diagnose(read_snapshot(node, 9_010.0)),
    "watch": show,
    "report": lambda node: render_html(NodeReports([node]).read(2)),
}


def test_a_status_of_wrong_kinds_is_damaged_or_shown(node: Path) -> None:
    path, snapshot, num_shown = node / "status.json", read_snapshot(node, 9_010.0), 0
    path.write_text(json.dumps(STATUS))
    assert read_status(node) == STATUS, "as it is written"
    for status in wrong_ones(STATUS):
        path.write_text(json.dumps(status))
        try:
            found = read_status_file(path)
        except ValueError:
            continue
        num_shown += 1
        diagnose(replace(snapshot, status=found, runs=bool(num_shown % 2)))
        try:
            whole = read_status(node)
        except ConfigError:
            continue
        status_rows(whole)
        problems(whole, 9_010.0, 300.0, True, node)
    assert num_shown > 50


def test_events_of_wrong_kinds_end_no_reader_and_fill_no_memory(node: Path) -> None:
    lines = [
        json.dumps(wrong)
        for kind in KINDS.values()
        for wrong in wrong_ones(json.loads(json.dumps(to_json(example(kind)))))
    ]
    with (node / "events.jsonl").open("a") as log:
        log.write("\n".join([*lines, "[" * 100_000, '{"kind":' * 50_000, ""]))
    for read in (READERS["why"], READERS["watch"], READERS["report"]):
        read(node)


FILES = ("status.json", NODE_FILE, "worker.toml", "events.jsonl", WARNINGS, "log.txt", "lock", "identity.key")
MORE_FILES = ("pause.json", "compute_dtype.txt", "groups.sqlite", "episodes/newest.json", "updates/1.json")


@pytest.mark.parametrize("name", [*FILES, *MORE_FILES])
def test_no_file_of_a_directory_ends_a_reader_or_is_waited_for(name: str, node: Path) -> None:
    (node / "status.json").write_text(json.dumps(STATUS))
    path = node / name
    path.parent.mkdir(exist_ok=True)
    for content in (b'{"a":[' * 50_000, None):
        path.unlink(missing_ok=True)
        if content is None:
            os.mkfifo(path)
        else:
            path.write_bytes(content)
        for read in (READERS["why"], READERS["watch"], READERS["report"]):
            try:
                read(node)
            except SwarmError as error:
                assert str(node) in str(error)
    with pytest.raises(ConfigError):
        Identity.load(node)


def test_a_store_with_an_endless_query_in_it_ends_after_so_much_work(
    node: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "MAX_LOOKS", 3)
    endless = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 9000000) SELECT x"  # seconds
    with sqlite3.connect(node / "groups.sqlite") as store:
        store.execute(f"CREATE VIEW groups AS {endless} AS sequence, x AS digest, 1 AS is_made_here FROM c WHERE x < 0")
        store.execute("CREATE TABLE bodies (sequence INTEGER, body BLOB)")
    with (
        stores.reading(node / "groups.sqlite") as connection,
        pytest.raises(sqlite3.OperationalError, match="interrupt"),
    ):
        connection.execute("SELECT sequence FROM groups").fetchall()
