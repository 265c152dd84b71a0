"""Nodes whose environments, tokenizers or seeds differ: no honest one is blocked, and who has the version charges lies.

Free keys send groups that an honest relay admits and another node refuses.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from swarm.clock import ManualClock
from swarm.config import EnvironmentConfig, GeneratorConfig, NodeConfig
from swarm.environments.load import build_environment
from swarm.environments.look_up import LookUpEnvironment
from swarm.identity import Identity
from swarm.model.tokenizer import CharTokenizer
from swarm.peers.peer_table import Peers
from swarm.peers.reputation import COSTS, Reputation
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import InlineVerifier, make_identity, make_sealed
from swarm.testing.episodes import make_episode_group
from swarm.testing.nodes import make_admission, make_context
from swarm.types import RefusalReason, Refused, RolloutGroup, Sampling, ScoredGroup

OURSELVES, RELAY, HONEST = make_identity(3), make_identity(77), make_identity(78)
TOKENIZER = CharTokenizer()
CONFIG = EnvironmentConfig(name="get", kind="look_up", params={"style": "char", "people": 3})
OTHER_SETTINGS = {
    "weights": {"reward_weights": {"outcome": 0.5, "found": 0.5}},
    "params": {"params": {"style": "char", "people": 4}},
    "seed": {"seed": 9},
    "num_tasks": {"num_tasks": 20},
    "prompt": {"prompt": "{question} "},
}


ENVIRONMENT = LookUpEnvironment(CONFIG)


class Gate:
    """A node's admission, with the environment that a section describes."""

    def __init__(self, config: EnvironmentConfig = CONFIG) -> None:
        clock = ManualClock()
        self.environment = build_environment(config)
        node = NodeConfig(
            environments=(config,), generator=GeneratorConfig(group_size=4, max_new_tokens=8, max_episode_tokens=64)
        )
        self.reputation = Reputation(clock, 6000)
        self.admission = make_admission(
            make_context(node, OURSELVES, clock=clock),
            MemoryGroupStore(clock, 10**8),
            tokenizer=TOKENIZER,
            verifier=InlineVerifier({"get": self.environment}),
            peers=Peers(OURSELVES.node_id),
            reputation=self.reputation,
            environments=frozenset({"get"}),
        )

    async def admit(self, group: RolloutGroup, key: Identity, via: Identity) -> ScoredGroup | Refused:
        return await self.admission.admit(make_sealed(group, key), via.node_id)


def played(task_id: int, producer: Identity) -> RolloutGroup:
    right = ENVIRONMENT.demonstration(task_id)
    episodes = [right, ("zzz",), (right[0], "x"), ("abc",)]
    return make_episode_group(ENVIRONMENT, task_id, episodes, TOKENIZER, producer.node_id, Sampling(max_new_tokens=8))


def lying(group: RolloutGroup) -> RolloutGroup:
    first, *others = group.rollouts
    return replace(group, rollouts=(replace(first, claimed_reward=0.25), *others))


def trained(first: int, count: int) -> list[int]:
    return [task for task in range(first, first + 400) if not ENVIRONMENT.task(task).is_held_out][:count]


async def test_free_keys_do_not_block_a_relay_that_weighs_rewards_otherwise() -> None:
    relay, node = Gate(CONFIG.model_copy(update=OTHER_SETTINGS["weights"])), Gate()
    for number, task in enumerate(trained(0, 12)):
        key = make_identity(1000 + number)
        group = lying(played(task, key))
        assert isinstance(await relay.admit(group, key, via=key), ScoredGroup), "the relay compares no claim"
        refused = await node.admit(group, key, via=RELAY)
        if number == 0:
            assert isinstance(refused, Refused) and refused.reason is RefusalReason.FALSE_REWARD
            assert node.reputation.score(key.node_id) == -COSTS[RefusalReason.FALSE_REWARD]
    assert node.reputation.is_allowed(RELAY.node_id)


