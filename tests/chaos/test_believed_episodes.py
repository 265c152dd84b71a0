"""Environments whose observations nobody else can rebuild: believed of listed nodes only, or kept at home."""

import importlib.metadata
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swarm import plugins
from swarm.clock import ManualClock
from swarm.config import EnvironmentConfig, GeneratorConfig, NodeConfig, ReplayConfig
from swarm.environments.determinism import require_repeatable
from swarm.environments.load import build_environment
from swarm.environments.replay import ConfiguredEnvironment, replay
from swarm.exchange.agent import Agent
from swarm.model.tokenizer import CharTokenizer
from swarm.peers.reputation import Reputation
from swarm.plugins import code_version, load_object
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import InlineVerifier, make_identity, make_sealed
from swarm.testing.episodes import make_episode_group
from swarm.testing.nodes import make_admission, make_agent, make_context
from swarm.types import Cursor, RefusalReason, Refused, Role, RolloutGroup, Sampling, ScoredGroup, StreamFilter

# What a search finds is another thing in every process; whether the answer is right is not.
CODE = """
import itertools
from swarm.environments.environment import NumberedEnvironment, Problem
from swarm.episode import Message, Transition

COUNT = itertools.count()

class Web(NumberedEnvironment):
    max_turns = 3
    signals = frozenset({"reward_parts"})

    def __init__(self, config):
        super().__init__(config, "web/1")

    def build(self, task_id):
        return Problem(question=f"find {task_id}", reference=f"r{task_id}")

    def begin(self, problem):
        return Search(self, problem)

    def score(self, task_id, text):
        return {"outcome": float(text == self.reference(task_id)), "short": float(len(text) < 4)}

class Search:
    def __init__(self, web, problem):
        self.web, self.problem = web, problem

    def step(self, action):
        if action.text.startswith("?"):
            return Transition(messages=(Message(role="user", content=f"page {next(COUNT)}="),))
        return Transition(is_end=True, rewards={"outcome": float(action.text == self.problem.reference)})
"""
MEMBER, STRANGER, OURSELVES = make_identity(1), make_identity(2), make_identity(3)
SAMPLING = Sampling(max_new_tokens=8)
TOKENIZER = CharTokenizer()


def web(folder: Path, exchange: str, **changes: object) -> EnvironmentConfig:
    (folder / "web.py").write_text(CODE)
    believed = {"scored_from": [MEMBER.node_id]} if exchange == "scored" else {}
    section = {"name": "web", "kind": "plugin", "dataset": f"{folder / 'web.py'}:Web", "exchange": exchange}
    return EnvironmentConfig.model_validate({**section, **believed, **changes})


class Gate:
    """Admission of a node with this environment."""

    def __init__(self, config: EnvironmentConfig) -> None:
        clock = ManualClock()
        self.config, self.environment = config, build_environment(config)
        self.task_id = next(i for i in range(100) if not self.environment.task(i).is_held_out)
        node = NodeConfig(
            environments=(config,),
            generator=GeneratorConfig(group_size=2, max_new_tokens=8, max_episode_tokens=64),
        )
        self.reputation = Reputation(clock, 6000)
        self.admission = make_admission(
            make_context(node, OURSELVES, clock=clock),
            MemoryGroupStore(clock, 10**8),
            tokenizer=TOKENIZER,
            verifier=InlineVerifier({"web": self.environment}),
            reputation=self.reputation,
            environments=frozenset({"web"}),
        )

    def group(self, producer: str, right: float = 1.0) -> RolloutGroup:
        """Two episodes of a search and an answer, as its producer's own environment showed it."""
        built = build_environment(self.config)
        assert isinstance(built, ConfiguredEnvironment)
        played = built.inner
        episodes = [("?a", f"r{self.task_id}"), ("?b", "wrong")]
        group = make_episode_group(played, self.task_id, episodes, TOKENIZER, producer, SAMPLING)
        claims = [
            replace(r, claimed_reward=c, claimed_turns=())
            for r, c in zip(group.rollouts, (1.0, 1 - right), strict=True)
        ]
        return replace(group, rollouts=tuple(claims), verifier=self.environment.verifier)

    async def admit(self, identity: object, **changes: float) -> ScoredGroup | Refused:
        group = self.group(identity.node_id, **changes)  # type: ignore[attr-defined]
        return await self.admission.admit(make_sealed(group, identity), identity.node_id)  # type: ignore[attr-defined,arg-type]


