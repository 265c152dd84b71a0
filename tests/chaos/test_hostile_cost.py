"""What a group of a few hundred bytes may cost before it is refused: letters that are encoded here, memory, and the
event loop.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from swarm.clock import ManualClock
from swarm.config import EnvironmentConfig, GeneratorConfig, NodeConfig
from swarm.environments.look_up import LookUpEnvironment
from swarm.exchange import episode_checks, novelty
from swarm.model.tokenizer import CharTokenizer
from swarm.peers.peer_table import Peers
from swarm.peers.reputation import Reputation
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import InlineVerifier, make_identity, make_sealed
from swarm.testing.episodes import make_episode_group
from swarm.testing.nodes import make_admission, make_context
from swarm.types import RefusalReason, Refused, RolloutGroup, Sampling, ScoredGroup

HOSTILE, OURSELVES = make_identity(1), make_identity(3)
CONFIG = EnvironmentConfig(name="get", kind="look_up", params={"style": "char", "people": 3, "max_turns": 64})
ENVIRONMENT = LookUpEnvironment(CONFIG)
TASK = next(i for i in range(100) if not ENVIRONMENT.task(i).is_held_out)
ANOTHER_TOKENIZER = b"\7" * 32


class CountingTokenizer(CharTokenizer):
    """Counts the letters that it encodes, and those that it encodes on the event loop."""

    num_letters = 0
    num_on_loop = 0
    is_offloaded = False

    def encode_response(self, text: str) -> list[int]:
        self.num_letters += len(text)
        self.num_on_loop += 0 if self.is_offloaded else len(text)
        return super().encode_response(text)

    async def offload(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.is_offloaded = True
        try:
            return function(*arguments)
        finally:
            self.is_offloaded = False


async def admitted(group: RolloutGroup, tokenizer: CountingTokenizer) -> ScoredGroup | Refused:
    clock = ManualClock()
    config = NodeConfig(
        environments=(CONFIG,), generator=GeneratorConfig(group_size=4, max_new_tokens=8, max_episode_tokens=64)
    )
    admission = make_admission(
        make_context(config, OURSELVES, clock=clock, offload=tokenizer.offload, in_place_bytes=0),
        MemoryGroupStore(clock, 10**8),
        tokenizer=tokenizer,
        verifier=InlineVerifier({"get": ENVIRONMENT}),
        peers=Peers(OURSELVES.node_id),
        reputation=Reputation(clock, 6000),
        environments=frozenset({"get"}),
    )
    return await admission.admit(make_sealed(group, HOSTILE), HOSTILE.node_id)


def of_texts(*texts: str) -> RolloutGroup:
    """Four equal episodes, as of a node with another tokenizer."""
    sampling = Sampling(max_new_tokens=8)
    right = ENVIRONMENT.demonstration(TASK)
    group = make_episode_group(ENVIRONMENT, TASK, [right] * 4, CharTokenizer(), HOSTILE.node_id, sampling)
    rollouts = tuple(replace(rollout, actions=texts, trace=None) for rollout in group.rollouts)
    return replace(group, tokenizer_digest=ANOTHER_TOKENIZER, rollouts=rollouts)


@pytest.mark.parametrize("is_bounded", [True, False], ids=["bounded", "mutation: turns alone are"])
async def test_an_episode_of_long_turns_is_not_encoded(is_bounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_bounded:
        monkeypatch.setattr(episode_checks, "TEXT_CHARS_PER_TOKEN", 10**6)
    tokenizer = CountingTokenizer()
    refused = await admitted(of_texts(*["a" * 250] * 63, "a" * 256), tokenizer)
    assert isinstance(refused, Refused)
    assert (tokenizer.num_letters == 0) == is_bounded


async def test_encoding_stops_where_an_episode_is_longer_than_ours() -> None:
    tokenizer = CountingTokenizer()
    refused = await admitted(of_texts(*["abcdefg"] * 64), tokenizer)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.UNUSABLE_TEXT
    assert 0 < tokenizer.num_letters <= 64 + 7


async def test_no_text_is_encoded_on_the_event_loop() -> None:
    tokenizer = CountingTokenizer()
    taken = await admitted(of_texts(*ENVIRONMENT.demonstration(TASK)), tokenizer)
    assert isinstance(taken, ScoredGroup), taken
    assert tokenizer.num_letters > 0 and tokenizer.num_on_loop == 0


async def test_nothing_of_a_group_that_is_too_old_is_read_or_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[RolloutGroup]()
    monkeypatch.setattr(novelty, "_hash_answers", read.append)
    group = of_texts(" " * 60_000)
    refused = await admitted(replace(group, created_at_s=group.created_at_s - 86_400), CountingTokenizer())
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.TOO_OLD
    assert read == []
