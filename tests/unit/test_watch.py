"""`swarm watch`: what nodes do, while they do it."""

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from logged_events import ADA, BELL, make, write_events
from rich.console import Console
from typer.testing import CliRunner
from waits import HANG_S

from swarm.cli.main import app
from swarm.errors import ConfigError
from swarm.events import (
    Event,
    GroupAdmitted,
    GroupPut,
    GroupRefused,
    GroupsDrawn,
    GroupUse,
    NodeStarted,
    PolicyEvaluated,
    StepMade,
)
from swarm.process import LOCK
from swarm.report.live import NodeProgress
from swarm.report.tally import NodeTally
from swarm.report.watch import LINE_EVERY_S, POLL_S, WatchedNode, watch_nodes

NOW_S = 1_700_000_000.0


def uses(count: int, producer: str) -> tuple[GroupUse, ...]:
    return (make(GroupUse, producer=producer, policy_id=producer, age_steps=2, is_own_policy=producer == ADA),) * count


COURSE: list[Event] = [
    NodeStarted(node_id=ADA),
    *(make(GroupPut, num_tokens=40) for _ in range(2)),
    make(GroupAdmitted, producer=BELL, policy_id=BELL, via=BELL),
    GroupRefused(reason="too_old", producer=BELL),
    make(PolicyEvaluated, step=4, split="held_out", accuracy=0.25),
    make(PolicyEvaluated, step=4, accuracy=0.9),
    make(GroupsDrawn, draw_step=5, groups=(*uses(3, ADA), *uses(1, BELL))),
    make(
        StepMade,
        step=5,
        draw_step=5,
        diagnostics={"reward_mean": 0.75, "ess_share": 0.5},
        ages_steps=(2, 2, 2, 2),
        num_local=3,
        num_external=1,
    ),
]


def write_log(directory: Path, events: Sequence[Event]) -> None:
    write_events(directory / "events.jsonl", events, NOW_S, every_s=2.0)


def write_status(directory: Path, **changes: Any) -> None:
    status = {"node_id": ADA, "name": "ada", "at_s": NOW_S, "last_step_at_s": NOW_S, "pid": 1, "step": 5}
    (directory / "status.json").write_text(json.dumps({**status, "num_failures": 0, "advice": "ok"} | changes))


def scenes(*between: Callable[[], object]) -> Callable[[float], bool]:
    """Waits that do what happens meanwhile, and end after the last one."""
    left = list(between)

    def wait(seconds: float) -> bool:
        assert seconds in (LINE_EVERY_S, POLL_S)
        if left:
            left.pop(0)()
            return True
        return False

    return wait


def lines_of(directory: Path, *between: Callable[[], object]) -> list[str]:
    out = io.StringIO()
    watch_nodes([WatchedNode(directory)], Console(file=out, width=300), scenes(*between), lambda: NOW_S)
    return out.getvalue().splitlines()


@pytest.fixture
def held(tmp_path: Path) -> Path:
    """A directory that a process holds until the test is over."""
    directory = tmp_path / "ada"
    directory.mkdir()
    return directory


def test_a_node_is_seen_before_it_starts_while_it_runs_and_after_it(tmp_path: Path) -> None:
    directory = tmp_path / "ada"
    lock: list[int] = []

    def start() -> None:
        directory.mkdir()
        lock.append(os.open(directory / LOCK, os.O_CREAT | os.O_RDWR))
        fcntl.flock(lock[0], fcntl.LOCK_EX)

    def learn() -> None:
        write_log(directory, COURSE)
        write_status(directory)

    found = lines_of(directory, start, learn, lambda: None, lambda: os.close(lock[0]))
    assert found[0] == ("ada not started step 0 reward - held out - age - - tok/s own/others 0/0 refused 0")
    assert found[1].startswith("ada starting step 0")
    assert found.pop(2).startswith("ada: not known whether it learned: held out 0.25 of ")
    assert found[2] == (
        "ada learning step 5 reward .75 held out .25 (step 4) age 2.0 20 tok/s own/others 3/1 refused 1"
    )
    assert found[3] == found[2], "no event is counted twice"
    assert found[4].startswith("ada does not run step 5") and "problem: the node does not run" in found[4]
    assert "- tok/s" in found[4], "one that stands still has no speed"


