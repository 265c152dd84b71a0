"""An unchanged agent that trains SmolLM2 by its own runs: held-out success before and after, rewards given late.

    build/agents-env/bin/python -m benchmarks.agent_runs --seed 0     # the environment of .ci/run's stage of agents
    build/agents-env/bin/python -m benchmarks.agent_runs --agent pydantic_ai --steps 16

The task is the sum of two digits, a quarter of which are held out. LangGraph's `create_react_agent` has no tools and
prompts of 28 tokens: an answer is right if its last number is the sum. The other two agents have a tool, which they
carry out: a run is right if its first call has the two digits. Each run is rewarded `--late-s` after its answer; those
on held-out sums, greedy, are measured alone. Prints one line of JSON, with what `swarm status` says of learning, the
groups that were learned from, and the turns whose prompt is not what their run had before.
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
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import swarm
from swarm.clock import SystemClock
from swarm.environments.environment import is_held_out
from swarm.errors import SwarmError
from swarm.exchange.group_store import SqliteGroupStore
from swarm.model.conversations import conversation_ids
from swarm.trained.learning_evidence import read_learning

PAIRS = [(a, b) for a in range(1, 10) for b in range(1, 10)]
INSTRUCTIONS = "Answer with the number only."
# SmolLM2 calls no tool that it may leave out (0 of 28), and copies a schema where it needs a call and has no example.
TOOL_INSTRUCTIONS = (
    'Example, 2 + 3: <tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>\nAnswer in one word.'
)


def question(a: int, b: int) -> str:
    """A question, which decides by its hash if it is held out."""
    return f"What is {a} + {b}?"


def is_right(answer: str, pair: tuple[int, int]) -> bool:
    """True if the last number of an answer is the sum."""
    numbers = re.findall(r"\d+", answer)
    return bool(numbers) and numbers[-1] == str(sum(pair))


async def langgraph(url: str, key: str, pair: tuple[int, int], **sampling: Any) -> bool:
    """A run of LangGraph's agent: True if its answer is right."""
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    model: Any = ChatOpenAI(model="policy", base_url=url, api_key=key, **sampling)
    agent: Any = create_react_agent(model, [], prompt=INSTRUCTIONS)
    made = await agent.ainvoke({"messages": [("user", question(*pair))]})
    return is_right(str(made["messages"][-1].content), pair)


class Adder:
    """A tool that notes its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def add(self, a: int, b: int) -> int:
        """Adds two numbers."""
        self.calls.append((a, b))
        return a + b


async def pydantic_ai(url: str, key: str, pair: tuple[int, int], **sampling: Any) -> bool:
    """A run of Pydantic AI's agent, whose output is the tool's: True if its first call is right."""
    from pydantic_ai import Agent, ToolOutput
    from pydantic_ai.exceptions import AgentRunError
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    tool, model = Adder(), OpenAIChatModel("policy", provider=OpenAIProvider(base_url=url, api_key=key))
    settings: Any = {"parallel_tool_calls": False, **sampling}
    output: Any = ToolOutput(tool.add, name="add")
    agent: Any = Agent(model, output_type=output, instructions=TOOL_INSTRUCTIONS, model_settings=settings)
    with suppress(AgentRunError):  # it gave up after a call that does not fit
        await agent.run(question(*pair))
    return tool.calls[:1] == [pair]


async def agents(url: str, key: str, pair: tuple[int, int], **sampling: Any) -> bool:
    """A run of the agent of OpenAI's SDK, which answers after its tool: True if its first call is right."""
    from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool
    from agents.exceptions import AgentsException
    from openai import APIStatusError, AsyncOpenAI

    tool, settings = Adder(), ModelSettings(tool_choice="required", parallel_tool_calls=False, **sampling)
    model = OpenAIResponsesModel("policy", AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=3600))
    agent = Agent(
        name="adder",
        instructions=TOOL_INSTRUCTIONS,
        model=model,
        model_settings=settings,
        tools=[function_tool(tool.add)],
    )
    with suppress(AgentsException, APIStatusError):  # an answer that was cut, or no call in all tries
        await Runner.run(agent, question(*pair), max_turns=3)
    return tool.calls[:1] == [pair]


@dataclass(frozen=True)
class Course:
    """An agent, and the sizes that its runs need."""

    run: Callable[..., Awaitable[bool]]
    answer_tokens: int
    group_size: int = 8
    local_groups: int = 4
    temperature: float = 1.0
    episode_tokens: int = 512


AGENTS = {
    "langgraph": Course(langgraph, 12),
    "pydantic_ai": Course(pydantic_ai, 28, 4, 2, 0.7, 4096),
    "agents": Course(agents, 28, 4, 2, 0.7, 4096),
}


