"""A node that really trained, through its three windows: `swarm report`, `swarm watch`, `swarm trace`."""

import asyncio
import re
import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from node.train import train
from node.train_options import TrainOptions
from swarm.cli.main import app
from swarm.events import GroupPut, GroupsDrawn, StepMade, events_of
from swarm.telemetry import read_events

RUN = CliRunner()
QUICK = ("evaluation.num_problems=4", "replay.local_groups=2", "generator.groups_per_batch=2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three steps of the tiny model on this machine alone."""
    directory = tmp_path_factory.mktemp("windows") / "letters"
    options = TrainOptions(directory=directory, model="tiny", environments=("char:sort",), steps=3, overrides=QUICK)
    asyncio.run(train(options, lambda _: None))
    return directory


def test_its_report_has_curves_samples_and_invariants_that_hold(trained: Path) -> None:
    done = RUN.invoke(app, ["report", "--dir", str(trained)])
    assert done.exit_code == 0, done.output
    assert "does not run, every step is made; step 3" in done.output and "violated" not in done.output
    page = (trained / "report.html").read_text()
    assert re.search(r"all <a [^>]*>\d+ invariants</a> hold", page) and "nothing was measured" not in page
    assert page.index("Did it learn?") < page.index('id="invariants"') and "held out" in done.stdout.splitlines()[0]
    for title in ("Entropy", "<dt>learning rate</dt>", "Response length", "Responses cut off", "Gradient norm"):
        assert title in page, title
    assert "letters itself" in page and "sort:" in page and re.search(r"<b>reward [\d.]+</b>", page)


def test_its_groups_are_traced_to_the_step_that_learned_from_them(trained: Path) -> None:
    events = read_events(trained / "events.jsonl")
    put = next(put for put in events_of(GroupPut, events))
    assert sum(put.finishes.values()) == 8
    draw = events_of(GroupsDrawn, events)[0]
    made = events_of(StepMade, events)[0]
    done = RUN.invoke(app, ["trace", draw.groups[0].digest[:12], "--dir", str(trained)])
    assert done.exit_code == 0, done.output
    for words in ("made and stored", "rewards by its own verifier", f"learned from: version 1, {made.digest}"):
        assert words in done.output


def test_it_is_watched_at_its_end_and_beside_a_copy(trained: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(trained, copy)
    done = RUN.invoke(app, ["watch", str(trained), str(copy), "--once"])
    assert re.search(r"(?m)^letters finished step 3 reward [\d.]+ held out [\d.]+ \(step 3\) age ", done.output), (
        done.output
    )
    both = RUN.invoke(app, ["report", "--dir", str(trained), "--dir", str(copy), "--out", str(tmp_path / "both.html")])
    assert both.exit_code == 0 and (tmp_path / "both.html").read_text().count("Where the time went") == 1
