"""An environment whose steps take long, beside a quick one: real admission over real confined processes."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarm.clock import SystemClock
from swarm.config import EnvironmentConfig, GeneratorConfig, NodeConfig, SandboxConfig
from swarm.environments.load import build_environment
from swarm.environments.sandbox import verifier
from swarm.environments.sandbox.scoring_turns import Lane
from swarm.environments.sandbox.time_accounts import Allowance, TimeAccounts
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.identity import Identity
from swarm.interfaces import Producer
from swarm.peers.reputation import Reputation
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import ToyTokenizer, make_identity, make_sealed
from swarm.testing.episodes import make_episode_group
from swarm.testing.nodes import make_admission, make_context
from swarm.types import NodeId, RefusalReason, Refused, Sampling, ScoredGroup

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="confinement is Linux only")

# An action takes as many thousandths of a second of CPU as it says; two actions are an episode.
CODE = """
import time

from swarm.environments.environment import NumberedEnvironment, Problem
from swarm.episode import Message, Transition


class Burn(NumberedEnvironment):
    max_turns = 2
    answer_cpu_s = 2.0

    def __init__(self, config):
        super().__init__(config, "burn/1")

    def build(self, task_id):
        return Problem(question=str(task_id), reference="0")

    def begin(self, problem):
        return Burning()


class Burning:
    is_second = False

    def step(self, action):
        ends_s = time.process_time() + int(action.text or "0") / 1000
        while time.process_time() < ends_s:
            pass
        if self.is_second:
            return Transition(is_end=True, rewards={"outcome": float(action.text == "0")})
        self.is_second = True
        return Transition(messages=(Message(role="user", content="more"),))
"""
REPLAY_S = 0.5  # of a minute; .36 s of them at once
SAMPLING = Sampling(max_new_tokens=8)
TOKENIZER = ToyTokenizer()


class Node:
    """A node with the slow environment and a quick one of the same code."""

    def __init__(self, folder: Path) -> None:
        (folder / "burn.py").write_text(CODE)
        self.configs = [
            EnvironmentConfig(name=name, kind="plugin", dataset=f"{folder / 'burn.py'}:Burn")
            for name in ("slow", "quick")
        ]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verifier, "REPLAY_S_PER_MINUTE", REPLAY_S)
            self.verifier = SandboxVerifier(tuple(self.configs), SandboxConfig(timeout_s=30.0))
        config = NodeConfig(environments=tuple(self.configs), generator=GeneratorConfig(group_size=2, max_new_tokens=8))
        context = make_context(config, make_identity(3), clock=SystemClock(), offload=asyncio.to_thread)
        self.reputation = Reputation(context.clock, 6000)
        self.admission = make_admission(
            context,
            MemoryGroupStore(context.clock, 10**8),
            tokenizer=TOKENIZER,
            verifier=self.verifier,
            reputation=self.reputation,
            environments=frozenset({"slow", "quick"}),
            origin_of=lambda node_id: self.parties.get(node_id, node_id),
            accounts=self.verifier.accounts,
        )
        self.parties: dict[NodeId, str] = {}
        self.environments = {each.name: build_environment(each) for each in self.configs}
        self.usable = [i for i in range(400) if not self.environments["slow"].task(i).is_held_out]

    async def admit(self, identity: Identity, env: str, first: str, via: NodeId | None = None) -> ScoredGroup | Refused:
        """A group of two episodes: one takes `first` ms in its first action."""
        task_id = self.usable.pop()
        environment = self.environments[env]
        episodes = [(first, "0"), ("0", "1")]
        group = make_episode_group(environment, task_id, episodes, TOKENIZER, identity.node_id, SAMPLING)
        fresh = replace(group, created_at_s=SystemClock().now_s())
        return await self.admission.admit(make_sealed(fresh, identity), via or identity.node_id)


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    monkeypatch.setattr(verifier, "SLOW_NICE", 0)  # on a busy machine the tests would wait for nothing else
    node = Node(tmp_path)
    yield node
    await node.verifier.close()


async def test_a_slow_environment_sends_no_group_of_another_aside(node: Node) -> None:
    """An honest node of both environments, and strangers whose slow groups wait in front of its quick one."""
    honest = make_identity(4)
    assert isinstance(await node.admit(honest, "slow", "110"), ScoredGroup)  # beyond a first try
    slow = [asyncio.create_task(node.admit(Identity.create(), "slow", "150")) for _ in range(2)]
    await asyncio.wait(slow, return_when=asyncio.FIRST_COMPLETED)
    assert isinstance(await node.admit(honest, "quick", "1"), ScoredGroup)
    num_before = sum(task.done() for task in slow)
    assert all(isinstance(each, ScoredGroup) for each in await asyncio.gather(*slow))
    assert num_before < 2, "the quick group waited for every slow one"
    lane = node.verifier._turns.lane_of(Producer(node_id=honest.node_id, is_known=True, origin=honest.node_id), "quick")
    assert lane is Lane.KNOWN


async def test_a_party_has_so_many_seconds_of_a_minute_and_no_more(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six keys of one subnet send what takes 1.2 s: .36 s and what was begun are replayed, and others are judged."""
    taken_s = list[float]()
    spend = TimeAccounts.spend

    def note(self: TimeAccounts, producer: Producer, seconds: float, allowance: Allowance) -> None:
        taken_s.append(seconds * (producer.origin == "evil"))
        spend(self, producer, seconds, allowance)

    monkeypatch.setattr(TimeAccounts, "spend", note)
    keys = [Identity.create() for _ in range(6)]
    node.parties = {key.node_id: "evil" for key in keys}
    results = await asyncio.gather(*(node.admit(key, "slow", "200") for key in keys))
    refused = [each.reason for each in results if isinstance(each, Refused)]
    assert set(refused) == {RefusalReason.OVER_REPLAY_TIME}
    assert sum(taken_s) < 0.9, taken_s  # .36, and a group or first tries that ran
    assert all(node.reputation.score(key.node_id) >= 0 for key in keys)  # nobody is charged for it
    assert isinstance(await node.admit(make_identity(5), "slow", "150"), ScoredGroup)  # another party is judged


