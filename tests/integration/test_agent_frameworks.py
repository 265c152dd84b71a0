"""Agents of others, unchanged but for their base URL and key, whose runs become rollouts."""

import asyncio
import json
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from swarm.model.conversations import conversation_ids
from tests.worlds.agent_world import ADA, World
from tests.worlds.scripted_model import called

pytest.importorskip("openai", reason="needs the packages of .ci/run's stage of agents")

LOOP = asyncio.new_event_loop()  # the SDK keeps its connections from run to run


def add(a: int, b: int) -> int:
    """The sum of two numbers."""
    return a + b


@pytest.fixture
def it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[World]:
    """A model that calls `add`, then answers."""
    made = World(tmp_path, called(arguments='{"a": 1, "b": 2}'), "the sum is 3", max_episode_tokens=4000)
    monkeypatch.setenv("OPENAI_BASE_URL", made.server.url)
    monkeypatch.setenv("OPENAI_AGENTS_DISABLE_TRACING", "1")
    with made.server:
        yield made
    made.store.close()


def langgraph(ask: str) -> str:
    """LangGraph's own agent."""
    from langchain_openai import ChatOpenAI
    from langgraph.prebuilt import create_react_agent

    agent: Any = create_react_agent(ChatOpenAI(model="m"), [add])
    return agent.invoke({"messages": [{"role": "user", "content": ask}]})["messages"][-1].content


def agents(ask: str) -> str:
    """That of OpenAI's agents SDK, which speaks the Responses dialect."""
    from agents import Agent, Runner, function_tool

    agent = Agent(name="adder", instructions="Use the tool.", model="m", tools=[function_tool(add)])
    return LOOP.run_until_complete(Runner.run(agent, ask)).final_output


def agents_streamed(ask: str) -> str:
    """The same, streamed."""
    from agents import Agent, Runner, function_tool

    async def run() -> str:
        agent = Agent(name="adder", instructions="Use the tool.", model="m", tools=[function_tool(add)])
        result = Runner.run_streamed(agent, ask)
        async for _ in result.stream_events():
            pass
        return result.final_output

    return LOOP.run_until_complete(run())


def pydantic_ai(ask: str) -> str:
    """That of Pydantic AI."""
    from pydantic_ai import Agent

    agent = Agent("openai-chat:m", tools=[add])
    return LOOP.run_until_complete(agent.run(ask)).output


AGENTS: dict[str, Callable[[str], str]] = {
    "langgraph": langgraph,
    "agents": agents,
    "agents_streamed": agents_streamed,
    "pydantic_ai": pydantic_ai,
}


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.parametrize("name", AGENTS)
def test_an_unchanged_agent_makes_a_group_whose_tokens_are_those_that_were_sampled(
    it: World, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    pytest.importorskip(name.removesuffix("_streamed"))
    for value in (1.0, 0.0):
        _, opened = it.server.ask("/v1/episodes", {"task": "1+2"}, key=ADA)
        monkeypatch.setenv("OPENAI_API_KEY", opened["key"])
        it.server.engine.texts = [called(arguments='{"a": 1, "b": 2}'), "the sum is 3"]
        assert AGENTS[name]("1 + 2?") == "the sum is 3"
        status, told = it.reward(opened["id"], {"reward": value}, key=opened["reward_key"])
        assert status == 200 and told["num_calls"] == 2, told
    assert told["state"] == "closed", told
    it.hand_over()
    ((group, outcomes),) = it.put
    sampled = [(request.prompt_ids, request) for request in it.server.engine.requests]
    assert "3" in json.dumps(it.server.engine.prompts()[1])
    num_drifted = 0
    for place, (rollout, outcome) in enumerate(zip(group.rollouts, outcomes, strict=True)):
        trace = rollout.trace
        assert trace is not None and len(rollout.actions) == 2
        own = conversation_ids(outcome.conversations, trace.turn_ids, trace.action_mask)
        for turn in range(2):
            first = int(((trace.turn_ids == turn) & trace.action_mask).argmax())
            before = trace.token_ids[:first][own[:first] == own[first]].tolist()
            opening = [] if own[first] else group.prompt_ids.tolist()
            num_drifted += [*opening, *before] != list(sampled[2 * place + turn][0])
        assert outcome.conversations == (0, 0)  # the second call went on with the tokens of the first
    assert num_drifted == 0