async def test_free_keys_do_not_block_a_relay_with_tasks_that_another_version_holds_out() -> None:
    relay, node = Gate(), Gate(CONFIG.model_copy(update=OTHER_SETTINGS["params"]))
    tasks = [task for task in trained(0, 400) if node.environment.task(task).is_held_out]
    for number, task in enumerate(tasks[:24]):
        key = make_identity(3000 + number)
        group = played(task, key)
        assert isinstance(await relay.admit(group, key, via=key), ScoredGroup)
        assert isinstance(await node.admit(group, key, via=RELAY), Refused)
    assert len(tasks) >= 24
    assert node.reputation.is_allowed(RELAY.node_id)


@pytest.mark.parametrize("what", OTHER_SETTINGS)
async def test_honest_producers_with_other_settings_lose_no_reputation(what: str) -> None:
    node = Gate(CONFIG.model_copy(update=OTHER_SETTINGS[what]))
    for task in trained(30, 12):
        await node.admit(played(task, HONEST), HONEST, via=RELAY)
    assert ENVIRONMENT.verifier != node.environment.verifier
    assert node.reputation.score(HONEST.node_id) >= 0 and node.reputation.score(RELAY.node_id) >= 0


@pytest.mark.parametrize("kind", ["char", "look_up"])
@pytest.mark.parametrize("changed", [{"seed": 9}, {"num_tasks": 20}, {"prompt": "Say {question}"}, {"prefill": "a"}])
def test_a_version_says_what_decides_the_tasks(kind: str, changed: dict[str, object]) -> None:
    config = EnvironmentConfig.model_validate({"name": "one", "kind": kind, "dataset": "reverse" * (kind == "char")})
    version = build_environment(config).verifier
    assert build_environment(config.model_copy(update={"name": "two"})).verifier == version
    assert build_environment(config.model_copy(update=changed)).verifier != version


@pytest.mark.parametrize("reason", [RefusalReason.FALSE_REWARD, RefusalReason.HELD_OUT, RefusalReason.WRONG_PROMPT])
async def test_a_liar_is_charged_by_who_has_its_version(reason: RefusalReason) -> None:
    node, key = Gate(), make_identity(5)
    task = trained(0, 1)[0]
    group = lying(played(task, key))
    if reason is RefusalReason.HELD_OUT:
        group = played(next(each for each in range(400) if ENVIRONMENT.task(each).is_held_out), key)
    if reason is RefusalReason.WRONG_PROMPT:
        group = replace(played(task, key), prompt_ids=played(trained(task + 1, 1)[0], key).prompt_ids)
    refused = await node.admit(group, key, via=RELAY)
    assert isinstance(refused, Refused) and refused.reason is reason
    assert node.reputation.score(key.node_id) == -COSTS[reason] and node.reputation.score(RELAY.node_id) == 0


async def test_honest_producers_with_another_file_of_records_lose_no_reputation(tmp_path: Path) -> None:
    """Files of one name and length; every question of one is another question of the other."""
    configs = list[EnvironmentConfig]()
    for letter in "ab":
        (tmp_path / letter).mkdir()
        path = tmp_path / letter / "sums.jsonl"
        path.write_text("".join(f'{{"question": "{letter}{n}", "answer": "{n}"}}\n' for n in range(80)))
        configs.append(EnvironmentConfig(name="get", kind="jsonl", dataset=str(path)))
    theirs, node = build_environment(configs[0]), Gate(configs[1])
    tasks = [task for task in range(80) if not theirs.task(task).is_held_out][:12]
    for task in tasks:
        group = make_episode_group(
            theirs, task, [(str(task),), *[("x",)] * 3], TOKENIZER, HONEST.node_id, Sampling(max_new_tokens=8)
        )
        assert isinstance(await node.admit(group, HONEST, via=HONEST), Refused)
    assert theirs.verifier != node.environment.verifier
    assert node.reputation.score(HONEST.node_id) >= 0
