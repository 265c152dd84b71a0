"""Episodes of several conversations and roles: admitted as played, refused otherwise, and learned role by role."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from swarm.clock import ManualClock
from swarm.config import EnvironmentConfig, GeneratorConfig, NodeConfig
from swarm.environments.environment import Problem
from swarm.environments.load import build_environment
from swarm.environments.replay import ReplayedEpisode, replay
from swarm.episode import Actions, Message, Transition
from swarm.extras.environments.nim import Game, NimEnvironment
from swarm.extras.environments.notes import NotesEnvironment
from swarm.model.tokenizer import CharTokenizer
from swarm.objectives import coefficients
from swarm.objectives.batch import Batch
from swarm.objectives.coefficients import with_advantages
from swarm.objectives.draw_batch import make_batch
from swarm.objectives.methods import load_recipe
from swarm.peers.peer_table import Peers
from swarm.peers.reputation import Reputation
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import InlineVerifier, make_identity, make_sealed
from swarm.testing.episodes import make_episode_group
from swarm.testing.nodes import make_admission, make_context
from swarm.types import Correction, Draw, DrawnGroup, RefusalReason, Refused, RolloutGroup, Sampling, ScoredGroup

HOSTILE, OURSELVES = make_identity(1), make_identity(3)
TOKENIZER = CharTokenizer()
SAMPLING = Sampling(max_new_tokens=16)
NIM = EnvironmentConfig(name="nim", kind="nim", params={"style": "char", "heaps": 2, "stones": 4})
NOTES = EnvironmentConfig(name="notes", kind="notes", params={"style": "char", "parts": 2})
Played = NimEnvironment | NotesEnvironment


def played(config: EnvironmentConfig) -> Played:
    made = build_environment(config)
    assert isinstance(made, NimEnvironment | NotesEnvironment)
    return made


def task_of(environment: Played) -> int:
    """A long one that may be trained on."""
    tasks = [task_id for task_id in range(200) if not environment.task(task_id).is_held_out]
    return max(tasks, key=lambda task_id: len(environment.demonstration(task_id)))


def episodes_of(environment: Played, task_id: int) -> list[Actions]:
    """Perfect, broken off by an impossible action, and something between."""
    right = environment.demonstration(task_id)
    if isinstance(environment, NimEnvironment):
        heaps = environment.problem(task_id).entry
        losing = (f"a{heaps[0]}", f"b{heaps[1]}")  # the second side takes the rest
        return [right, losing, ("z",), (right[0], "e9")]
    return [right, ("", right[1], "0"), (right[0], "x", right[2]), (right[0], right[1], "?")]


def honest(config: EnvironmentConfig) -> RolloutGroup:
    environment = played(config)
    task_id = task_of(environment)
    episodes = episodes_of(environment, task_id)
    return make_episode_group(environment, task_id, episodes, TOKENIZER, HOSTILE.node_id, SAMPLING)


async def admit(config: EnvironmentConfig, group: RolloutGroup) -> ScoredGroup | Refused:
    clock = ManualClock()
    node = NodeConfig(
        environments=(config,), generator=GeneratorConfig(group_size=4, max_new_tokens=16, max_episode_tokens=192)
    )
    admission = make_admission(
        make_context(node, OURSELVES, clock=clock),
        MemoryGroupStore(clock, 10**8),
        tokenizer=TOKENIZER,
        verifier=InlineVerifier({config.name: played(config)}),
        peers=Peers(OURSELVES.node_id),
        reputation=Reputation(clock, 6000),
        environments=frozenset({config.name}),
    )
    return await admission.admit(make_sealed(group, HOSTILE), HOSTILE.node_id)


def batch_of(scored: ScoredGroup) -> Batch:
    draw = Draw(step=1, groups=(DrawnGroup(scored=scored, age_steps=0, use=1),), num_zero_variance=0)
    return make_batch(draw, TOKENIZER)


@pytest.mark.parametrize("config", [NIM, NOTES], ids=lambda config: config.name)
async def test_an_honest_group_is_admitted_and_every_token_is_in_its_conversation(config: EnvironmentConfig) -> None:
    group = honest(config)
    scored = await admit(config, group)
    assert isinstance(scored, ScoredGroup), scored
    batch = batch_of(scored)
    assert batch.conversation_ids is not None and batch.num_rollouts == len(group.rollouts), "rollouts, not rows"
    environment = played(config)
    for row, rollout in enumerate(group.rollouts):
        opening = environment.task(group.task_id).messages[-1].content
        transitions = replay(environment, group.task_id, rollout.actions).transitions
        texts, here = [opening], 0  # each conversation as it reads, an end token behind every action
        for action, transition in zip(rollout.actions, transitions, strict=True):
            texts[here] += action + "|"
            if not transition.is_end:
                here = transition.conversation
                texts += [""] * (here == len(texts))
                texts[here] += "".join(message.content for message in transition.messages)
        ids, own = batch.token_ids[row], batch.conversation_ids[row]
        num_tokens = group.rollouts[row].trace.token_ids.size  # type: ignore[union-attr]
        for number, text in enumerate(texts):
            read = ids[:num_tokens][own[:num_tokens] == number].tolist()
            shown = "".join("|" if index in TOKENIZER.eos_ids else TOKENIZER.decode([index]) for index in read)
            assert ("" if number else opening) + shown == text


def with_other_notes(group: RolloutGroup) -> RolloutGroup:
    """Notes of the first part that say more than its action did: an opening that the model did not write."""
    first = group.rollouts[1]  # its first note is empty
    trace = first.trace
    assert trace is not None
    ids = trace.token_ids.copy()
    opening = np.flatnonzero(~trace.action_mask)
    ids[opening[2]] = TOKENIZER.encode_response("7")[0]
    changed = replace(first, trace=replace(trace, token_ids=ids))
    return replace(group, rollouts=(group.rollouts[0], changed, *group.rollouts[2:]))


async def test_an_opening_that_the_replay_does_not_show_is_refused() -> None:
    refused = await admit(NOTES, with_other_notes(honest(NOTES)))
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.WRONG_EPISODE, refused


async def test_a_group_in_other_tokens_is_read_conversation_by_conversation() -> None:
    scored = await admit(NOTES, replace(honest(NOTES), tokenizer_digest=b"o" * 32))
    assert isinstance(scored, ScoredGroup) and scored.correction is Correction.TEXT_ONLY
    exact = await admit(NOTES, honest(NOTES))
    assert isinstance(exact, ScoredGroup)
    ours, theirs = (
        batch_of(exact),
        make_batch(
            Draw(step=1, groups=(DrawnGroup(scored=scored, age_steps=0, use=1),), num_zero_variance=0),
            TOKENIZER,
            task_of=lambda _, task_id: played(NOTES).task(task_id),
        ),
    )
    assert ours.conversation_ids is not None and theirs.conversation_ids is not None
    assert ours.token_ids.tolist() == theirs.token_ids.tolist()
    assert ours.conversation_ids.tolist() == theirs.conversation_ids.tolist()


async def test_each_role_has_its_own_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    scored = await admit(NIM, honest(NIM))
    assert isinstance(scored, ScoredGroup)
    batch = batch_of(scored)
    outcomes = [replay(played(NIM), scored.group.task_id, rollout.actions) for rollout in scored.group.rollouts]

    def centred(role: str) -> list[float]:
        rewards = np.array([outcome.rewards[role] for outcome in outcomes], np.float64)
        return ((rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)).tolist()

    first, second = centred("first"), centred("second")
    found = with_advantages(load_recipe("grpo"), batch, "all").advantages
    for row, outcome in enumerate(outcomes):
        for turn, transition in enumerate(outcome.transitions):
            tokens = (batch.turn_ids[row] == turn) & batch.mask[row]
            expected = (first if transition.role == "first" else second)[row]
            torch.testing.assert_close(found[row][tokens].double(), torch.full((int(tokens.sum()),), expected).double())
    monkeypatch.setattr(coefficients, "_tokens_of_roles", lambda batch: {"": batch.mask})
    assert not torch.equal(with_advantages(load_recipe("grpo"), batch, "all").advantages, found), "by the outcome alone"


async def test_a_group_whose_outcomes_are_equal_has_signal_where_a_role_won_more() -> None:
    scored = await admit(NIM, honest(NIM))
    assert isinstance(scored, ScoredGroup)
    alike = replace(scored, rewards=np.zeros(4, np.float32))
    assert alike.has_signal
    one = replace(alike, outcomes=scored.outcomes[:1] * 4)
    assert not one.has_signal


class Skipping(NimEnvironment):
    """Answers in a conversation that it did not open."""

    def begin(self, problem: Problem) -> Game:
        game = super().begin(problem)
        game.step = lambda action: Transition(messages=(Message(role="user", content="a"),), conversation=2)
        return game


def test_a_conversation_that_nobody_opened_is_an_error() -> None:
    episode = ReplayedEpisode(Skipping(NIM), task_of(played(NIM)))
    with pytest.raises(ValueError, match="conversation 2 of 1 that began"):
        episode.step("a1")
