"""A node whose worker consists of two processes that share the learner."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from waits import HANG_S, has_ended, until

from node.daemon import Daemon
from node.ranks import STORE_VARIABLE
from swarm.config import (
    DirectoryConfig,
    EnvironmentConfig,
    EvaluationConfig,
    GeneratorConfig,
    LearnerConfig,
    ModelConfig,
    NodeConfig,
    ReplayConfig,
    WeightsConfig,
)
from swarm.errors import ConfigError
from swarm.learn.checkpoint import read_checkpoint
from swarm.learn.learner import PolicyLearner
from swarm.model.network import load_model
from swarm.objectives.methods import load_recipe

MODEL = ModelConfig(source="tiny", dtype="float32")


def node_config(directory: Path, **learner: Any) -> NodeConfig:
    settings: dict[str, Any] = {"num_processes": 2, "learning_rate": 1e-3, "checkpoint_every": 1, **learner}
    return NodeConfig(
        dir=directory,
        run_id="test",
        environments=(EnvironmentConfig(name="reverse", kind="char", dataset="reverse"),),
        model=MODEL,
        generator=GeneratorConfig(group_size=4, groups_per_batch=4, max_new_tokens=6),
        replay=ReplayConfig(local_groups=2, external_groups=0, keep_zero_variance=True),
        learner=LearnerConfig(**settings),
        weights=WeightsConfig(publish=True),
        directory=DirectoryConfig(kind="none"),
        evaluation=EvaluationConfig(num_problems=2, every_steps=1),
    )


@asynccontextmanager
async def running(config: NodeConfig) -> AsyncGenerator[tuple[Daemon, "asyncio.Task[None]"]]:
    async with Daemon(config) as daemon:
        task = asyncio.create_task(daemon.run())
        try:
            yield daemon, task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def ranks() -> dict[int, psutil.Process]:
    """The worker's processes by rank."""
    found: dict[int, psutil.Process] = {}
    for child in psutil.Process().children(recursive=True):
        try:
            if "node.worker" in child.cmdline() and STORE_VARIABLE in (environment := child.environ()):
                found[int(environment["RANK"])] = child
        except psutil.Error:
            continue
    return found


def listening(process: psutil.Process | None) -> set[str]:
    """Addresses that a process takes connections on."""
    assert process is not None
    return {c.laddr.ip for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN}


OTHER_LAUNCHER = {  # as in a pod of a PyTorchJob, or below somebody's torchrun: nothing that concerns the worker
    "RANK": "1",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "3",
    "LOCAL_WORLD_SIZE": "3",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "192.0.2.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "theirs",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "GLOO_SOCKET_IFNAME": "eth0",
    "NCCL_SOCKET_IFNAME": "eth0",
}


@pytest.fixture
def other_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OTHER_LAUNCHER.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("other_launcher")
async def test_a_node_of_two_ranks_learns_outlives_one_of_them_and_leaves_nothing_behind(tmp_path: Path) -> None:
    config = node_config(tmp_path / "node", num_steps=500)
    async with running(config) as (daemon, task):
        await until(lambda: daemon.agent.head.step >= 2, beside=task)
        before = ranks()
        assert sorted(before) == [0, 1]
        ears = listening(before[0]) | listening(before[1]) | listening(before[0].parent())
        assert ears and ears <= {"127.0.0.1", "::1"}  # nothing of it is reached from another machine
        os.kill(before[1].pid, signal.SIGKILL)
        reached = daemon.agent.head.step
        await until(lambda: daemon.status()["restarts"]["worker"] == 1 and has_ended(before[0]), beside=task)
        await until(lambda: daemon.agent.head.step > reached + 2, beside=task)
        after = ranks()
        assert sorted(after) == [0, 1] and {p.pid for p in after.values()}.isdisjoint(p.pid for p in before.values())
        evaluations = daemon.agent.coordinator_view.evaluations
        assert set(evaluations) >= {"reverse/all", "reverse/held_out"}
    _, alive = psutil.wait_procs(list(after.values()), timeout=HANG_S)
    assert not alive
    saved = read_checkpoint(config.dir / "checkpoints")
    alone = PolicyLearner(
        load_model(MODEL).network,
        load_model(MODEL).tokenizer,
        load_recipe(config.learner.recipe),
        config.learner,
        config.replay,
        saved.state["policy_id"],
        config.dir / "checkpoints",
    ).resume()
    assert alone.version.step == saved.step > reached


async def test_what_no_rank_can_work_with_is_said_once(tmp_path: Path) -> None:
    config = node_config(tmp_path / "node")
    wrong = config.model_copy(update={"model": MODEL.model_copy(update={"digest": "0" * 64})})
    async with running(wrong) as (_, task):
        with pytest.raises(ConfigError, match=r"^model\.digest: [^\n]*$"):
            await asyncio.shield(task)


@pytest.mark.sweep
@pytest.mark.usefixtures("other_launcher")
async def test_a_worker_of_one_process_is_no_rank_of_a_launcher_around_it(tmp_path: Path) -> None:
    config = node_config(tmp_path / "node", num_processes=1, num_steps=1)
    async with running(config) as (daemon, task):
        await until(lambda: daemon.agent.head.step == 1 or daemon.status()["restarts"]["worker"] > 0, beside=task)
        assert daemon.status()["restarts"]["worker"] == 0


RECIPE_THAT_FAILS_ONCE = """
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist

from swarm.objectives.part import AggregatePart
from swarm.objectives.methods import load_recipe

class FailsOnce(AggregatePart):
    equation = "L = sum(l)"
    inner: AggregatePart

    def __call__(self, losses, scored):
        failed = Path(__file__).with_name("failed")
        if dist.is_initialized() and dist.get_rank() == 0 and not failed.exists():
            failed.touch()
            raise MemoryError("on the first rank alone")
        return self.inner(losses, scored)

GRPO = load_recipe("grpo")
RECIPE = replace(GRPO, aggregate=FailsOnce(inner=GRPO.aggregate))
"""


@pytest.mark.sweep
async def test_an_exception_in_the_first_ranks_step_ends_all_and_they_start_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.py"
    recipe.write_text(RECIPE_THAT_FAILS_ONCE, encoding="utf-8")
    async with running(node_config(tmp_path / "node", num_steps=2, recipe=f"{recipe}:RECIPE")) as (daemon, task):
        await until((tmp_path / "failed").exists, beside=task)
        before = ranks()
        await until(lambda: daemon.status()["restarts"]["worker"] == 1, beside=task)
        assert all(map(has_ended, before.values()))
        await until(lambda: daemon.agent.head.step == 2, beside=task)
    assert "MemoryError: on the first rank alone" in capfd.readouterr().err
