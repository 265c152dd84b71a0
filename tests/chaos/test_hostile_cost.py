"""What a group of a few hundred bytes may cost before it is refused: letters that are encoded here, memory, and the
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
from swarm.exchange import admission, episode_checks, group_form, novelty
from swarm.exchange.admission import Admission, Arrival
from swarm.exchange.admission_checks import AdmissionLimits
from swarm.exchange.episode_checks import Finding
from swarm.exchange.group_form import GroupForm
from swarm.exchange.novelty import hash_answers
from swarm.interfaces import EnvironmentShape, Producer, Tokenizer
from swarm.model.tokenizer import CharTokenizer
from swarm.peers.peer_table import Peers
from swarm.peers.reputation import Reputation
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import InlineVerifier, make_identity, make_sealed
from swarm.testing.episodes import make_episode_group
from swarm.testing.nodes import make_admission, make_context
from swarm.types import (
    EpisodeLimits,
    RefusalReason,
    Refused,
    Rollout,
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


@pytest.mark.parametrize("is_bounded", [True, False], ids=["bounded", "mutation: turns alone are"])
async def test_an_episode_of_long_turns_is_not_encoded(is_bounded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not is_bounded:
        monkeypatch.setattr(episode_checks, "CHARS_PER_TOKEN", 10**6)
    tokenizer = CountingTokenizer()
    refused = await admitted(of_texts(*["a" * 250] * 63, "a" * 256), tokenizer)
    assert isinstance(refused, Refused)
    assert (tokenizer.num_letters == 0) == is_bounded


async def each_by_itself(self: Admission, arrival: Arrival, function: Callable[..., Any], /, *arguments: Any) -> Any:
    """Mutation: what is computed is computed on the event loop."""
    return function(*arguments)


def all_texts(rollout: Rollout, tokenizer: Tokenizer, limits: EpisodeLimits) -> Finding:
    """Mutation: the tokens of an episode are counted once all are known."""
    num_tokens = sum(len(tokenizer.encode_response(text)) for text in rollout.actions)
    return (RefusalReason.UNUSABLE_TEXT, "too long") if num_tokens > limits.max_episode_tokens else None


@pytest.mark.parametrize("mutation", [None, all_texts], ids=str)
async def test_encoding_stops_where_an_episode_is_longer_than_ours(
    mutation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mutation:
        monkeypatch.setattr(episode_checks, "_check_texts", mutation)
    tokenizer = CountingTokenizer()
    refused = await admitted(of_texts(*[f"abcde{turn:02d}" for turn in range(64)]), tokenizer)
    assert isinstance(refused, Refused) and refused.reason is RefusalReason.UNUSABLE_TEXT
    assert (0 < tokenizer.num_letters <= 64 + 7) is not mutation


@pytest.mark.parametrize("mutation", [None, each_by_itself], ids=str)
async def test_no_text_is_encoded_on_the_event_loop(mutation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if mutation:
        monkeypatch.setattr(Admission, "_compute", mutation)
    tokenizer = CountingTokenizer()
    taken = await admitted(of_texts(*ENVIRONMENT.demonstration(TASK)), tokenizer)
    assert isinstance(taken, ScoredGroup), taken
    assert tokenizer.num_letters > 0 and (tokenizer.num_on_loop == 0) is not mutation


@pytest.mark.parametrize("mutation", [None, "every check encodes"])
async def test_a_text_is_encoded_once_whatever_asks_for_its_tokens(
    mutation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Form, cut and replay ask for the tokens of four equal episodes."""
    if mutation:
        monkeypatch.setattr(group_form, "EncodedOnce", lambda tokenizer: tokenizer)
    tokenizer, texts = CountingTokenizer(), ENVIRONMENT.demonstration(TASK)
    taken = await admitted(of_texts(*texts), tokenizer)
    assert isinstance(taken, ScoredGroup), taken
    num_letters = sum(map(len, texts))
    assert tokenizer.num_letters == (3 * 4 * num_letters if mutation else num_letters)


@pytest.mark.parametrize("mutation", [None, "turns are counted by the replay"])
@pytest.mark.parametrize("is_same", [True, False], ids=["same version", "another version"])
async def test_more_turns_than_the_environment_takes_are_not_encoded(is_same: bool, mutation: str | None) -> None:
    config = CONFIG.model_copy(update={"params": {**CONFIG.params, "max_turns": 3}})
    environment = LookUpEnvironment(config)
    shapes = {} if mutation else {"get": EnvironmentShape(environment.verifier, environment.max_turns)}
    tokenizer = CountingTokenizer()
    group = of_texts(*(["?a"] * 4))
    group = replace(group, verifier=environment.verifier) if is_same else group
    verifier = InlineVerifier({"get": environment})
    refused = await admitted(group, tokenizer, verifier=verifier, shapes=shapes)
    assert isinstance(refused, Refused)
    if not mutation:
        assert refused.reason is (RefusalReason.WRONG_EPISODE if is_same else RefusalReason.OTHER_ENVIRONMENT)
    assert (tokenizer.num_letters == 0) is not mutation


