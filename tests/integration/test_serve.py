"""A policy that is served by the node that trains it, and what `swarm serve` makes of a node's directory."""

import asyncio
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from waits import HANG_S, until

import swarm
from node.daemon import Daemon
from swarm.config import NodeConfig
from swarm.errors import ConfigError
from swarm.events import Event, StepMade
from swarm.generation.transformers_engine import TransformersGenerator
from swarm.identity import Identity
from swarm.model.network import tiny_network
from swarm.model.tokenizer import CharTokenizer
from swarm.serving.served_policy import KEY_FILE, read_or_make_key, serve
from swarm.simulate.presets import SimulationOptions, node_configs
from swarm.testing.trained_node import make_trained_node
from swarm.types import PolicyVersion
from tests.worlds.api_client import ApiClient

KEY = "a-key-for-serving"


def ask(port: int, key: str, path: str = "/v1/chat/completions") -> tuple[int, dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": "sort:cab="}], "max_tokens": 4, "temperature": 0}
    return ApiClient(port, key).ask(path, body if "chat" in path else None)


async def test_a_node_serves_its_policy_while_it_trains_and_each_answer_names_its_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="swarm.serving")
    (config,) = node_configs(SimulationOptions(preset="tiny", nodes=1, rounds=10_000, seed=3), tmp_path)
    config = config.model_copy(
        update={
            "directory": config.directory.model_copy(update={"kind": "none"}),
            "worker": "inline",
            "serve": config.serve.model_copy(update={"listen": "127.0.0.1:0"}),
        }
    )
    steps: asyncio.Queue[int] = asyncio.Queue()

    def count(event: Event) -> None:
        if isinstance(event, StepMade):
            steps.put_nowait(event.step)

    async with Daemon(config, count) as it:
        running = asyncio.create_task(it.run())
        await steps.get()
        (url,) = {record.__dict__["url"] for record in caplog.records if record.message == "policy served"}
        port, key = int(url.split(":")[2].removesuffix("/v1")), (config.dir / KEY_FILE).read_text()
        status, first = await asyncio.to_thread(ask, port, key)
        node_id = Identity.load(config.dir / "identity.key").node_id
        assert status == 200 and first["choices"][0]["policy_versions"][0]["policy_id"] == node_id
        step, later = int(first["system_fingerprint"].split("-")[1]), first  # step of the weights at its end
        assert first["choices"][0]["policy_versions"][0]["step"] <= step
        # some steps are made from what was generated before the engine takes new weights
        while later["choices"][0]["policy_versions"][0]["step"] <= step:
            await steps.get()
            _, later = await asyncio.to_thread(ask, port, key)
        assert later["system_fingerprint"] != first["system_fingerprint"]
        assert (await asyncio.to_thread(ask, port, "not-the-right-key"))[0] == 401
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    with pytest.raises(OSError):
        ask(port, key)


def test_swarm_serve_answers_with_a_checkpoint_until_ctrl_c(tmp_path: Path) -> None:
    make_trained_node(tmp_path / "node")
    command = [sys.executable, "-m", "swarm.cli.main", "serve", str(tmp_path / "node"), "--listen", "127.0.0.1:0"]
    environment = {**os.environ, "SWARM_API_KEY": KEY}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        assert process.stdout is not None
        said = ""  # a slow machine says first what it loads
        while "http" not in said and (line := process.stdout.readline()):
            said += line
        found = re.search(r"http://127\.0\.0\.1:(\d+)/v1 OPENAI_API_KEY=(\S+)", said)
        assert found is not None and found.group(2) == KEY and "model node, step 0" in said, said
        status, models = ask(int(found.group(1)), KEY, "/v1/models")
        assert status == 200 and models["data"][0]["id"] == "node"
        status, reply = ask(int(found.group(1)), KEY)
        assert status == 200 and reply["choices"][0]["finish_reason"] in ("stop", "length")
    finally:
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=HANG_S)
    assert process.returncode == 0 and "Traceback" not in rest


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"roles": ["trainer"], "weights": {"publish": True}}, "needs the generator role"),
        ({"engine": {"kind": "vllm"}}, 'engine.kind = "transformers"'),
    ],
)
def test_what_has_no_engine_here_cannot_be_served(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        NodeConfig.model_validate({"serve": {"listen": "127.0.0.1:0"}, **changes})


@pytest.mark.parametrize("listen", ["8300", ":8300", "127.0.0.1:", "127.0.0.1:http", "127.0.0.1:70000"])
def test_an_address_that_is_none_is_named(listen: str) -> None:
    tokenizer = CharTokenizer()
    engine = TransformersGenerator(tiny_network(), tokenizer, PolicyVersion(policy_id="a", step=0), 0)
    with pytest.raises(ConfigError, match="expected host:port"):
        serve(engine, tokenizer, name="a", source="a", context_tokens=128, listen=listen, key=KEY)


def test_a_key_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    key = read_or_make_key(tmp_path)
    assert read_or_make_key(tmp_path) == key and len(key) >= 32
    assert (tmp_path / KEY_FILE).stat().st_mode & 0o777 == 0o600
    (tmp_path / KEY_FILE).write_text("short\n")
    with pytest.raises(ConfigError, match="at least 16 ASCII characters"):
        read_or_make_key(tmp_path)


async def test_a_node_without_questions_of_its_own_learns_from_what_agents_did_and_serves_the_result(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="swarm.serving")
    config = NodeConfig.model_validate(
        {
            "dir": tmp_path / "node",
            "worker": "inline",
            "directory": {"kind": "none"},
            "model": {"source": "tiny", "dtype": "float32"},
            "serve": {"listen": "127.0.0.1:0", "keys": [{"name": "agents", "learn": True}]},
            "generator": {"group_size": 2, "max_new_tokens": 4},
            "replay": {"local_groups": 2, "external_groups": 0},
        }
    )
    steps: asyncio.Queue[StepMade] = asyncio.Queue()

    def count(event: Event) -> None:
        if isinstance(event, StepMade):
            steps.put_nowait(event)

    async with Daemon(config, count) as it:
        running = asyncio.create_task(it.run())
        await until(lambda: any(record.message == "policy served" for record in caplog.records))
        (url,) = {record.__dict__["url"] for record in caplog.records if record.message == "policy served"}
        key = (config.dir / "api-agents.key").read_text()
        messages = [{"role": "user", "content": "sort:cab="}]

        def run_agent(task: str, reward: float) -> tuple[dict[str, Any], dict[str, Any]]:
            with swarm.agent_run(url, key, task) as run:
                reply = post(url, "/chat/completions", run.key, {"messages": messages, "max_tokens": 4})
                told = run.reward(reward)
            return reply, told

        for number in range(4):
            _, told = await asyncio.to_thread(run_agent, f"task{number // 2}", number % 2)
            assert told["state"] == ("closed" if number % 2 else "waiting")
        with pytest.raises(ConfigError, match="this key is not learned from"):
            await asyncio.to_thread(swarm.agent_run(url, (config.dir / KEY_FILE).read_text()).__enter__)
        made = await steps.get()
        assert made.num_local == 2 and not made.was_skipped
        version: dict[str, Any] = {"step": 0}
        while version["step"] < 1:  # the engine takes the new weights once the step was reported
            reply, _ = await asyncio.to_thread(run_agent, "later", 1)
            (version,) = reply["choices"][0]["policy_versions"]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def post(url: str, path: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
    """The reply to a request that is answered."""
    port, _, base = url.removeprefix("http://127.0.0.1:").partition("/")
    status, reply = ApiClient(int(port), key).ask(f"/{base}{path}", body)
    assert status == 200, reply
    return reply
