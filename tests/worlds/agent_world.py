"""A served model whose callers' runs become rollouts, two keys that learn, and the node that groups go to."""

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from swarm.clock import ManualClock
from swarm.episode import EpisodeOutcome
from swarm.serving.agent_runs import AgentRuns, RunKey, RunRules
from swarm.serving.openai_app import ApiKey
from swarm.serving.run_store import RunStore
from swarm.testing.builders import make_identity
from swarm.types import PolicyVersion, RolloutGroup
from tests.worlds.scripted_model import ScriptedServer, tokenizer

ADA, BOB = "the-key-of-ada-16", "the-key-of-bob-16"
IDENTITY = make_identity(1)
RULES = RunRules(
    run_id="local",
    node_id=IDENTITY.node_id,
    group_size=2,
    group_s=60.0,
    temperature=0.9,
    max_new_tokens=120,
    max_episode_tokens=2000,
    max_age_steps=4,
    takes_single_runs=False,
)


class World:
    """A served model, agents with keys, and the node that their groups go to."""

    def __init__(self, path: Path, *texts: str, **rules: Any) -> None:
        self.path, self.clock, self.rules = path, ManualClock(), replace(RULES, **rules)
        self.version = PolicyVersion(policy_id=IDENTITY.node_id, step=3, digest=b"\x01" * 32)
        self.put: list[tuple[RolloutGroup, Sequence[EpisodeOutcome]]] = []
        self.mean = 0.5  # that `put` returns
        self.runs = self._open()
        keys = [ApiKey(key=ADA, name="ada", learns=True), ApiKey(key=BOB, name="bob", learns=True)]
        self.server = ScriptedServer(*texts, keys=keys, runs=self.runs)
        self.server.engine.version = self.version

    def _open(self) -> AgentRuns:
        self.store = RunStore(self.path / "agent_runs.sqlite", self.clock.now_s())
        return AgentRuns(self.store, self.rules, tokenizer(), lambda: self.version, "float32", self.clock)

    def restart(self) -> None:
        """As after a kill: what is in memory is gone."""
        self.store.close()
        self.runs = self.server.app._runs = self._open()

    async def take(self, group: RolloutGroup, outcomes: Sequence[EpisodeOutcome]) -> float:
        self.put.append((group, outcomes))
        return self.mean

    def hand_over(self) -> None:
        """One round of what the worker does every second."""
        asyncio.run(self.runs.hand_over(self.take))

    def call(
        self, run: str, *messages: dict[str, Any], task: str = "t", key: str = ADA, **fields: Any
    ) -> dict[str, Any]:
        """The reply to a call of a run."""
        headers = {"X-Episode": run} | ({"X-Task": task} if task else {})
        body = {"messages": messages, "return_token_ids": True, **fields}
        status, reply = self.server.ask("/v1/chat/completions", body, key=key, headers=headers)
        assert status == 200, reply
        return reply

    def state(self, run: str) -> dict[str, Any]:
        """State of a run of Ada's."""
        return asyncio.run(self.runs.state(RunKey("ada", run)))

    def reward(self, run: str, body: object, key: str = ADA) -> tuple[int, dict[str, Any]]:
        """Status and reply to a reward."""
        return self.server.ask(f"/v1/episodes/{run}/reward", body, key=key)


@contextmanager
def world(path: Path, *texts: str, **rules: Any) -> Generator[World]:
    """A world that ends with the block."""
    made = World(path, *texts, **rules)
    with made.server:
        yield made
    made.store.close()
