"""Two nodes of one run that differ in a key: each is told the key, both values and the fix, by `status` and `why`."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from coordinator.daemon import CoordinatorDaemon
from node.daemon import Daemon
from node.join import join_swarm
from swarm.config import CoordinatorConfig, EnvironmentConfig, GeneratorConfig, ModelConfig, NodeConfig, load_config
from swarm.diagnosis import diagnose, read_snapshot
from swarm.errors import ConfigError
from swarm.model.network import load_model
from swarm.types import Role


def run_of(directory: Path) -> CoordinatorConfig:
    node = NodeConfig(
        environments=(EnvironmentConfig(name="sort", kind="char", dataset="sort"),),
        model=ModelConfig(source="tiny", dtype="float32"),
        generator=GeneratorConfig(max_new_tokens=8, group_size=4),
    )
    return CoordinatorConfig(
        dir=directory, run_id="two-sides", listen="127.0.0.1:0", http_listen="127.0.0.1:0", node=node
    )


async def test_both_are_told_the_key_and_the_fix_and_join_warns(tmp_path: Path) -> None:
    said: dict[str, list[str]] = {"ada": [], "bell": []}
    # bell takes nothing in: else whoever refused a dozen groups first ends the streams before the other has seen enough
    sets = {"ada": [], "bell": ["generator.max_new_tokens=12", "exchange.max_neighbours=0"]}
    load_model(ModelConfig(source="tiny", dtype="float32"))  # imports that two nodes in one process must not race for
    quick = ["evaluation.num_problems=1", "exchange.lookup_every_s=0.3", "learner.checkpoint_every=0"]
    async with CoordinatorDaemon(run_of(tmp_path / "coordinator")) as coordinator:
        for name in said:
            await join_swarm(coordinator.link, tmp_path / name, [*quick, *sets[name]], False, said[name].append)
        assert not any(line.startswith("warning") for line in said["ada"])
        (warning,) = [line for line in said["bell"] if line.startswith("warning")]
        assert warning.startswith(
            "warning: generator.max_new_tokens is 12 here and 8 in the run: this node and the others refuse"
        )

        ada, bell = (Daemon(load_config(NodeConfig, tmp_path / name / "node.toml")) for name in said)
        async with ada, bell:
            running = [asyncio.create_task(each.run()) for each in (ada, bell)]
            try:
                while sum(ada.agent.ingest.refusals.values()) < 4:
                    for task in running:
                        assert not task.done(), task.exception()
                    await asyncio.sleep(0.1)
            finally:
                for task in running:
                    task.cancel()
                await asyncio.wait(running)
    found: dict[str, dict[str, Any]] = {}
    for name in said:
        path = tmp_path / name / "status.json"
        status = json.loads(path.read_text())
        found[name] = {each.name: each for each in diagnose(read_snapshot(tmp_path / name, status["at_s"]))}
    bells = found["bell"]["differs_from_run"]
    assert "generator.max_new_tokens is 12 here and 8 in the run" in bells.claim
    assert "put generator.max_new_tokens in " in bells.fix and "join again" in bells.fix
    assert "differs_from_run" not in found["ada"]
    adas = found["ada"]["settings_differ"]
    assert "generator.max_new_tokens must be equal on all nodes" in adas.claim
    assert "max_new_tokens 12 at its maker, 8 here" in adas.claim
    assert f"node {bell.agent.node_id[:8]} has to take" in adas.fix


async def test_a_node_toml_that_differs_is_told_where_it_is_used_again(tmp_path: Path) -> None:
    said: list[str] = []
    async with CoordinatorDaemon(run_of(tmp_path / "coordinator")) as coordinator:
        for overrides in (["generator.temperature=0.7"], []):
            await join_swarm(coordinator.link, tmp_path / "ada", overrides, False, said.append, (Role.RELAY,))
    warnings = [
        line for line in said if line.startswith("warning: generator.temperature is 0.7 here and 1.0 in the run")
    ]
    assert len(warnings) == 2 and "delete it and join again" in warnings[1]


async def test_a_directory_that_was_moved_is_run_where_it_is_and_a_copy_is_refused(tmp_path: Path) -> None:
    said: list[str] = []
    async with CoordinatorDaemon(run_of(tmp_path / "coordinator")) as coordinator:
        await join_swarm(coordinator.link, tmp_path / "ada", [], False, said.append)
        shutil.copytree(tmp_path / "ada", tmp_path / "copy")
        with pytest.raises(ConfigError, match=r"copy/node\.toml: dir is '.*ada', where a node is too.*delete"):
            await join_swarm(coordinator.link, tmp_path / "copy", [], False, said.append)
        shutil.rmtree(tmp_path / "ada")
        await join_swarm(coordinator.link, tmp_path / "copy", [], False, said.append)
        assert any(line.endswith(f"where no node is; it runs in {tmp_path / 'copy'}") for line in said)
    assert not (tmp_path / "ada").exists()


async def test_another_model_is_said_at_join(tmp_path: Path) -> None:
    said: list[str] = []
    async with CoordinatorDaemon(run_of(tmp_path / "coordinator")) as coordinator:
        sets = ["model.source=tiny-agents", 'environments=[{name="mine", kind="char", dataset="sort", seed=4}]']
        await join_swarm(coordinator.link, tmp_path / "ada", sets, False, said.append)
    assert any("model.source is 'tiny-agents' here and 'tiny' in the run" in line for line in said)
    assert not any(line.startswith("warning") for line in said), "an environment that the run does not name is its own"