def test_a_node_that_made_every_step_has_no_problem(held: Path) -> None:
    write_status(held, is_finished=True)
    assert lines_of(held) == ["ada finished step 5 reward - held out - age - - tok/s own/others 0/0 refused 0"]


def test_a_node_that_only_generates_shows_what_its_groups_are_worth(held: Path) -> None:
    write_log(held, COURSE[:3])
    assert lines_of(held)[0].startswith("ada not started step 0 reward .50 held out -")


def test_a_terminal_shows_who_brings_what_and_is_drawn_again_when_something_changed(held: Path) -> None:
    write_log(held, COURSE[:1])
    write_status(held)
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=True, color_system=None)
    seen: list[int] = []

    def note() -> None:
        seen.append(len(out.getvalue()))

    waits = scenes(note, note, lambda: (note(), write_log(held, COURSE[1:])), note)
    watch_nodes([WatchedNode(held)], console, waits, lambda: NOW_S)
    text = out.getvalue()
    assert seen[0] == seen[1] == seen[2] < seen[3], "nothing is drawn while nothing changes"
    assert "ada: not known whether it learned: held out 0.25 of " in text
    assert "ada draws groups of: ada 3 (75%), bbbbbbbb 1 (25%)" in text
    assert "ada got groups of: bbbbbbbb 1 (100%)" in text and "ada refused: too_old 1 (100%)" in text
    assert "the node does not run" in text


def test_names_and_reasons_cannot_move_the_cursor(held: Path) -> None:
    write_log(held, [GroupRefused(reason="\x1b[2J\u202ereason\n\x07", producer=BELL)])
    write_status(held, name="a\x1b]0;x\x07\nda")
    for is_terminal in (False, True):
        out = io.StringIO()
        console = Console(file=out, width=120, force_terminal=is_terminal, color_system=None)
        watch_nodes([WatchedNode(held)], console, scenes(), lambda: NOW_S)
        text = out.getvalue()
        assert "\x1b[2J" not in text and "\x1b]0" not in text and "\x07" not in text and "\u202e" not in text
        assert "\\x1b]0;x" in text, "spelled out"


def test_a_file_is_no_node(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        WatchedNode(tmp_path / "file")
    done = CliRunner().invoke(app, ["watch", str(tmp_path / "nowhere"), str(tmp_path), "--once"])
    assert done.exit_code == 0 and done.stdout.startswith("nowhere not started")


def test_ctrl_c_ends_it_without_a_word(held: Path) -> None:
    command = [sys.executable, "-m", "swarm.cli.main", "watch", str(held)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline().startswith("ada not started")
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=HANG_S) == 0
        assert process.stderr.read() == ""


def test_a_look_at_a_directory_that_is_not_there_fails(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["watch", str(tmp_path / "nobody"), "--once"])
    assert result.exit_code == 2 and "no such directory" in " ".join(result.stderr.split())


def test_groups_learned_from_are_counted_as_in_the_report() -> None:
    draw, step = COURSE[-2:]
    assert isinstance(draw, GroupsDrawn) and isinstance(step, StepMade)
    course = [
        draw,
        step,
        draw,  # after a restart: made again
        step,
        replace(draw, draw_step=6),
        replace(step, draw_step=6, step=5, was_skipped=True),
        replace(draw, draw_step=7),
        replace(step, draw_step=7, num_external=0, diagnostics={"guard_groups_left_out": 1.0}),
        replace(draw, draw_step=8),  # under way
    ]
    progress, tally = NodeProgress(), NodeTally()
    for event in course:
        progress.update(event)
        tally.add(event)
    result = tally.result("ada", ADA)
    assert (progress.num_local, progress.num_external) == (result.num_local, result.num_external) == (9, 2)
