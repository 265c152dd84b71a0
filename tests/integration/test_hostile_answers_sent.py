"""Answers that burn a verifier's time, or that a library pays for though they are wrong, sent over real sockets."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attacked_node import AttackedNode

from swarm.config import EnvironmentConfig, GeneratorConfig, SandboxConfig
from swarm.environments.load import build_environment
from swarm.environments.sandbox.verifier import SandboxVerifier
from swarm.identity import Identity
from swarm.interfaces import Environment, Verifier
from swarm.testing.builders import InlineVerifier, ToyTokenizer, make_group, make_identity
from swarm.types import RefusalReason, RolloutGroup, Sampling

ALICE, EVE = make_identity(2), make_identity(3)
BURNING = "a" * 31 + "!"
NUM_SENT = 2

RULE = """
from swarm.environments.formulas import is_formula

def score(question, answer, reference):
    return is_formula(answer) and answer == reference
"""


class AnsweredNode(AttackedNode):
    """A node whose answers are judged in one environment; texts of up to 64 characters."""

    def __init__(self, directory: Path, environment: EnvironmentConfig, verifier: Verifier | None = None) -> None:
        super().__init__(directory, generator=GeneratorConfig(max_new_tokens=64))
        self.environment: Environment = build_environment(environment)
        self.verifier = verifier or InlineVerifier({environment.name: self.environment})
        self.usable = [number for number in range(50) if not self.environment.task(number).is_held_out]

    def parts(self) -> dict[str, Any]:
        return {"verifier": self.verifier, "environments": frozenset({self.environment.name})}

    def answered(self, identity: Identity, wrong: str, claimed: float = 0.0) -> RolloutGroup:
        """Four right answers to a task, and four others for which its sender claims a reward."""
        task_id = self.usable.pop()
        right = self.environment.reference(task_id)
        group = make_group(
            identity.node_id,
            task_id=task_id,
            env=self.environment.name,
            texts=[right] * 4 + [wrong] * 4,
            sampling=Sampling(max_new_tokens=64),
        )
        rewards = [1.0] * 4 + [claimed] * 4
        prompt = ToyTokenizer().encode_prompt(self.environment.task(task_id))
        return _with(group, rewards, np.array(prompt, np.int32), self.environment.verifier)


def _with(group: RolloutGroup, rewards: list[float], prompt: Any, verifier: str) -> RolloutGroup:
    rollouts = tuple(replace(r, claimed_reward=reward) for r, reward in zip(group.rollouts, rewards, strict=True))
    return replace(group, rollouts=rollouts, prompt_ids=prompt, verifier=verifier)


@pytest.mark.skipif(sys.platform != "linux", reason="confinement is Linux only")
async def test_a_long_word_costs_a_verifier_no_process_and_those_behind_it_nothing(tmp_path: Path) -> None:
    (tmp_path / "rule.py").write_text(RULE)
    records = [{"question": f"{number} + 1 =", "answer": str(number + 1)} for number in range(200)]
    (tmp_path / "records.jsonl").write_text("\n".join(map(json.dumps, records)))
    environment = EnvironmentConfig(
        name="sums",
        kind="function",
        dataset=f"{tmp_path / 'rule.py'}:score",
        params={"path": str(tmp_path / "records.jsonl")},
    )
    async with (
        SandboxVerifier((environment,), SandboxConfig(timeout_s=60.0)) as verifier,  # CPU time is the claim
        AnsweredNode(tmp_path / "node", environment, verifier) as node,
    ):
        eve, alice = await node.follow(EVE), await node.follow(ALICE)
        for _ in range(NUM_SENT):
            eve.send(node.answered(EVE, BURNING))
        await node.judged(NUM_SENT)
        alice.send(node.answered(ALICE, "0"))
        await node.judged(NUM_SENT + 1)
        assert node.agent.ingest.num_admitted == NUM_SENT + 1, "the honest one passes"
        assert not node.refused and verifier.num_replaced == 0


async def test_what_a_library_pays_though_it_is_wrong_is_not_admitted_as_right(tmp_path: Path) -> None:
    """`nan` for every task of a dataset."""
    environment = EnvironmentConfig(name="complex", kind="reasoning_gym", dataset="complex_arithmetic")
    async with AnsweredNode(tmp_path, environment) as node:
        eve, alice = await node.follow(EVE), await node.follow(ALICE)
        eve.send(node.answered(EVE, "nan", claimed=1.0))
        alice.send(node.answered(ALICE, "wrong"))
        await node.judged(2)
        assert node.refused == {RefusalReason.FALSE_REWARD: 1}
        assert node.agent.ingest.num_admitted == 1
