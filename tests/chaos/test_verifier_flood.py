"""A flood of answers that never end, in front of an honest group: real admission over real confined processes."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from waits import until

from swarm.clock import SystemClock
from swarm.config import EnvironmentConfig, NodeConfig, SandboxConfig
from swarm.environments.load import build_environment
from swarm.environments.sandbox.scoring_process import NUM_SPARE
from swarm.environments.sandbox.scoring_turns import Lane, ScoringTurns
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.identity import Identity
from swarm.interfaces import Producer
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import answers, make_group, make_identity, make_sealed
from swarm.testing.nodes import make_admission, make_context
from swarm.types import RefusalReason, Refused, ScoredGroup, SealedGroup

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="confinement is Linux only")

RULE = """
import time

def score(question, answer, reference):
    while answer == "77":
        pass
    if answer == "88":
        ends_s = time.process_time() + 0.03
        while time.process_time() < ends_s:
            pass
    return answer == reference
"""
LONG = "88"
NUM_KEYS = 8


class Node:
    """An environment whose verifier never ends on the answer 77, and the admission in front of it."""

    def __init__(self, folder: Path) -> None:
        (folder / "rule.py").write_text(RULE)
        records = [{"question": f"{i}=", "answer": str(i % 10)} for i in range(400)]
        (folder / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
        params = {"path": str(folder / "records.jsonl")}
        config = EnvironmentConfig(name="digits", kind="function", dataset=f"{folder / 'rule.py'}:score", params=params)
        self.environment = build_environment(config)
        self.usable = [i for i in range(self.environment.num_tasks) if not self.environment.task(i).is_held_out]
        self.verifier = SandboxVerifier((config,), SandboxConfig())
        context = make_context(NodeConfig(), make_identity(3), clock=SystemClock(), offload=asyncio.to_thread)
        store = MemoryGroupStore(context.clock, 10**8)
        self.admission = make_admission(
            context,
            store,
            verifier=self.verifier,
            environments=frozenset({"digits"}),
            origin_of=lambda node_id: self.subnets.get(node_id, ""),
        )
        self.subnets: dict[str, str] = {}

    def sealed(self, identity: Identity, wrong: str) -> SealedGroup:
        """Half of the answers right, half `wrong`."""
        task_id = self.usable.pop()
        texts = [str(task_id % 10), wrong] * 4
        now_s = SystemClock().now_s()
        group = make_group(identity.node_id, env="digits", task_id=task_id, texts=texts, created_at_s=now_s)
        return make_sealed(group, identity)

    async def admit(self, identity: Identity, wrong: str, via: Identity | None = None) -> ScoredGroup | Refused:
        return await self.admission.admit(self.sealed(identity, wrong), via=(via or identity).node_id)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    yield node
    await node.verifier.close()


GOOD, ENDLESS = "??", "77"


async def attack(node: Node, num_subnets: int) -> list[asyncio.Task[ScoredGroup | Refused]]:
    """Answers of fresh keys that never end, when those of other keys of the same subnets were judged."""
    waves = list[list[asyncio.Task[ScoredGroup | Refused]]]()
    for _ in range(2):
        keys = [Identity.create() for _ in range(NUM_KEYS)]
        for number, key in enumerate(keys):
            node.subnets[key.node_id] = f"10.{number % num_subnets}.0.0/24"
        waves.append([asyncio.create_task(node.admit(key, ENDLESS)) for key in keys])
        await asyncio.wait(waves[-1], return_when=asyncio.ALL_COMPLETED if len(waves) < 2 else asyncio.FIRST_COMPLETED)
    return waves[-1]


async def number_before(node: Node, honest: Identity, flood: list[asyncio.Task[ScoredGroup | Refused]]) -> int:
    """Number of the flood's groups that were judged before an honest one was admitted."""
    assert isinstance(await node.admit(honest, GOOD), ScoredGroup)
    num_before = sum(task.done() for task in flood)
    results = await asyncio.gather(*flood)
    reasons = {result.reason for result in results if isinstance(result, Refused)}
    assert reasons == {RefusalReason.VERIFIER_FAILED}
    return num_before


@pytest.mark.parametrize("num_subnets", [1, NUM_KEYS])
async def test_an_honest_newcomer_passes_a_flood_of_fresh_keys(node: Node, num_subnets: int) -> None:
    flood = await attack(node, num_subnets)
    assert await number_before(node, Identity.create(), flood) <= NUM_KEYS // 2