async def test_free_keys_behind_a_neighbour_do_not_keep_its_newcomers_out(node: Node) -> None:
    """Keys that are used once take all the seconds of a neighbour's strangers; one of these has a quick group."""
    neighbour, keys, newcomer = make_identity(6), [Identity.create() for _ in range(4)], make_identity(5)
    node.parties = {key.node_id: "" for key in (*keys, newcomer)}
    results = [await node.admit(key, "slow", "200", neighbour.node_id) for key in keys]
    assert [each.reason for each in results if isinstance(each, Refused)][-1] is RefusalReason.OVER_REPLAY_TIME
    found = await node.admit(newcomer, "quick", "0", neighbour.node_id)
    assert isinstance(found, ScoredGroup), found
    again = await node.admit(newcomer, "slow", "200", neighbour.node_id)  # known by now, and its own account
    assert isinstance(again, ScoredGroup), again


async def test_a_first_try_is_short_whatever_the_environment_declares(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 s for an action, and 2 % of that for a first try of 4 actions: .16 s of a place of newcomers."""
    first_s = list[float]()
    ask = SandboxVerifier._ask

    async def note(self: SandboxVerifier, process: Any, request: Any, nonce: str) -> Any:
        try:
            return await ask(self, process, request, nonce)
        finally:
            if request.is_first_try:
                first_s.append(process.taken_s)

    monkeypatch.setattr(SandboxVerifier, "_ask", note)
    assert isinstance(await node.admit(make_identity(6), "quick", "1"), ScoredGroup)  # the imports
    assert isinstance(await node.admit(make_identity(5), "slow", "200"), ScoredGroup)
    assert first_s[-1] < 0.13, first_s
