"""Two nodes as processes: they find each other and learn from each other's groups."""

import asyncio
import json
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from swarm.events import GroupPut, GroupsDrawn, NodeFinished, StepMade, events_of
from swarm.identity import Identity
from swarm.simulate.command import judge
from swarm.simulate.local.fork_child import STARTED_A_THREAD
from swarm.simulate.local.processes import Process
from swarm.simulate.local.run import run_swarm
from swarm.simulate.presets import SimulationOptions

pytestmark = pytest.mark.asyncio(loop_scope="session")


def external(process: Process) -> list[str]:
    """Digests of other nodes' groups that a node learned from so far."""
    process.read_events()
    draws = events_of(GroupsDrawn, process.events)
    return [group.digest for draw in draws for group in draw.groups if not group.is_own_policy]


def made(process: Process) -> set[str]:
    """Digests of the groups that a node made so far."""
    process.read_events()
    return {put.digest for put in events_of(GroupPut, process.events)}


async def test_two_nodes_exchange_groups_and_every_invariant_holds(tmp_path: Path) -> None:
    # 80 steps of 20 ms: twelve were over before the second look into the directory
    options = SimulationOptions(preset="tiny", nodes=2, rounds=80, overrides=("evaluation.num_problems=2",))
    run = await run_swarm(options, tmp_path, lambda name, event: None, lambda activities: None)
    verdicts = judge([run]).verdicts()
    assert len(verdicts) == 9
    assert [verdict for verdict in verdicts if not verdict.holds] == []
    if sys.platform == "linux":
        assert STARTED_A_THREAD not in (tmp_path / "imports.txt").read_text(), "nodes start as slowly as alone"
    for node in run.nodes:
        used = [g for draw in events_of(GroupsDrawn, node.events) for g in draw.groups if not g.is_own_policy]
        assert used, f"{node.name} learned from no external group"
        assert node.status["step"] == 80 and node.status["is_finished"]
        assert len(events_of(NodeFinished, node.events)) == 1


async def test_two_nodes_without_a_coordinator_find_each_other_through_the_dht(swarm: Any) -> None:
    ada_config, bell_config = swarm.configs(2)
    ada = await swarm.node(ada_config)
    bell = await swarm.node(bell_config, bootstrap=tuple(ada.status()["dht"]))
    await swarm.until(lambda: bool(external(ada) and external(bell)), "no node consumed an external group")
    assert set(external(ada)) <= made(bell)
    assert set(external(bell)) <= made(ada)
    bell_id = bell.status()["node_id"]
    await swarm.until(lambda: ada.status()["peers"] == [bell_id], "ada's status never named bell alone")


async def test_a_newcomer_joins_by_link_and_is_refused_by_a_wrong_one(swarm: Any, command: Any, tmp_path: Path) -> None:
    (ada_config,) = swarm.configs(1)
    info = await swarm.coordinator(ada_config)
    ada, _ = await asyncio.gather(
        swarm.node(ada_config, info=info), _is_refused_with_a_wrong_link(info, command, tmp_path)
    )
    home = tmp_path / "elsewhere" / "bob"
    home.mkdir(parents=True)
    bob = swarm.process("bob", home)
    fast = ["--set", "exchange.lookup_every_s=0.5", "--set", "evaluation.num_problems=2"]
    await bob.start(["swarm.cli.main", "join", info["link"], "--dir", str(home), *fast])
    await swarm.until(lambda: bool(external(ada) and external(bob)), "ada and bob did not consume each other's groups")
    assert set(external(ada)) <= made(bob)
    assert set(external(bob)) <= made(ada)
    assert Identity.load(home / "identity.key").node_id not in ("", ada.status()["node_id"], info["fingerprint"])

    code, out, _ = await command("swarm.cli.main", "status", "--dir", home, "--json")
    assert (code, json.loads(out)["problems"]) == (0, [])
    bob.send(signal.SIGKILL)
    await bob.stop()
    code, out, _ = await command("swarm.cli.main", "status", "--dir", home, "--json")
    assert code == 1
    assert "does not run" in json.loads(out)["problems"][0]  # of a file that became old it would say: it hangs


async def _is_refused_with_a_wrong_link(info: Any, command: Any, tmp_path: Path) -> None:
    """A link with another fingerprint writes nothing and ends with exit code 2; the right one writes."""
    wrong = info["link"].rpartition("#")[0] + "#" + Identity.create().node_id
    code, out, err = await command("swarm.cli.main", "join", wrong, "--dir", tmp_path / "carol", "--only-write")
    assert code == 2, out + err
    assert "fingerprint" in err or "another key" in err
    assert "Traceback" not in out + err
    assert not (tmp_path / "carol" / "node.toml").exists()
    code, out, err = await command("swarm.cli.main", "join", info["link"], "--dir", tmp_path / "carol", "--only-write")
    assert code == 0, out + err
    assert (tmp_path / "carol" / "node.toml").exists()


async def test_who_joins_to_generate_makes_groups_for_a_trainer_that_joined_to_publish(
    swarm: Any, command: Any
) -> None:
    info = await swarm.coordinator(swarm.configs(1)[0])
    fast = ["--set", "exchange.lookup_every_s=0.5", "--set", "evaluation.num_problems=2"]
    homes = {name: swarm.directory / name for name in ("plain", "trainer", "generator")}
    # steps of 20 ms: with the bound of 4 a group from elsewhere is in time by luck only
    publish = ["--set", "weights.publish=true", "--set", "replay.max_age_steps=40"]
    asked = {"plain": [], "trainer": publish, "generator": ["--generate"]}
    for name, home in homes.items():
        home.mkdir()
        process = swarm.process(name, home)
        await process.start(["swarm.cli.main", "join", info["link"], "--dir", str(home), *asked[name], *fast])
    generator, trainer = swarm.processes["generator"], swarm.processes["trainer"]

    def is_generated_for() -> bool:
        return any(step.num_from_followers for step in events_of(StepMade, trainer.read_events()))

    await swarm.until(is_generated_for, "nobody generated for the trainer")
    assert generator.status()["following"]["policy"] == trainer.status()["node_id"]
    code, out, _ = await command("swarm.cli.main", "status", "--dir", homes["generator"], "--json")
    assert (code, json.loads(out)["problems"]) == (0, [])