async def test_an_honest_group_passes_a_flood_of_its_own_subnet_once_its_producer_is_known(node: Node) -> None:
    honest = make_identity(2)
    node.subnets[honest.node_id] = "10.0.0.0/24"
    assert isinstance(await node.admit(honest, GOOD), ScoredGroup)
    flood = await attack(node, num_subnets=1)
    assert await number_before(node, honest, flood) <= NUM_KEYS // 2


@pytest.mark.parametrize("is_at_an_address", [True, False], ids=["proved", "unknown"])
async def test_endless_answers_that_a_neighbour_passes_on_are_held_against_their_signer_only(
    node: Node, is_at_an_address: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lanes, lane_of = list[Lane](), ScoringTurns.lane_of

    def note(self: ScoringTurns, producer: Producer, env: str) -> Lane:
        lanes.append(lane_of(self, producer, env))
        return lanes[-1]

    monkeypatch.setattr(ScoringTurns, "lane_of", note)
    relay, culprit, honest = (Identity.create() for _ in range(3))
    node.subnets = {relay.node_id: "10.1.0.0/24"}
    if is_at_an_address:
        node.subnets |= {culprit.node_id: "10.2.0.0/24", honest.node_id: "10.3.0.0/24"}
    assert isinstance(await node.admit(culprit, ENDLESS, via=relay), Refused)
    assert isinstance(await node.admit(honest, GOOD, via=relay), ScoredGroup)
    assert lanes == [Lane.NEW, Lane.NEW]


async def test_at_the_first_moment_of_a_flood_by_unknown_subnets_each_has_a_very_short_try(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 subnets send their first group together, and then an honest newcomer of another one sends its own."""
    num_long, ask = 0, SandboxVerifier._ask_one_of

    async def count(self: SandboxVerifier, idle: Any, request: Any, producer: Producer | None = None) -> Any:
        nonlocal num_long
        num_long += request.share > 0
        return await ask(self, idle, request, producer)

    monkeypatch.setattr(SandboxVerifier, "_ask_one_of", count)
    keys = [Identity.create() for _ in range(24)]
    node.subnets = {key.node_id: f"10.{number}.0.0/24" for number, key in enumerate(keys)}
    await node.admit(Identity.create(), GOOD)  # the imports
    num_long = 0
    flood = [asyncio.create_task(node.admit(key, ENDLESS)) for key in keys]
    await asyncio.sleep(0)
    assert isinstance(await node.admit(Identity.create(), GOOD), ScoredGroup)
    assert num_long <= 8
    assert all(isinstance(result, Refused) for result in await asyncio.gather(*flood))


async def test_spare_processes_are_few_and_end_with_the_verifier(node: Node) -> None:
    verifier = node.verifier
    assert isinstance(await node.admit(Identity.create(), GOOD), ScoredGroup)
    keys = [Identity.create() for _ in range(6)]
    await asyncio.gather(*(node.admit(key, ENDLESS) for key in keys))
    spares = verifier._spares
    await until(lambda: len(spares._waiting) >= NUM_SPARE and not spares._tasks, "spare processes")
    pids = [process.pid for process in spares._waiting]
    assert len(pids) == NUM_SPARE and all(map(is_alive, pids))
    taken = spares.take()
    assert taken is not None
    spares.end(taken)
    await verifier.close()
    assert taken.writer.is_closing(), "its end was cancelled before it began"
    await until(lambda: not any(map(is_alive, pids)), "their end")
    assert not spares._waiting and not spares._tasks


def is_alive(pid: int) -> bool:
    """True if the process runs or waits; nobody may collect a process that ended with its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


async def test_answers_that_take_longer_than_a_first_try_are_scored_in_full_all_the_same(node: Node) -> None:
    slow = make_identity(4)
    assert isinstance(await node.admit(slow, LONG), ScoredGroup)
    assert isinstance(await node.admit(slow, LONG), ScoredGroup)
    assert len(node.verifier._slow) == 1
    assert isinstance(await node.admit(make_identity(5), GOOD), ScoredGroup)


async def test_own_groups_and_later_ones_of_others_pay_nothing_for_an_endless_answer(node: Node) -> None:
    task_id = node.usable.pop()
    right = node.environment.reference(task_id)
    assert (await node.verifier.verify("digits", task_id, answers(right))).rewards.tolist() == [1.0]
    own = [process.pid for process in node.verifier._own]
    refused = await node.admit(make_identity(100), ENDLESS)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.VERIFIER_FAILED
    assert [process.pid for process in node.verifier._own] == own
    assert len(node.verifier._external) == 1  # the process that was killed has its successor before the turn ended
    assert isinstance(await node.admit(make_identity(2), GOOD), ScoredGroup)
