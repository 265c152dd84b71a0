"""An unchanged agent that trains SmolLM2 by its own runs: held-out success before and after, rewards given late.

    build/agents-env/bin/python -m benchmarks.agent_runs --seed 0     # the environment of .ci/run's stage of agents

The agent is LangGraph's `create_react_agent` without tools, its prompts have 28 tokens. The task is the sum of two
digits, a quarter of which are held out: an answer is right if its last number is the sum. Each run is rewarded
`--late-s` after its answer. Prints one line of JSON.
"""

import argparse
import asyncio
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import swarm
from swarm.environments.environment import is_held_out
from swarm.errors import SwarmError

PAIRS = [(a, b) for a in range(1, 10) for b in range(1, 10)]
AT_ONCE = 32  # runs
ANSWER_TOKENS = 12
INSTRUCTIONS = "Answer with the number only."


def question(a: int, b: int) -> str:
    """A question, which decides by its hash if it is held out."""
    return f"What is {a} + {b}?"


def is_right(answer: str, pair: tuple[int, int]) -> bool:
    """True if the last number of an answer is the sum."""
    numbers = re.findall(r"\d+", answer)
    return bool(numbers) and numbers[-1] == str(sum(pair))


def write_config(directory: Path, seed: int, steps: int, port: int) -> Path:
    """node.toml of a node that learns from runs alone."""
    path = directory / "node.toml"
    path.write_text(
        f"""
dir = "{directory}"
seed = {seed}
[model]
source = "smollm2"
[directory]
kind = "none"
[serve]
listen = "127.0.0.1:{port}"
group_s = 120
[[serve.keys]]
name = "agents"
learn = true
[generator]
group_size = 8
max_new_tokens = {ANSWER_TOKENS}
max_episode_tokens = 512
[engine]
max_rows = 32
[replay]
local_groups = 4
external_groups = 0
max_age_steps = 24
[learner]
num_steps = {steps}
at_end = "serve"
learning_rate = 2e-5
"""
    )
    return path


async def main(arguments: argparse.Namespace, directory: Path, node: "subprocess.Popen[bytes]") -> None:
    """Measures, lets agents run, measures again."""
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    url = f"http://127.0.0.1:{arguments.port}/v1"

    async def ask(key: str, pair: tuple[int, int], **settings: Any) -> str:
        model: Any = ChatOpenAI(model="policy", base_url=url, api_key=key, **settings)
        agent: Any = create_react_agent(model, [], prompt=INSTRUCTIONS)
        made = await agent.ainvoke({"messages": [("user", question(*pair))]})
        return str(made["messages"][-1].content)

    async def success(pairs: list[tuple[int, int]]) -> float:
        main_key = (directory / "api.key").read_text()
        answers = await asyncio.gather(
            *(ask(main_key, pair, temperature=0, max_tokens=ANSWER_TOKENS) for pair in pairs)
        )
        return sum(map(is_right, answers, pairs)) / len(pairs)

    states: dict[str, int] = {}

    async def one(pair: tuple[int, int], task: str, late: asyncio.TaskGroup) -> None:
        manager = swarm.agent_run(url, (directory / "api-agents.key").read_text(), task)
        run = await asyncio.to_thread(manager.__enter__)
        value = float(is_right(await ask(run.key, pair), pair))
        late.create_task(reward(run, value))

    async def reward(run: swarm.AgentRun, value: float) -> None:
        await asyncio.sleep(arguments.late_s)
        try:
            told = await asyncio.to_thread(run.reward, value)
            states[told["state"]] = states.get(told["state"], 0) + 1
        except SwarmError as error:
            print(error, file=sys.stderr)

    while not await asyncio.to_thread(is_served, url, directory):
        assert node.poll() is None, f"the node ended: {directory}/log.txt"
        await asyncio.sleep(1)
    held_out = [pair for pair in PAIRS if is_held_out(question(*pair))]
    trained = [pair for pair in PAIRS if pair not in held_out]
    before, began_s = await success(held_out), time.monotonic()
    print(json.dumps({"held_out": len(held_out), "before": before}), file=sys.stderr)
    source, number = random.Random(arguments.seed), 0
    async with asyncio.TaskGroup() as late:
        while step(url, directory) < arguments.steps and time.monotonic() - began_s < arguments.minutes * 60:
            pairs = [source.choice(trained) for _ in range(AT_ONCE // 8)]
            runs = [one(p, f"{number + i}: {question(*p)}", late) for i, p in enumerate(pairs) for _ in range(8)]
            await asyncio.gather(*runs)
            number += len(pairs)
    minutes = (time.monotonic() - began_s) / 60
    after, made = await success(held_out), step(url, directory)
    row = {"seed": arguments.seed, "held_out": len(held_out), "before": before, "after": after, "steps": made}
    print(json.dumps(row | {"groups": number, "minutes": round(minutes, 1), "states": states}))


def is_served(url: str, directory: Path) -> bool:
    """True once the node answers."""
    try:
        return step(url, directory) >= 0
    except OSError:
        return False


def step(url: str, directory: Path) -> int:
    """Step of the served policy."""
    import urllib.request

    headers = {"Authorization": f"Bearer {(directory / 'api.key').read_text()}"}
    with urllib.request.urlopen(urllib.request.Request(f"{url}/models", headers=headers), timeout=60) as reply:
        return int(json.loads(reply.read())["data"][0]["policy_version"]["step"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40, help="most optimizer steps")
    parser.add_argument("--minutes", type=float, default=60, help="no run begins after them")
    parser.add_argument("--late-s", type=float, default=60, help="seconds from an answer to its reward")
    parser.add_argument("--port", type=int, default=8377)
    parser.add_argument("--dir", default="", help="of the node; default: a temporary one")
    options = parser.parse_args()
    place = Path(options.dir or tempfile.mkdtemp(prefix="agent-runs-"))
    place.mkdir(parents=True, exist_ok=True)
    config = write_config(place, options.seed, options.steps, options.port)
    with (place / "log.txt").open("w") as log:
        command = [sys.executable, "-m", "node.cli", "start", "--config", str(config)]
        started = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            asyncio.run(main(options, place, started))
        finally:
            started.terminate()
            started.wait()
