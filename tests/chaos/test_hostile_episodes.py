"""Hostile episodes at admission: whatever the replay here does not show is refused, with its reason."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from swarm.clock import ManualClock
from swarm.config import EnvironmentConfig, GeneratorConfig, NodeConfig, SandboxConfig
from swarm.environments.load import build_environment
from swarm.environments.look_up import LookUp, LookUpEnvironment
from swarm.environments.sandbox import verifier
from swarm.episode import Actions, TurnStatus
from swarm.events import GroupPut
from swarm.exchange.checks import episode_checks
from swarm.model.tokenizer import CharTokenizer
from swarm.peers.peer_table import Peers
from swarm.peers.reputation import Reputation
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import InlineVerifier, ToyTokenizer, make_identity, make_sealed
from swarm.testing.episodes import make_episode_group
from swarm.testing.nodes import make_admission, make_context
from swarm.types import (
    ClaimedTurn,
    Correction,
    EpisodeLimits,
    FinishReason,
    RefusalReason,
    Refused,
    Rollout,
    RolloutGroup,
    Sampling,
    ScoredGroup,
    TokenTrace,
)

HOSTILE, OURSELVES = make_identity(1), make_identity(3)
CONFIG = EnvironmentConfig(name="get", kind="look_up", params={"style": "char", "people": 3})
SAMPLING = Sampling(max_new_tokens=8)
TOKENIZER = CharTokenizer()
LIMITS = EpisodeLimits(max_new_tokens=8, max_episode_tokens=64)
Change = Callable[[Rollout], Rollout]


def environment() -> LookUpEnvironment:
    made = build_environment(CONFIG)
    assert isinstance(made, LookUpEnvironment)
    return made


ENVIRONMENT = environment()
TASK = next(i for i in range(100) if not ENVIRONMENT.task(i).is_held_out)
RIGHT = ENVIRONMENT.demonstration(TASK)
EPISODES: list[Actions] = [
    RIGHT,
    RIGHT[:1] + RIGHT[2:],
    ("zzz",),
    (
        RIGHT[0],
        RIGHT[0],
        "x",
    ),
]


class Gate:
    """A node's admission with a real environment of several turns, replayed in process."""

    def __init__(self, max_episode_tokens: int = 64, version: str = "") -> None:
        clock = ManualClock()
        config = NodeConfig(
            environments=(CONFIG,),
            generator=GeneratorConfig(group_size=4, max_new_tokens=8, max_episode_tokens=max_episode_tokens),
        )
        played = environment()
        played.verifier = version or played.verifier
        self.reputation = Reputation(clock, 6000)
        self.admission = make_admission(
            make_context(config, OURSELVES, clock=clock),
            MemoryGroupStore(clock, 10**8),
            tokenizer=TOKENIZER,
            verifier=InlineVerifier({"get": played}),
            peers=Peers(OURSELVES.node_id),
            reputation=self.reputation,
            environments=frozenset({"get"}),
        )

    async def admit(self, group: RolloutGroup) -> ScoredGroup | Refused:
        return await self.admission.admit(make_sealed(group, HOSTILE), HOSTILE.node_id)


def honest() -> RolloutGroup:
    return make_episode_group(ENVIRONMENT, TASK, EPISODES, TOKENIZER, HOSTILE.node_id, SAMPLING)


def on_first(change: Change) -> RolloutGroup:
    group = honest()
    return replace(group, rollouts=(change(group.rollouts[0]), *group.rollouts[1:]))


def with_trace(**changes: Callable[[TokenTrace], object]) -> Change:
    def change(rollout: Rollout) -> Rollout:
        trace = rollout.trace
        assert trace is not None
        return replace(rollout, trace=replace(trace, **{name: make(trace) for name, make in changes.items()}))  # type: ignore[arg-type]

    return change


def observed(trace: TokenTrace) -> int:
    """Place of the first observation token."""
    return int(np.flatnonzero(~trace.action_mask)[0])


def with_other_token(trace: TokenTrace) -> np.ndarray:
    ids = trace.token_ids.copy()
    ids[observed(trace)] = 2 + (int(ids[observed(trace)]) - 1) % 40
    return ids


def keep(rollout: Rollout, is_kept: np.ndarray, **changes: object) -> Rollout:
    """Some of its tokens alone."""
    trace = rollout.trace
    assert trace is not None and trace.logprobs is not None
    kept = replace(
        trace,
        token_ids=trace.token_ids[is_kept],
        action_mask=trace.action_mask[is_kept],
        logprobs=trace.logprobs[is_kept],
        turn_ids=trace.turn_ids[is_kept],
    )
    return replace(rollout, trace=kept, **changes)  # type: ignore[arg-type]


def places(rollout: Rollout) -> tuple[np.ndarray, int]:
    """Of its tokens, and the first observation's."""
    assert rollout.trace is not None
    return np.arange(rollout.trace.token_ids.size), observed(rollout.trace)


def without_observation(rollout: Rollout) -> Rollout:
    at, first = places(rollout)
    return keep(rollout, at != first)