async def test_a_listed_node_is_believed_what_it_saw_and_its_answer_is_scored_here(tmp_path: Path) -> None:
    gate = Gate(web(tmp_path, "scored"))
    scored = await gate.admit(MEMBER)
    assert isinstance(scored, ScoredGroup), scored
    assert scored.rewards.tolist() == [1.0, 0.0]
    first = scored.outcomes[0]
    assert first.rewards == {"outcome": 1.0, "short": 1.0} and [t.reward for t in first.transitions] == [0.0, 0.0]


async def test_its_observations_are_refused_where_they_are_replayed(tmp_path: Path) -> None:
    refused = await Gate(web(tmp_path, "replayable")).admit(MEMBER)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.WRONG_EPISODE


async def test_a_stranger_is_not_believed_and_not_charged(tmp_path: Path) -> None:
    gate = Gate(web(tmp_path, "scored"))
    result = await gate.admit(STRANGER)
    assert isinstance(result, Refused) and result.reason is RefusalReason.NOT_BELIEVED
    assert gate.reputation.score(STRANGER.node_id) == 0.0


async def test_a_members_forged_reward_is_found(tmp_path: Path) -> None:
    gate = Gate(web(tmp_path, "scored"))
    result = await gate.admit(MEMBER, right=0.0)
    assert isinstance(result, Refused) and result.reason is RefusalReason.FALSE_REWARD
    assert gate.reputation.score(MEMBER.node_id) < 0


async def test_more_actions_than_it_takes_and_tokens_of_others_are_refused(tmp_path: Path) -> None:
    gate = Gate(web(tmp_path, "scored"))
    group = gate.group(MEMBER.node_id)
    last = group.rollouts[1]
    assert last.trace is not None
    texts = tuple(replace(r, trace=None) for r in group.rollouts)
    for changed, reason in (
        (replace(group, rollouts=texts), RefusalReason.UNUSABLE_TEXT),
        (replace(group, rollouts=(group.rollouts[0], longer(last))), RefusalReason.WRONG_EPISODE),
    ):
        result = await gate.admission.admit(make_sealed(changed, MEMBER), MEMBER.node_id)
        assert isinstance(result, Refused) and result.reason is reason, result


def longer(rollout):  # type: ignore[no-untyped-def]
    """The same episode with two more searches in front."""
    trace = rollout.trace
    start = int(np.flatnonzero(trace.turn_ids == 1)[0])
    ids = np.concatenate([trace.token_ids[:start]] * 2 + [trace.token_ids])
    mask = np.concatenate([trace.action_mask[:start]] * 2 + [trace.action_mask])
    logprobs = np.concatenate([trace.logprobs[:start]] * 2 + [trace.logprobs])
    turns = np.repeat(np.arange(3, dtype=np.int16), start)
    turn_ids = np.concatenate([turns, np.full(ids.size - turns.size, 3, np.int16)])
    changed = replace(trace, token_ids=ids, action_mask=mask, logprobs=logprobs, turn_ids=turn_ids)
    return replace(rollout, actions=(*rollout.actions[:1] * 3, rollout.actions[-1]), trace=changed)


# --- other code -----------------------------------------------------------------------------------


async def test_other_code_of_one_version_is_refused_for_nothing(tmp_path: Path) -> None:
    """The author changed what a search says, and forgot to say so."""
    for name in ("here", "there", "same"):
        (tmp_path / name).mkdir()
    gate = Gate(web(tmp_path / "here", "replayable"))
    there = web(tmp_path / "there", "replayable")
    (tmp_path / "there" / "web.py").write_text(CODE.replace("page ", "side "))
    group = replace(gate.group(MEMBER.node_id), verifier=build_environment(there).verifier)
    refused = await gate.admission.admit(make_sealed(group, MEMBER), MEMBER.node_id)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.OTHER_ENVIRONMENT
    assert gate.reputation.score(MEMBER.node_id) == 0.0
    assert build_environment(web(tmp_path / "same", "replayable")).verifier == gate.environment.verifier


def test_python_and_imported_packages_are_part_of_the_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "numeric.py").write_text("import numpy\n\n\nclass Rule:\n    pass\n")
    rule = load_object(f"{tmp_path / 'numeric.py'}:Rule")
    assert isinstance(rule, type)
    first = code_version(rule)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.0")
    other_package = code_version(rule)
    monkeypatch.setattr(plugins, "PYTHON", "2.7")
    assert len({first, other_package, code_version(rule), "builtin"}) == 4


# --- kept at home --------------------------------------------------------------------------------


