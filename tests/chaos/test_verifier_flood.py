"""A flood of answers that never end, in front of an honest group: real admission over real confined processes."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from swarm.clock import SystemClock
from swarm.config import EnvironmentConfig, NodeConfig, SandboxConfig
from swarm.environments.load import build_environment
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.identity import Identity
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import make_group, make_identity, make_sealed
from swarm.testing.nodes import make_admission, make_context
from swarm.types import RefusalReason, Refused, ScoredGroup, SealedGroup

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="confinement is Linux only")

RULE = (
    "def score(question, answer, reference):\n    while answer == '77':\n        pass\n    return answer == reference\n"
)
NUM_KEYS = 16


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
        self.admission = make_admission(context, store, verifier=self.verifier, environments=frozenset({"digits"}))

    def sealed(self, identity: Identity, wrong: str) -> SealedGroup:
        """Half of the answers right, half `wrong`."""
        task_id = self.usable.pop()
        texts = [str(task_id % 10), wrong] * 4
        now_s = SystemClock().now_s()
        group = make_group(identity.node_id, env="digits", task_id=task_id, texts=texts, created_at_s=now_s)
        return make_sealed(group, identity)

    async def admit(self, identity: Identity, wrong: str) -> ScoredGroup | Refused:
        return await self.admission.admit(self.sealed(identity, wrong), via=identity.node_id)


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    node = Node(tmp_path)
    yield node
    await node.verifier.close()


GOOD, ENDLESS = "??", "77"


async def flood(node: Node) -> list[asyncio.Task[ScoredGroup | Refused]]:
    tasks = [asyncio.create_task(node.admit(make_identity(100 + i), ENDLESS)) for i in range(NUM_KEYS)]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return tasks


@pytest.mark.timeout(60)
@pytest.mark.parametrize("is_reserved", [True, False])  # the second is the mutation: nobody is known
async def test_an_honest_group_passes_a_flood_of_fresh_keys(
    node: Node, is_reserved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_reserved:
        monkeypatch.setattr(node.admission._reputation, "score", lambda _: 0.0)
    honest = make_identity(2)
    assert isinstance(await node.admit(honest, GOOD), ScoredGroup)
    tasks = await flood(node)
    assert isinstance(await node.admit(honest, GOOD), ScoredGroup)
    assert (sum(task.done() for task in tasks) < NUM_KEYS // 2) is is_reserved
    results = await asyncio.gather(*tasks)
    reasons = Counter(result.reason for result in results if isinstance(result, Refused))
    assert reasons == {RefusalReason.VERIFIER_FAILED: NUM_KEYS}


async def test_own_groups_and_later_ones_of_others_pay_nothing_for_an_endless_answer(node: Node) -> None:
    task_id = node.usable.pop()
    right = node.environment.reference(task_id)
    assert (await node.verifier.score("digits", task_id, [right])).rewards.tolist() == [1.0]
    own = [process.pid for process in node.verifier._own]
    refused = await node.admit(make_identity(100), ENDLESS)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.VERIFIER_FAILED
    assert [process.pid for process in node.verifier._own] == own
    assert len(node.verifier._external) == 1  # the process that was killed has its successor before the turn ended
    assert isinstance(await node.admit(make_identity(2), GOOD), ScoredGroup)