@pytest.mark.parametrize("mutation", [None, "nobody pays for letters"])
async def test_letters_are_paid_for_by_the_party_that_sent_them(
    mutation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups that are refused for their form, and for nothing that costs reputation; a letter takes a microsecond."""
    tokenizer = CountingTokenizer()
    monkeypatch.setattr(group_form, "time", SimpleNamespace(thread_time=lambda: tokenizer.num_letters * 1e-6))
    accounts = TimeAccounts(most_s_per_minute=0.006)
    if mutation:
        monkeypatch.setattr(accounts, "spend", lambda *_: None)
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
    assert (tokenizer.num_letters < 8_000) is not mutation, tokenizer.num_letters
    assert (refused[RefusalReason.OVER_REPLAY_TIME] > 40) is not mutation, refused
    honest = replace(of_texts(*ENVIRONMENT.demonstration(TASK)), producer=OURSELVES.node_id)
    other = make_identity(7)
    accounts.spend(Producer(node_id=other.node_id, is_known=False), 0.001, Allowance.ALL)
    taken = replace(honest, producer=other.node_id, policy_id=other.node_id)
    monkeypatch.setattr(gate, "_origin_of", lambda _: "another party")
    assert isinstance(await gate.admit(make_sealed(taken, other), other.node_id), ScoredGroup)


@pytest.mark.parametrize("mutation", [None, "opening is for nothing"])
async def test_megabytes_that_travel_as_a_few_bytes_are_paid_for_by_their_party(
    mutation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2.4 MB each, from free keys of one subnet, refused for what costs no reputation."""
    if mutation:
        monkeypatch.setattr(admission, "_OPEN_S_PER_BYTE", 0.0)
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
    assert (len(opened) < 6) is not mutation


@pytest.mark.parametrize("mutation", [None, "first tries of any length"])
async def test_a_first_try_reads_few_letters(mutation: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A party without time left: its next key is tried with a short group, and not with a long one."""
    monkeypatch.setattr(admission, "_FIRST_TRY_CHARS", 10**9 if mutation else 1000)
    tokenizer, accounts = CountingTokenizer(), TimeAccounts(most_s_per_minute=10.0)
    accounts.spend(Producer(node_id=OURSELVES.node_id, is_known=False, origin="party"), 10.0, Allowance.ALL)
    gate = make_gate(tokenizer, accounts=accounts, origin_of=lambda _: "party")
    refused = await gate.admit(make_sealed(of_texts(*["abcdefg"] * 40), HOSTILE), HOSTILE.node_id)
    assert isinstance(refused, Refused)
    assert (refused.reason is RefusalReason.OVER_REPLAY_TIME) is not mutation
    assert (tokenizer.num_letters == 0) is not mutation
    taken = await gate.admit(make_sealed(of_texts(*ENVIRONMENT.demonstration(TASK)), HOSTILE), HOSTILE.node_id)
    assert isinstance(taken, ScoredGroup), taken


async def order_first(self: Admission, group: RolloutGroup, arrival: Arrival) -> Finding:
    """Mutation: answers are hashed, and kept, whatever their form is."""
    self._novelty.order(group, arrival.order)
    return await form_of(self, group, arrival)


form_of = Admission._form


@pytest.mark.parametrize("mutation", [None, order_first], ids=str)
@pytest.mark.parametrize("is_old", [True, False], ids=["too old", "of too many letters"])
async def test_nothing_of_a_group_without_its_form_is_read_or_kept(
    is_old: bool, mutation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mutation:
        monkeypatch.setattr(Admission, "_form", mutation)
    read = list[RolloutGroup]()
    for module in (novelty, group_form):
        monkeypatch.setattr(module, "hash_answers", lambda group: (read.append(group), hash_answers(group))[1])
    group = of_texts(" " * 60_000)
    old = replace(group, created_at_s=group.created_at_s - 86_400)
    refused = await admitted(old if is_old else group, CountingTokenizer())
    assert isinstance(refused, Refused)
    assert refused.reason is (RefusalReason.TOO_OLD if is_old else RefusalReason.UNUSABLE_TEXT)
    assert (read == []) is (is_old or not mutation)


def without_answers(group: RolloutGroup, tokenizer: Tokenizer, limits: AdmissionLimits) -> GroupForm:
    """Mutation: who needs the answers hashes them."""
    return replace(group_form.read_group(replace(group), tokenizer, limits), learned=group)


@pytest.mark.parametrize("mutation", [None, without_answers], ids=str)
async def test_no_answer_is_hashed_on_the_event_loop_and_no_group_is_kept_for_it(
    mutation: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, on_loop = CountingTokenizer(), list[bool]()
    for module in (novelty, group_form):
        monkeypatch.setattr(
            module, "hash_answers", lambda group: (on_loop.append(not tokenizer.is_offloaded), hash_answers(group))[1]
        )
    if mutation:
        monkeypatch.setattr(admission, "read_group", mutation)
        monkeypatch.setattr(admission, "keep_keys", lambda *_: None)
    taken = await admitted(of_texts(*ENVIRONMENT.demonstration(TASK)), tokenizer)
    assert isinstance(taken, ScoredGroup), taken
    assert on_loop and any(on_loop) is bool(mutation)
    group = ref(taken.group)
    del taken
    assert group() is None