def write_config(directory: Path, course: Course, seed: int, port: int) -> Path:
    """node.toml of a node that learns from runs alone, until it is stopped: it has to answer to the end."""
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
[[serve.keys]]
name = "agents"
learn = true
[generator]
group_size = {course.group_size}
temperature = {course.temperature}
max_new_tokens = {course.answer_tokens}
max_episode_tokens = {course.episode_tokens}
[engine]
max_rows = 32
[replay]
local_groups = {course.local_groups}
external_groups = 0
max_age_steps = 24
[learner]
learning_rate = 2e-5
"""
    )
    return path


async def main(arguments: argparse.Namespace, directory: Path, node: "subprocess.Popen[bytes]") -> dict[str, Any]:
    """Measures, lets agents run, measures again."""
    url, course = f"http://127.0.0.1:{arguments.port}/v1", AGENTS[arguments.agent]

    async def success(pairs: list[tuple[int, int]]) -> float:
        return sum(await asyncio.gather(*(measured(pair) for pair in pairs))) / len(pairs)

    async def opened(task: str, **how: Any) -> swarm.AgentRun:
        manager = swarm.agent_run(url, (directory / "api-agents.key").read_text(), task, **how)
        return await asyncio.to_thread(manager.__enter__)

    async def measured(pair: tuple[int, int]) -> bool:
        run = await opened(question(*pair), held_out=True)
        is_success = await course.run(url, run.key, pair, temperature=0, max_tokens=course.answer_tokens)
        await asyncio.to_thread(run.reward, float(is_success))
        return is_success

    states: dict[str, int] = {}

    async def one(pair: tuple[int, int], task: str, late: asyncio.TaskGroup) -> None:
        run = await opened(task)
        value = float(await course.run(url, run.key, pair))
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
    source, number, size = random.Random(arguments.seed), 0, course.group_size
    async with asyncio.TaskGroup() as late:
        while step(url, directory) < arguments.steps and time.monotonic() - began_s < arguments.minutes * 60:
            pairs = [source.choice(trained) for _ in range(course.local_groups)]
            runs = [one(p, f"{number + i}: {question(*p)}", late) for i, p in enumerate(pairs) for _ in range(size)]
            await asyncio.gather(*runs)
            number += len(pairs)
    minutes = (time.monotonic() - began_s) / 60
    after, made = await success(held_out), step(url, directory)
    row = {"agent": arguments.agent, "seed": arguments.seed, "held_out": len(held_out), "before": before}
    return row | {"after": after, "steps": made, "groups": number, "minutes": round(minutes, 1), "states": states}


async def learned_from(directory: Path) -> dict[str, int]:
    """Groups in steps, with their calls and tokens, and calls whose prompt is not what their run had before."""
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    made = {event["draw_step"] for event in events if event["kind"] == "step"}
    draws = [event for event in events if event["kind"] == "draw" and event["draw_step"] in made]
    drawn = {group["digest"] for draw in draws for group in draw["groups"]}
    store = await SqliteGroupStore.open(directory / "groups.sqlite", SystemClock(), 2**40)
    groups = [each for each in await store.load_scored(10**6) if each.digest.hex() in drawn]
    await store.close()
    counts = {"groups_learned": len(groups), "calls": 0, "continued": 0, "drifted": 0, "tokens": 0}
    counts |= {"continued_tokens": 0}
    for scored in groups:
        courses = [each.conversations for each in scored.outcomes] or [(0,)] * len(scored.group.rollouts)  # one call
        for rollout, course in zip(scored.group.rollouts, courses, strict=True):
            trace, prompts = rollout.trace, list[list[int]]()
            assert trace is not None
            counts["tokens"] += int(trace.action_mask.sum())
            own = conversation_ids(course, trace.turn_ids, trace.action_mask)
            for turn, conversation in enumerate(course):
                start = int(np.flatnonzero((trace.turn_ids == turn) & trace.action_mask)[0])
                before: list[int] = trace.token_ids[:start][own[:start] == conversation].tolist()
                prompts.append([*([] if conversation else scored.group.prompt_ids.tolist()), *before])
                is_continued = conversation in course[:turn]
                counts["calls"] += 1
                counts["continued"] += is_continued
                counts["continued_tokens"] += len(prompts[-1]) * is_continued
                counts["drifted"] += turn > 0 and not is_continued
    return counts


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
    parser.add_argument("--agent", choices=AGENTS, default="langgraph")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=40, help="no run begins after so many optimizer steps")
    parser.add_argument("--minutes", type=float, default=60, help="no run begins after them")
    parser.add_argument("--late-s", type=float, default=60, help="seconds from an answer to its reward")
    parser.add_argument("--port", type=int, default=8377)
    parser.add_argument("--dir", default="", help="of the node; default: a temporary one")
    options = parser.parse_args()
    place = Path(options.dir or tempfile.mkdtemp(prefix="agent-runs-"))
    place.mkdir(parents=True, exist_ok=True)
    config = write_config(place, AGENTS[options.agent], options.seed, options.port)
    os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = "1"
    with (place / "log.txt").open("w") as log:
        command = [sys.executable, "-m", "node.cli", "start", "--config", str(config)]
        started = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        try:
            row = asyncio.run(main(options, place, started))
        finally:
            started.terminate()
            started.wait()
    print(json.dumps(row | asyncio.run(learned_from(place)) | {"learning": read_learning(place).words}))