def cut_short(rollout: Rollout) -> Rollout:
    """Its first turn only, as if the environment had ended there."""
    at, end = places(rollout)
    turn = {"actions": rollout.actions[:1], "claimed_turns": rollout.claimed_turns[:1]}
    return keep(rollout, at < end, claimed_reward=0.0, **turn)


def episode(actions: Actions, task_id: int = TASK, prompt_of: int = TASK) -> RolloutGroup:
    """A group whose first episode was played on another task, or has other actions than the environment takes."""
    other = make_episode_group(ENVIRONMENT, task_id, [actions, *EPISODES[1:]], TOKENIZER, HOSTILE.node_id, SAMPLING)
    mine = honest()
    assert prompt_of == mine.task_id
    return replace(mine, rollouts=(other.rollouts[0], *mine.rollouts[1:]))


def continued(rollout: Rollout) -> Rollout:
    """One more action after the end."""
    trace = rollout.trace
    assert trace is not None and trace.logprobs is not None
    more = TOKENIZER.encode_response("abc")
    return replace(
        rollout,
        actions=(*rollout.actions, "abc"),
        claimed_turns=(),
        trace=replace(
            trace,
            token_ids=np.concatenate([trace.token_ids, np.array(more, np.int32)]),
            action_mask=np.concatenate([trace.action_mask, np.ones(len(more), np.bool_)]),
            logprobs=np.concatenate([trace.logprobs, np.full(len(more), -1.0, np.float32)]),
            turn_ids=np.concatenate([trace.turn_ids, np.full(len(more), len(rollout.actions), np.int16)]),
        ),
    )


def claiming(reward: float | None = None, status: TurnStatus | None = None) -> Change:
    def change(rollout: Rollout) -> Rollout:
        first, *others = rollout.claimed_turns
        first = ClaimedTurn(
            reward=first.reward if reward is None else reward, status=first.status if status is None else status
        )
        return replace(rollout, claimed_turns=(first, *others))

    return change


OTHER = next(i for i in range(TASK + 1, 100) if not ENVIRONMENT.task(i).is_held_out)


async def test_honest_episodes_are_admitted_with_what_the_replay_here_says() -> None:
    scored = await Gate().admit(honest())
    assert isinstance(scored, ScoredGroup), scored
    assert scored.rewards.tolist() == [1.0, float(EPISODES[1][-1] == RIGHT[-1]), 0.0, 0.0]
    assert [len(outcome.transitions) for outcome in scored.outcomes] == [3, 2, 1, 3]
    assert scored.outcomes[0].transitions[0].reward == 0.5 and scored.outcomes[0].rewards["found"] == 1.0
    assert scored.correction is Correction.EXACT
    found = [outcome.rewards["found"] for outcome in scored.outcomes]
    assert GroupPut.of(scored).reward_parts["found"] == sum(found) / len(found) > 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_trace(token_ids=with_other_token), RefusalReason.WRONG_EPISODE),
        (without_observation, RefusalReason.WRONG_EPISODE),
        (cut_short, RefusalReason.WRONG_EPISODE),
        (continued, RefusalReason.WRONG_EPISODE),
        (with_trace(action_mask=lambda t: np.ones(t.token_ids.size, np.bool_)), RefusalReason.BAD_TOKENS),
        (with_trace(turn_ids=lambda t: np.zeros(t.token_ids.size, np.int16)), RefusalReason.BAD_TOKENS),
        (lambda r: replace(r, actions=(*r.actions[:-1], "zzz")), RefusalReason.TEXT_MISMATCH),
        (lambda r: replace(r, actions=r.actions[:-1]), RefusalReason.BAD_TOKENS),
        (lambda r: replace(r, actions=(*r.actions, "a")), RefusalReason.BAD_TOKENS),
        (lambda r: replace(r, finish=FinishReason.LENGTH), RefusalReason.BAD_TOKENS),
        (lambda r: replace(r, claimed_reward=0.0), RefusalReason.FALSE_REWARD),
        (claiming(reward=0.25), RefusalReason.FALSE_REWARD),
        (claiming(reward=float("nan")), RefusalReason.FALSE_REWARD),
        (claiming(status=TurnStatus.TOOL_ERROR), RefusalReason.FALSE_REWARD),
        (lambda r: replace(r, claimed_turns=r.claimed_turns[:-1]), RefusalReason.MALFORMED),
        (lambda r: replace(r, claimed_turns=r.claimed_turns * 20), RefusalReason.MALFORMED),
        (lambda r: replace(r, actions=r.actions + ("",) * 600, trace=None, claimed_turns=()), RefusalReason.MALFORMED),
    ],
)
async def test_a_changed_episode_is_refused_and_charged(change: Change, reason: RefusalReason) -> None:
    gate = Gate()
    refused = await gate.admit(on_first(change))
    assert isinstance(refused, Refused) and refused.reason is reason, refused
    assert gate.reputation.score(HOSTILE.node_id) < 0


async def test_observations_of_another_task_are_refused() -> None:
    refused = await Gate().admit(episode(ENVIRONMENT.demonstration(OTHER), task_id=OTHER))
    assert isinstance(refused, Refused) and refused.reason in (
        RefusalReason.WRONG_EPISODE,
        RefusalReason.FALSE_REWARD,
    )


