"""`swarm why` on the directories of real nodes: the fix that it prints works, and nothing is blamed on healthy ones."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ailing_node import Until, ask, count, make_config, pair, run_nodes, train_alone
from typer.testing import CliRunner

from node.daemon import Daemon
from node.status import problems, read_status
from swarm.cli.main import app
from swarm.config import NodeConfig, load_config
from swarm.diagnosis import Gravity, diagnose, read_snapshot
from swarm.events import Event, StepMade
from swarm.process import lock_directory


def put_in_vain(daemons: list[Daemon], _: list[list[Event]]) -> bool:
    """Until so many own groups gave the learner nothing that it is no chance."""
    return daemons[0].agent.own_groups.since_step.num_put >= 110


def aged_in_vain(daemons: list[Daemon], _: list[list[Event]]) -> bool:
    """Until there were own groups with signal for several steps, and none was made."""
    agent = daemons[0].agent
    return agent.own_groups.since_step.num_with_signal >= max(8, 2 * agent.config.replay.local_groups)


async def test_nothing_is_blamed_on_a_training_that_went_well(tmp_path: Path) -> None:
    directory = await train_alone(tmp_path, lambda *_: False, steps=8)
    result = CliRunner().invoke(app, ["why", str(directory)])
    assert result.exit_code == 0, result.output
    assert "nothing is wrong" in result.output or "no fault is known" in result.output
    assert "--steps 16" in result.output and "held out" in result.stdout.splitlines()[0]
    plain = json.loads(CliRunner().invoke(app, ["why", str(directory), "--json"]).output)
    assert plain["is_healthy"] is not False and [each["name"] for each in plain["findings"]] == ["finished"]
    groups = read_snapshot(directory, time.time()).answers
    pairs = [pair for each in groups for pair in zip(each.is_right, each.rewards, strict=True)]
    assert {reward for is_right, reward in pairs if is_right} == {1.0}, "right answers of the file are known as such"
    assert all(0.1 < each.nats < 2.5 for each in groups), "what tokens were drawn from"


async def test_nothing_is_blamed_on_a_node_that_starts_or_runs(tmp_path: Path) -> None:
    config = make_config(tmp_path, learner={"learning_rate": 1e-4})
    seen: list[list[str]] = []

    def look(until: Callable[[list[Daemon], list[list[Event]]], bool]) -> Callable[..., bool]:
        def looked(daemons: list[Daemon], events: list[list[Event]]) -> bool:
            snapshot = read_snapshot(config.dir, time.time())
            seen.append([found.claim for found in diagnose(snapshot) if found.gravity is not Gravity.NOTE])
            return until(daemons, events)

        return looked

    await run_nodes([config], look(count(StepMade, 5)))
    assert len(seen) > 3 and not any(seen), seen


def test_a_node_that_has_written_nothing_yet_is_said_to_start(tmp_path: Path) -> None:
    held = lock_directory(tmp_path)
    (tmp_path / "node.toml").write_text("")
    try:
        result = CliRunner().invoke(app, ["why", str(tmp_path)])
    finally:
        os.close(held)
    assert result.exit_code == 0 and "is starting" in result.output


@pytest.mark.sweep
async def test_the_command_that_it_prints_ends_the_ailment(tmp_path: Path) -> None:
    """Answers are cut off; the line that is printed goes into node.toml, and steps are made."""
    directory = await train_alone(tmp_path, put_in_vain, max_new_tokens=2)
    (found, *_) = ask(directory, runs=False)
    assert found.name == "cut_off" and "under [generator] set max_new_tokens = 8" in found.fix
    path = directory / "node.toml"
    text = path.read_text().replace("max_new_tokens = 2\n", "max_new_tokens = 8\n")
    path.write_text(text)
    config = load_config(NodeConfig, path)
    await run_nodes([config], count(StepMade, 3))
    assert ask(directory, runs=True) == [], "healed"


@pytest.mark.parametrize(
    ("expected", "body", "overrides", "until"),
    [
        (
            "ended_with_error",
            "return 1.0 if answer == reference or len(answer) < 3 else {}[answer]",
            (),
            lambda *_: False,
        ),
        ("reference_worth_nothing", "return 0.5", (), put_in_vain),
        ("replay.max_age_s", "", ("replay.max_age_s=1e-6",), aged_in_vain),
    ],
)
async def test_an_ailment_of_a_real_training_is_named(
    tmp_path: Path, expected: str, body: str, overrides: tuple[str, ...], until: Until
) -> None:
    directory = await train_alone(tmp_path, until, *overrides, body=body)
    (found, *_) = ask(directory, runs=True)
    assert expected in (found.name, found.key), found


async def test_nodes_that_sample_otherwise_name_the_key_that_differs(tmp_path: Path) -> None:
    configs = pair(tmp_path, {"generator": {"temperature": 0.7}})
    await run_nodes(configs, lambda daemons, _: sum(daemons[1].status()["refusals"].values()) >= 8)
    (found, *_) = ask(configs[1].dir, runs=True)
    assert found.name == "settings_differ" and "generator.temperature" in found.claim


async def test_a_status_alone_tells_that_groups_came_in_vain(tmp_path: Path) -> None:
    directory = await train_alone(tmp_path, put_in_vain, body="return 0.5")
    status = read_status(directory)
    shutil.copy(directory / "status.json", tmp_path)  # no events, no configuration
    (problem,) = problems(status, status["at_s"], 300.0, True, tmp_path)
    assert problem.startswith("waits for own groups: ") and problem.endswith(" generated, 0 with differing rewards")


async def test_a_stopped_node_had_the_relays_of_its_last_moment(tmp_path: Path) -> None:
    configs = pair(tmp_path, {"exchange": {"reach": "outward"}})
    await run_nodes(configs, lambda daemons, _: bool(daemons[1].status()["reach"]["relays"]))
    assert read_snapshot(configs[1].dir, time.time()).value("reach", {})["relays"], "none is left when it has stopped"
