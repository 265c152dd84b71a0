"""Cost of a group of a few hundred bytes before it is refused: letters that are encoded here, memory, and the
event loop.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest

from swarm.clock import ManualClock
from swarm.config import EnvironmentConfig, GeneratorConfig, NodeConfig
from swarm.environments.look_up import LookUpEnvironment
from swarm.environments.sandbox.time_accounts import Allowance, TimeAccounts
from swarm.exchange import admission, novelty
from swarm.exchange.admission import Admission
from swarm.exchange.checks import admission_checks
from swarm.exchange.novelty import hash_answers
from swarm.interfaces import EnvironmentShape, Producer
from swarm.model.tokenizer import CharTokenizer
from swarm.peers.peer_table import Peers
from swarm.peers.reputation import Reputation
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import InlineVerifier, make_identity, make_sealed
from swarm.testing.episodes import make_episode_group
from swarm.testing.nodes import make_admission, make_context
from swarm.types import (
    RefusalReason,
    Refused,
    RolloutGroup,
    Sampling,
    ScoredGroup,
    SealedGroup,
)
from swarm.wire.envelopes import open_group

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


def make_gate(tokenizer: CountingTokenizer, **changes: Any) -> Admission:
    """Admission with the environment above; what is not computed on the event loop is `offload`ed by the tokenizer."""
    clock = ManualClock()
    config = NodeConfig(
        environments=(CONFIG,), generator=GeneratorConfig(group_size=4, max_new_tokens=8, max_episode_tokens=64)
    )
    return make_admission(
        make_context(config, OURSELVES, clock=clock, offload=tokenizer.offload, in_place_bytes=0),
        MemoryGroupStore(clock, 10**8),
        tokenizer=tokenizer,
        verifier=changes.pop("verifier", InlineVerifier({"get": ENVIRONMENT})),
        peers=Peers(OURSELVES.node_id),
        reputation=Reputation(clock, 6000),
        environments=frozenset({"get"}),
        **changes,
    )


async def admitted(group: RolloutGroup, tokenizer: CountingTokenizer, **changes: Any) -> ScoredGroup | Refused:
    return await make_gate(tokenizer, **changes).admit(make_sealed(group, HOSTILE), HOSTILE.node_id)


def of_texts(*texts: str) -> RolloutGroup:
    """Four equal episodes, as of a node with another tokenizer."""
    sampling = Sampling(max_new_tokens=8)
    right = ENVIRONMENT.demonstration(TASK)
    group = make_episode_group(ENVIRONMENT, TASK, [right] * 4, CharTokenizer(), HOSTILE.node_id, sampling)
    rollouts = tuple(replace(rollout, actions=texts, trace=None, claimed_turns=()) for rollout in group.rollouts)
    return replace(group, tokenizer_digest=ANOTHER_TOKENIZER, rollouts=rollouts)


async def test_an_episode_of_long_turns_is_not_encoded() -> None:
    tokenizer = CountingTokenizer()
    refused = await admitted(of_texts(*["a" * 250] * 63, "a" * 256), tokenizer)
    assert isinstance(refused, Refused)
    assert tokenizer.num_letters == 0


async def test_encoding_stops_where_an_episode_is_longer_than_ours() -> None:
    tokenizer = CountingTokenizer()
    refused = await admitted(of_texts(*[f"abcde{turn:02d}" for turn in range(64)]), tokenizer)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.UNUSABLE_TEXT
    assert 0 < tokenizer.num_letters <= 64 + 7


async def test_no_text_is_encoded_on_the_event_loop() -> None:
    tokenizer = CountingTokenizer()
    taken = await admitted(of_texts(*ENVIRONMENT.demonstration(TASK)), tokenizer)
    assert isinstance(taken, ScoredGroup), taken
    assert tokenizer.num_letters > 0 and tokenizer.num_on_loop == 0


async def test_a_text_is_encoded_once_whatever_asks_for_its_tokens() -> None:
    """Form, cut and replay ask for the tokens of four equal episodes."""
    tokenizer, texts = CountingTokenizer(), ENVIRONMENT.demonstration(TASK)
    taken = await admitted(of_texts(*texts), tokenizer)
    assert isinstance(taken, ScoredGroup), taken
    assert tokenizer.num_letters == sum(map(len, texts))


@pytest.mark.parametrize("is_same", [True, False], ids=["same version", "another version"])
async def test_more_turns_than_the_environment_takes_are_not_encoded(is_same: bool) -> None:
    config = CONFIG.model_copy(update={"params": {**CONFIG.params, "max_turns": 3}})
    environment = LookUpEnvironment(config)
    shapes = {"get": EnvironmentShape(environment.verifier, environment.max_turns)}
    tokenizer = CountingTokenizer()
    group = of_texts(*(["?a"] * 4))
    group = replace(group, verifier=environment.verifier) if is_same else group
    verifier = InlineVerifier({"get": environment})
    refused = await admitted(group, tokenizer, verifier=verifier, shapes=shapes)
    assert isinstance(refused, Refused)
    assert refused.reason is (RefusalReason.WRONG_EPISODE if is_same else RefusalReason.OTHER_ENVIRONMENT)
    assert tokenizer.num_letters == 0


async def test_letters_are_paid_for_by_the_party_that_sent_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups that are refused for their form, and for nothing that costs reputation; a letter takes a microsecond."""
    tokenizer = CountingTokenizer()
    monkeypatch.setattr(admission_checks, "time", SimpleNamespace(thread_time=lambda: tokenizer.num_letters * 1e-6))
    accounts = TimeAccounts(most_s_per_minute=0.006)
    gate = make_gate(tokenizer, accounts=accounts, origin_of=lambda node: "" if node == OURSELVES.node_id else "evil")
    refused = Counter[RefusalReason]()
    for number in range(60):
        identity = make_identity(100 + number)  # a free key each
        texts = [f"{number:03d}" * 350, *(["abcdefg"] * 3)]
        group = replace(of_texts(*texts), producer=identity.node_id, policy_id=identity.node_id)
        found = await gate.admit(make_sealed(group, identity), identity.node_id)
        assert isinstance(found, Refused)
        refused[found.reason] += 1
        assert gate._reputation.score(identity.node_id) == 0.0
    assert tokenizer.num_letters < 8_000
    assert refused[RefusalReason.OVER_REPLAY_TIME] > 40, refused
    honest = replace(of_texts(*ENVIRONMENT.demonstration(TASK)), producer=OURSELVES.node_id)
    other = make_identity(7)
    accounts.spend(Producer(node_id=other.node_id, is_known=False), 0.001, Allowance.ALL)
    taken = replace(honest, producer=other.node_id, policy_id=other.node_id)
    monkeypatch.setattr(gate, "_origin_of", lambda _: "another party")
    assert isinstance(await gate.admit(make_sealed(taken, other), other.node_id), ScoredGroup)