async def test_a_prompt_of_another_task_is_refused() -> None:
    group = honest()
    other = np.array(TOKENIZER.encode_prompt(ENVIRONMENT.task(OTHER)), np.int32)
    refused = await Gate().admit(replace(group, prompt_ids=other))
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.WRONG_PROMPT


async def test_an_episode_beyond_its_limit_is_refused_before_it_is_replayed() -> None:
    refused = await Gate(max_episode_tokens=20).admit(honest())
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.BAD_TOKENS


async def test_another_version_of_the_environment_is_refused_for_nothing() -> None:
    gate = Gate(version="look_up of another release")
    refused = await gate.admit(on_first(with_trace(token_ids=with_other_token)))
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.OTHER_ENVIRONMENT
    both = f"{ENVIRONMENT.name} is 'look_up of another release' here and '{ENVIRONMENT.verifier}' there"
    assert refused.detail.endswith(both), "a user sees which two versions differ"
    assert gate.reputation.score(HOSTILE.node_id) == 0
    scored = await Gate(version="look_up of another release").admit(honest())
    assert isinstance(scored, ScoredGroup), "where the replay shows the same nothing is wrong"


async def test_an_episode_of_another_tokenizer_is_replayed_as_text() -> None:
    group = make_episode_group(ENVIRONMENT, TASK, EPISODES, CharTokenizer(), HOSTILE.node_id, SAMPLING)
    theirs = replace(group, tokenizer_digest=ToyTokenizer().digest)
    scored = await Gate().admit(theirs)
    assert isinstance(scored, ScoredGroup) and scored.correction is Correction.TEXT_ONLY
    assert scored.outcomes[0].transitions[0].messages, "the learner encodes what the environment said here"


async def test_several_turns_of_a_single_answer_are_refused() -> None:
    gate = Gate()
    gate.admission._limits = replace(gate.admission._limits, episode_environments=frozenset())
    refused = await gate.admit(honest())
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.BAD_TOKENS


WANDERING: Actions = (*(f"?{word}" for word in "abcd"), RIGHT[-1])  # as long as the environment lets it


def texts_only(group: RolloutGroup, *actions: Actions) -> RolloutGroup:
    rollouts = [
        replace(each, actions=told, trace=None, claimed_turns=())
        for each, told in zip(group.rollouts, actions, strict=True)
    ]
    return replace(group, rollouts=tuple(rollouts))


async def test_texts_alone_become_no_longer_row_than_an_episode_may_be() -> None:
    """A text says nothing of what the environment answers: 64 turns of 4 results each would be 50,000 characters."""
    group = make_episode_group(ENVIRONMENT, TASK, [WANDERING] * 4, TOKENIZER, HOSTILE.node_id, SAMPLING)
    hostile = texts_only(group, *[WANDERING] * 4)
    gate = Gate(max_episode_tokens=20)
    result = await gate.admit(hostile)
    assert gate.reputation.score(HOSTILE.node_id) >= 0, "an honest node of another tokenizer cannot know"
    assert isinstance(result, Refused) and result.reason is RefusalReason.UNUSABLE_TEXT
    assert isinstance(await Gate(max_episode_tokens=64).admit(hostile), ScoredGroup), "one that fits is learned"


@pytest.mark.parametrize("has_trace", [True, False])
async def test_an_observation_without_tokens_here_is_a_refusal(
    has_trace: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ConfigError that left admission would end the node."""
    group = honest()
    say = LookUp._say
    monkeypatch.setattr(LookUp, "_say", lambda self, text, *others: say(self, f"\u2603{text}", *others))
    gate = Gate()
    refused = await gate.admit(group if has_trace else texts_only(group, *EPISODES))
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.UNUSABLE_TEXT
    assert gate.reputation.score(HOSTILE.node_id) == 0


async def test_texts_that_the_sandbox_cannot_be_sent_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A character of one byte may be six on the way there."""
    gate = Gate()
    gate.admission._verifier = verifier.SandboxVerifier((CONFIG,), SandboxConfig())
    monkeypatch.setattr(verifier, "MAX_REQUEST_BYTES", 100)
    refused = await gate.admit(honest())
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.UNUSABLE_TEXT


def test_a_text_in_many_tokens_counts_among_those_of_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 spaces are two tokens, so one honest action may have many more than its text usually has."""
    group, encode = honest(), CharTokenizer.encode_response
    monkeypatch.setattr(
        CharTokenizer, "encode_response", lambda self, text: encode(self, text)[: 1 if text == "zzz" else None]
    )
    monkeypatch.setattr(episode_checks, "CUT_EXTRA", 0)
    alone = replace(group, rollouts=tuple(each for each in group.rollouts if each.actions == ("zzz",)))
    assert len(alone.rollouts) == 1
    assert episode_checks.check_episodes(group, TOKENIZER, LIMITS) is None
    finding = episode_checks.check_episodes(alone, TOKENIZER, LIMITS)
    assert finding is not None and finding[0] is RefusalReason.UNUSABLE_TEXT
