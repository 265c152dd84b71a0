"""kill -9 of an agent in the middle of its run, and of the node between call, reward and group."""

import asyncio
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waits import until

from node.daemon import write_config
from swarm.clock import SystemClock
from swarm.config.generation_config import ServeConfig, ServeKey
from swarm.events import GroupPut, GroupsDrawn, StepMade, events_of
from swarm.exchange.group_store import SqliteGroupStore
from swarm.simulate.local.processes import Process
from swarm.trained.samples import SampleReader
from tests.worlds.api_client import ApiClient

pytestmark = pytest.mark.asyncio(loop_scope="session")

ASKED = {"messages": [{"role": "user", "content": "sort:cab="}], "max_tokens": 8}
AGENT = """
import http.client, json, sys, time
port, key, asked = int(sys.argv[1]), sys.argv[2], sys.argv[3]
for number in (1, 2):
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/v1/chat/completions", asked, {"Authorization": "Bearer " + key})
    if number == 1:
        assert connection.getresponse().status == 200
print("in its second call", flush=True)
time.sleep(3600)
"""


class Node:
    """A tiny node that learns from runs alone, in groups of two."""

    def __init__(self, swarm: Any) -> None:
        (config,) = swarm.configs(1)
        self.config = config.model_copy(
            update={
                "directory": config.directory.model_copy(update={"kind": "none"}),
                "environments": (),
                "evaluation": config.evaluation.model_copy(update={"env": ""}),
                "generator": config.generator.model_copy(update={"group_size": 2, "env_weights": {}}),
                "replay": config.replay.model_copy(update={"local_groups": 1, "external_groups": 0}),
                "serve": ServeConfig(listen="127.0.0.1:0", keys=(ServeKey(name="agents", learn=True),)),
            }
        )
        self.process: Process = swarm.process(config.name, config.dir)

    async def start(self) -> None:
        """Starts the node, also again, until it answers."""
        self.config.dir.mkdir(parents=True, exist_ok=True)
        write_config(self.config, self.config.dir / "node.toml")
        log = self.config.dir / "log.txt"

        def ports() -> list[str]:
            return re.findall(r"url=\S+:(\d+)/v1", log.read_text()) if log.exists() else []

        num_served = len(ports())
        await self.process.start(["node.cli", "start", "--config", str(self.config.dir / "node.toml")])
        await until(lambda: len(ports()) > num_served, "its port", processes=[self.process])
        key = (self.config.dir / "api-agents.key").read_text()
        self.api = ApiClient(int(ports()[-1]), key)

    async def kill(self) -> None:
        """kill -9 of agent and worker, then another start."""
        self.process.send(signal.SIGKILL)
        await until(lambda: not self.process.is_alive, "its end")
        await self.start()

    async def ask(self, path: str, body: object = None, **options: Any) -> dict[str, Any]:
        """The reply, which is no refusal."""
        status, reply = await asyncio.to_thread(self.api.ask, path, body, **options)
        assert status == 200, reply
        return reply

    async def run(self, name: str, reward: float | None = None) -> dict[str, Any]:
        """State of a run, after its reward if there is one."""
        path = f"/v1/episodes/{name}"
        return await self.ask(path) if reward is None else await self.ask(f"{path}/reward", {"reward": reward})


async def test_what_was_acknowledged_outlives_kills_and_is_learned_from_once(swarm: Any) -> None:
    node = Node(swarm)
    await node.start()
    opened = await node.ask("/v1/episodes", {"id": "one", "task": "t"})
    command = [sys.executable, "-c", AGENT, str(node.api.port), opened["key"], json.dumps(ASKED)]
    agent = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    assert agent.stdout is not None
    assert await agent.stdout.readline() == b"in its second call\n"
    agent.kill()
    await agent.wait()
    state = await node.run("one")
    assert state["state"] == "open" and state["num_calls"] >= 1
    await node.kill()  # between a call and its reward
    assert (await node.run("one"))["num_calls"] >= state["num_calls"]
    await node.ask("/v1/chat/completions", ASKED, key=opened["key"])
    told = await node.run("one", 1.0)
    assert told["state"] == "waiting" and told["num_calls"] >= 2
    await node.kill()  # between a reward and the group
    assert (await node.run("one"))["rewards"] == {"outcome": 1.0}
    for name in ("two", "half"):
        await node.ask("/v1/chat/completions", ASKED, headers={"X-Episode": name, "X-Task": "t"})
    assert (await node.run("two", 0.0))["state"] in ("closed", "learned")
    await node.kill()  # between the group and its step

    def steps() -> list[StepMade]:
        node.process.read_events()
        return events_of(StepMade, node.process.events)

    await until(lambda: bool(steps()), "a step", processes=[node.process])
    assert [(await node.run(name))["state"] for name in ("one", "two", "half")] == ["learned", "learned", "open"]
    await node.kill()
    assert (await node.run("half", 1.0))["group"]["runs"] == 1  # with nobody of the group before
    await swarm.stop()
    groups = await groups_in(node.config.dir)
    assert [(each.group.env, each.rewards.tolist()) for each in groups] == [("agent-runs", [1.0, 0.0])]
    assert [len(each.group.rollouts[0].actions) for each in groups] == [told["num_calls"]]
    (shown,) = await asyncio.to_thread(SampleReader(node.config.dir).newest, 3)
    assert [each.reward for each in shown.samples] == [1.0, 0.0] and shown.messages[0].content
    assert np.isfinite([step.loss for step in steps()]).all()
    drawn = [
        (draw.draw_step, use.digest) for draw in events_of(GroupsDrawn, node.process.events) for use in draw.groups
    ]
    assert len(set(drawn)) == 1, "the same draw, if a kill made its step again"
    assert len({put.digest for put in events_of(GroupPut, node.process.events)}) == 1
    assert {step.step for step in steps()} == {1}


async def groups_in(directory: Path) -> list[Any]:
    store = await SqliteGroupStore.open(directory / "groups.sqlite", SystemClock(), 2**30)
    try:
        return await store.load_scored(100)
    finally:
        await store.close()