async def test_megabytes_that_travel_as_a_few_bytes_are_paid_for_by_their_party(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2.4 MB each, from free keys of one subnet, refused for what costs no reputation."""
    opened = list[SealedGroup]()
    monkeypatch.setattr(
        admission, "open_group", lambda sealed, *rest: (opened.append(sealed), open_group(sealed, *rest))[1]
    )
    gate = make_gate(CountingTokenizer(), accounts=TimeAccounts(most_s_per_minute=0.02), origin_of=lambda _: "subnet")
    for number in range(12):
        identity = make_identity(100 + number)
        group = replace(of_texts(" " * 600_000), producer=identity.node_id, policy_id=identity.node_id)
        sealed = make_sealed(group, identity)
        assert sealed.size_bytes < 600
        assert isinstance(await gate.admit(sealed, identity.node_id), Refused)
    assert len(opened) < 6


async def test_a_first_try_reads_few_letters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A party without time left: its next key is tried with a short group, and not with a long one."""
    monkeypatch.setattr(admission, "_FIRST_TRY_CHARS", 1000)
    tokenizer, accounts = CountingTokenizer(), TimeAccounts(most_s_per_minute=10.0)
    accounts.spend(Producer(node_id=OURSELVES.node_id, is_known=False, origin="party"), 10.0, Allowance.ALL)
    gate = make_gate(tokenizer, accounts=accounts, origin_of=lambda _: "party")
    refused = await gate.admit(make_sealed(of_texts(*["abcdefg"] * 40), HOSTILE), HOSTILE.node_id)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.OVER_REPLAY_TIME
    assert tokenizer.num_letters == 0
    taken = await gate.admit(make_sealed(of_texts(*ENVIRONMENT.demonstration(TASK)), HOSTILE), HOSTILE.node_id)
    assert isinstance(taken, ScoredGroup), taken


@pytest.mark.parametrize("is_old", [True, False], ids=["too old", "of too many letters"])
async def test_nothing_of_a_group_without_its_form_is_read_or_kept(
    is_old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[RolloutGroup]()
    for module in (novelty, admission_checks):
        monkeypatch.setattr(module, "hash_answers", lambda group: (read.append(group), hash_answers(group))[1])
    group = of_texts(" " * 60_000)
    old = replace(group, created_at_s=group.created_at_s - 86_400)
    refused = await admitted(old if is_old else group, CountingTokenizer())
    assert isinstance(refused, Refused)
    assert refused.reason is (RefusalReason.TOO_OLD if is_old else RefusalReason.UNUSABLE_TEXT)
    assert not read


async def test_no_answer_is_hashed_on_the_event_loop_and_no_group_is_kept_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tokenizer, on_loop = CountingTokenizer(), list[bool]()
    for module in (novelty, admission_checks):
        monkeypatch.setattr(
            module, "hash_answers", lambda group: (on_loop.append(not tokenizer.is_offloaded), hash_answers(group))[1]
        )
    taken = await admitted(of_texts(*ENVIRONMENT.demonstration(TASK)), tokenizer)
    assert isinstance(taken, ScoredGroup), taken
    assert on_loop and not any(on_loop)
    group = ref(taken.group)
    del taken
    assert group() is None