def own_agent(gate: Gate, **replay: int) -> Agent:
    """A node that has this environment."""
    clock = ManualClock()
    config = gate.admission._context.config.model_copy(update={"replay": ReplayConfig(**replay)})  # type: ignore[arg-type]
    return make_agent(
        make_context(config, OURSELVES, clock=clock),
        MemoryGroupStore(clock, 10**8),
        tokenizer=TOKENIZER,
        verifier=InlineVerifier({"web": gate.environment}),
        environments=frozenset({"web"}),
    )


async def test_episodes_of_ones_own_never_leave_and_none_of_others_come_in(tmp_path: Path) -> None:
    gate = Gate(web(tmp_path, "own"))
    assert isinstance(await gate.admit(MEMBER), Refused)
    agent = own_agent(gate)
    await agent.local.put(gate.group(OURSELVES.node_id))
    ((_, sealed),) = await agent.store.since(Cursor(), 4, own_only=True)
    streams = agent.streams
    info = streams._known[sealed.digest]
    wanted = StreamFilter(relay=True, wants_zero_variance=True)
    assert not streams._is_worth_sending(info, MEMBER.node_id, wanted)
    with pytest.raises(LookupError):
        await streams.fetch(MEMBER.node_id, sealed.digest)


async def test_an_episode_of_ones_own_that_the_streams_forgot_is_not_served_by_its_digest(tmp_path: Path) -> None:
    gate = Gate(web(tmp_path, "own"))
    agent = own_agent(gate, max_groups=1)
    for number in range(2):
        await agent.local.put(replace(gate.group(OURSELVES.node_id), created_at_s=float(number)))
    (_, forgotten), (_, newest) = await agent.store.since(Cursor(), 4, own_only=True)
    streams = agent.streams
    assert list(streams._known) == [newest.digest]
    for sealed in (forgotten, newest):
        with pytest.raises(LookupError):
            await streams.fetch(MEMBER.node_id, sealed.digest)


def test_a_generator_that_follows_makes_no_episodes_that_stay(tmp_path: Path) -> None:
    """Nobody would learn from them: not its trainer, and it has none of its own."""
    own, other = web(tmp_path, "own"), EnvironmentConfig(name="sums", kind="calculator")
    follower = {"roles": (Role.GENERATOR,), "environments": (own, other)}
    with pytest.raises(ValueError, match=r"'web' has exchange \"own\".*generator\.env_weights"):
        NodeConfig.model_validate(follower)
    with pytest.raises(ValueError, match="'web'"):
        NodeConfig.model_validate({**follower, "generator": {"env_weights": {"web": 1.0, "sums": 1.0}}})
    NodeConfig.model_validate({**follower, "generator": {"env_weights": {"sums": 1.0}}})
    NodeConfig.model_validate({**follower, "roles": (Role.TRAINER, Role.GENERATOR)})


async def test_what_leaves_is_repeatable_and_what_stays_may_be_anything(tmp_path: Path) -> None:
    await require_repeatable([web(tmp_path, "own")])
    await require_repeatable([web(tmp_path, "scored")])


# --- weights --------------------------------------------------------------------------------------


def test_named_rewards_weigh_as_the_configuration_says_and_change_the_version() -> None:
    plain = EnvironmentConfig(name="get", kind="look_up")
    weighed = plain.model_copy(update={"reward_weights": {"outcome": 0.75, "found": 0.25}})
    environment, other = build_environment(weighed), build_environment(plain)
    right = environment.demonstration(3)  # type: ignore[attr-defined]
    searched = (*right[:-1], "Answer: nobody")
    assert [replay(environment, 3, each).reward for each in (right, searched, ("x",))] == [1.0, 0.25, 0.0]
    assert replay(other, 3, searched).reward == 0.0
    assert environment.verifier != other.verifier, "nodes that weigh otherwise do not charge each other"


def test_a_weight_of_no_reward_is_refused_with_the_known_ones() -> None:
    config = EnvironmentConfig(name="get", kind="look_up", reward_weights={"fond": 1.0})
    with pytest.raises(ValueError, match=r"fond; its rewards: found, outcome"):
        build_environment(config)


def test_a_scored_environment_says_how_and_a_shipped_one_is_replayed(tmp_path: Path) -> None:
    config = web(tmp_path, "scored")
    (tmp_path / "web.py").write_text(CODE.replace("def score", "def judge"))
    with pytest.raises(ValueError, match="method score"):
        build_environment(config)
    with pytest.raises(ValueError, match=r"scored_from: empty.*list the node ids to believe"):
        web(tmp_path, "scored", scored_from=())
    with pytest.raises(ValueError, match="kind calculator is replayed"):
        EnvironmentConfig(name="x", kind="calculator", exchange="scored")
