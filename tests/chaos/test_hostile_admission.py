"""A hostile peer at admission: each trick is refused with its own reason, and a good group right after is admitted."""

import asyncio
import errno
import hashlib
import math
import time
import tracemalloc
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import zstandard
from sealed_groups import seal_bytes

from swarm.clock import ManualClock
from swarm.config import ExchangeConfig, GeneratorConfig, NodeConfig
from swarm.identity import DOMAIN_GROUP
from swarm.objectives.draw_batch import make_batch
from swarm.peers.peer_table import Peers
from swarm.peers.reputation import Reputation
from swarm.simulate.virtual.group_store import MemoryGroupStore
from swarm.testing.builders import (
    TOY_ENV,
    TOY_NOW_S,
    ScriptedVerifier,
    ToyTokenizer,
    make_group,
    make_identity,
    make_rollout,
    make_sealed,
    toy_task,
)
from swarm.testing.nodes import make_admission, make_context
from swarm.types import (
    Correction,
    Draw,
    DrawnGroup,
    FinishReason,
    PolicyVersion,
    RefusalReason,
    Refused,
    Rollout,
    RolloutGroup,
    Sampling,
    ScoredGroup,
    SealedGroup,
    TokenTrace,
    VersionSpan,
)
from swarm.wire.rollout_groups import group_to_body
from swarm.wire.v1 import rollout_pb2

HOSTILE, HONEST, OURSELVES = make_identity(1), make_identity(2), make_identity(3)
YEAR_S = 365 * 24 * 3600.0
MAX_BYTES = 64 * 1024
Change = Callable[[RolloutGroup], RolloutGroup]


async def call(function: Callable[..., object], *arguments: object) -> object:
    return function(*arguments)


class Gate:
    """A node's admission on a manual clock, with the knobs the tests turn."""

    def __init__(
        self,
        groups_per_minute: int = 6000,
        offload: Callable[..., object] = call,
        temperature: float = 1.0,
        max_group_bytes: int = MAX_BYTES,
    ) -> None:
        self.clock = ManualClock()
        self.verifier = ScriptedVerifier(held_out=frozenset({1234}), crashes_on="CRASH", num_tasks=10_000)
        self.disk_error: int | None = None
        self.store = MemoryGroupStore(self.clock, 10**8, self._before_write)
        self.reputation = Reputation(self.clock, groups_per_minute)
        self.tokenizer = ToyTokenizer()
        config = NodeConfig(
            exchange=ExchangeConfig(max_group_bytes=max_group_bytes), generator=GeneratorConfig(temperature=temperature)
        )
        peers = Peers(OURSELVES.node_id)
        self.heads = peers.heads
        self.admission = make_admission(
            make_context(config, OURSELVES, clock=self.clock, offload=offload),
            self.store,
            tokenizer=self.tokenizer,
            verifier=self.verifier,
            peers=peers,
            reputation=self.reputation,
        )

    def _before_write(self, size_bytes: int) -> None:
        if self.disk_error is not None:
            raise OSError(self.disk_error, "as told")

    async def expect(self, sealed: SealedGroup, reason: RefusalReason, via: str = HOSTILE.node_id) -> Refused:
        """The group is refused for that reason, counted, and an honest group right after is admitted."""
        before = self.admission.refusals[reason]
        result = await self.admission.admit(sealed, via)
        assert isinstance(result, Refused), "a hostile group was admitted"
        assert result.reason is reason, (result.reason, result.detail)
        assert self.admission.refusals[reason] == before + 1
        await self.expect_good()
        return result

    async def expect_good(self) -> ScoredGroup:
        task_id = self.admission.num_admitted
        good = await self.admission.admit(
            make_sealed(make_group(HONEST.node_id, task_id=task_id), HONEST), HONEST.node_id
        )
        assert isinstance(good, ScoredGroup), good
        return good


def hostile(change: Change | None = None, **settings: object) -> SealedGroup:
    """A correctly signed group of the hostile peer, with one thing about it changed."""
    group = make_group(HOSTILE.node_id, **settings)  # type: ignore[arg-type]
    return make_sealed(group if change is None else change(group), HOSTILE)


def on_first_rollout(**changes: object) -> Change:
    return lambda g: replace(g, rollouts=(replace(g.rollouts[0], **changes), *g.rollouts[1:]))  # type: ignore[arg-type]


def on_first_trace(**changes: object) -> Change:
    def change(group: RolloutGroup) -> RolloutGroup:
        trace = group.rollouts[0].trace
        assert trace is not None
        return on_first_rollout(trace=replace(trace, **changes))(group)  # type: ignore[arg-type]

    return change


def crafted(change: Callable[[rollout_pb2.GroupBody], None]) -> SealedGroup:
    """A correctly signed body that our own sealing could never make."""
    body = group_to_body(make_group(HOSTILE.node_id))
    change(body)
    return seal_bytes(body.SerializeToString(), HOSTILE)


# --- one thing is wrong --------------------------------------------------------------------------

SIZE = ToyTokenizer().vocab_size
OTHER_PROMPT = np.array(ToyTokenizer().encode_prompt(toy_task(TOY_ENV, 8)), np.int32)
WRONG_TEXT = replace(make_rollout("8", policy_id=HOSTILE.node_id, reward=1.0), actions=("7",))  # earns the reward


def span_beyond(body: rollout_pb2.GroupBody) -> None:
    span = body.rollouts[0].trace.spans.add()
    span.start = 2**32 - 1
    span.version.policy_id = HOSTILE.node_id


def mixed_steps(group: RolloutGroup) -> RolloutGroup:
    versions = [PolicyVersion(policy_id=HOSTILE.node_id, step=step) for step in (0, 9)]
    return on_first_trace(spans=tuple(VersionSpan(start=i, version=each) for i, each in enumerate(versions)))(group)


def without_traces(group: RolloutGroup, *actions: str) -> RolloutGroup:
    bare = [replace(each, trace=None, actions=actions or each.actions) for each in group.rollouts]
    return replace(group, rollouts=tuple(bare))


def sampled(**changes: float) -> SealedGroup:
    return hostile(sampling=Sampling(**{"max_new_tokens": 8, **changes}))  # type: ignore[arg-type]


def with_trace_field(name: str, value: object) -> SealedGroup:
    return crafted(lambda body: getattr(body.rollouts[0].trace, name).__setitem__(slice(None), value))


REFUSED: dict[RefusalReason, dict[str, Callable[[], SealedGroup]]] = {
    RefusalReason.WRONG_DIGEST: {
        "another digest": lambda: replace(hostile(), digest=bytes(32)),
        "a byte more": lambda: replace(hostile(), body=hostile().body + b"x"),
    },
    RefusalReason.WRONG_SIGNATURE: {
        "no signature": lambda: replace(hostile(), signature=bytes(64)),
        "of another domain": lambda: replace(hostile(), signature=HOSTILE.sign(b"swarm.v1.advert", hostile().digest)),
    },
    RefusalReason.DUPLICATE: {"our own": lambda: make_sealed(make_group(OURSELVES.node_id), OURSELVES)},
    RefusalReason.MALFORMED: {
        "bytes": lambda: seal_bytes(b"\xff" * 1000, HOSTILE),
        "no frame": lambda: seal_bytes(b"not a frame" * 10, HOSTILE, is_compressed=True),
        "a claim of NaN": lambda: hostile(on_first_rollout(claimed_reward=float("nan"))),
        "a claim of infinity": lambda: hostile(on_first_rollout(claimed_reward=float("inf"))),
        "one without a trace": lambda: hostile(on_first_rollout(trace=None)),
    },
    RefusalReason.WRONG_GROUP_SIZE: {f"{n} rollouts": partial(hostile, texts=["7"] * n) for n in (1, 7, 9, 64)},
    RefusalReason.WRONG_RUN: {"another run": lambda: hostile(run_id="another")},
    RefusalReason.UNKNOWN_TASK: {f"task {n}": partial(hostile, task_id=n) for n in (10_000, 2**62)},
    RefusalReason.UNKNOWN_ENVIRONMENT: {"a lottery": lambda: hostile(env="lottery")},
    RefusalReason.HELD_OUT: {"a held-out task": lambda: hostile(task_id=1234)},
    RefusalReason.WRONG_PROMPT: {"of another task": lambda: hostile(lambda g: replace(g, prompt_ids=OTHER_PROMPT))},
    RefusalReason.TEXT_MISMATCH: {
        "another text": lambda: hostile(lambda g: replace(g, rollouts=(WRONG_TEXT, *g.rollouts[1:])))
    },
    RefusalReason.VERIFIER_FAILED: {"a crash": lambda: hostile(texts=["CRASH"] * 8)},
    RefusalReason.FALSE_REWARD: {
        f"claim {value}": partial(hostile, on_first_rollout(claimed_reward=value)) for value in (0.5, 0.998, -1.0, 1e6)
    },
    RefusalReason.BAD_LOGPROBS: {
        **{f"{value}": partial(hostile, logprob=value) for value in (0.5, 2e-4, math.nan, math.inf, -math.inf, -1e4)},
        "too few": lambda: crafted(
            lambda body: setattr(body.rollouts[0].trace, "logprobs", body.rollouts[0].trace.logprobs[:-1])
        ),
    },
    RefusalReason.BAD_TOKENS: {
        "an id too large": lambda: hostile(on_first_trace(token_ids=np.array([SIZE, 2], np.int32))),
        "of the prompt": lambda: hostile(lambda g: replace(g, prompt_ids=np.array([1, SIZE + 5], np.int32))),
        "a negative id": lambda: with_trace_field("token_ids", [2**32 - 1, 2]),
        "a negative run": lambda: with_trace_field("action_runs", [2**32 - 1]),
        "none chosen": lambda: hostile(on_first_trace(action_mask=np.zeros(2, np.bool_))),
        "more than anyone may generate": lambda: hostile(texts=["7" * 8] * 8),  # and one end token
    },
    RefusalReason.BAD_SAMPLING: {
        **{
            f"temperature {value}": partial(sampled, temperature=value)
            for value in (0.0, math.nan, 1e9, 0.05, 0.7, 0.99, 1.01, 5.0)
        },
        **{f"length {allowed}": partial(sampled, max_new_tokens=allowed) for allowed in (0, 1, 7, 9, 2**31 - 1)},
        "top_p": lambda: sampled(top_p=0.0),
        "penalty": lambda: sampled(repetition_penalty=-1.0),
        "aborted": lambda: hostile(on_first_rollout(finish=FinishReason.ABORTED)),
    },
    RefusalReason.BAD_VERSION: {
        "spans of another lineage": lambda: hostile(
            on_first_trace(spans=(VersionSpan(start=0, version=PolicyVersion(policy_id="elsewhere", step=0)),))
        ),
        "a span beyond": lambda: crafted(span_beyond),
    },
    RefusalReason.TOO_OLD: {"one old token": lambda: hostile(mixed_steps, step=9)},
    RefusalReason.UNUSABLE_TEXT: {
        "endless": lambda: hostile(lambda g: without_traces(g, "7" * 2000)),
        "a huge prompt of another tokenizer": lambda: hostile(
            lambda g: replace(g, prompt_ids=np.zeros(2**20, np.int32)), tokenizer=ToyTokenizer("theirs")
        ),
    },
}
CHARGED = {RefusalReason.TEXT_MISMATCH, RefusalReason.VERIFIER_FAILED}
FREE = {RefusalReason.UNKNOWN_ENVIRONMENT}


@pytest.mark.parametrize(
    ("reason", "what"), [(reason, what) for reason, cases in REFUSED.items() for what in cases], ids=str
)
async def test_a_group_with_one_thing_wrong(reason: RefusalReason, what: str) -> None:
    gate = Gate(max_group_bytes=4 * 2**20)
    refused = await gate.expect(REFUSED[reason][what](), reason)
    score = gate.reputation.score(HOSTILE.node_id)
    assert score < 0 if reason in CHARGED else score == 0 if reason in FREE else True
    if what.startswith("length"):
        assert f"max_new_tokens {what.split()[1]} at its maker" in refused.detail


# --- the envelope ------------------------------------------------------------------------------


async def test_a_forged_producer() -> None:
    gate = Gate()
    await gate.expect(replace(hostile(), producer=HONEST.node_id), RefusalReason.FORGED_PRODUCER)
    assert gate.reputation.score(HONEST.node_id) > 0 > gate.reputation.score(HOSTILE.node_id)


async def test_another_key_under_a_known_name() -> None:
    gate = Gate()
    forged = replace(hostile(), producer=HONEST.node_id, public_key=HONEST.public_key)
    await gate.expect(forged, RefusalReason.WRONG_SIGNATURE)
    assert gate.reputation.score(HONEST.node_id) > 0


async def test_a_replayed_group_also_after_it_was_deleted() -> None:
    gate = Gate()
    sealed = hostile()
    assert isinstance(await gate.admission.admit(sealed, HOSTILE.node_id), ScoredGroup)
    await gate.expect(sealed, RefusalReason.DUPLICATE)
    await gate.store.forget(before_s=TOY_NOW_S + 1, max_bytes=0)
    await gate.expect(sealed, RefusalReason.DUPLICATE)
    assert gate.reputation.score(HOSTILE.node_id) > 0


async def test_the_same_group_from_many_peers_at_once_is_admitted_once() -> None:
    gate = Gate(offload=asyncio.to_thread)
    sealed = make_sealed(make_group(HONEST.node_id, task_id=77), HONEST)
    results = await asyncio.gather(*(gate.admission.admit(sealed, f"{i:064x}") for i in range(40)))
    refused = [r for r in results if isinstance(r, Refused)]
    assert len(refused) == 39 and {r.reason for r in refused} == {RefusalReason.DUPLICATE}
    assert gate.verifier.num_scored == 1


async def test_a_copy_that_is_slow_to_open_is_a_duplicate_of_the_one_that_came_through() -> None:
    first_is_done, opened = asyncio.Event(), 0

    async def slow_second(function: Callable[..., object], *arguments: object) -> object:
        nonlocal opened
        opened += function.__name__ == "open_group"
        if function.__name__ == "open_group" and opened == 2:
            await first_is_done.wait()
        return function(*arguments)

    gate = Gate(offload=slow_second)
    gate.store.contains = _never_sooner_than_a_turn(gate.store.contains)  # type: ignore[method-assign]
    sealed = make_sealed(make_group(HONEST.node_id, task_id=77), HONEST)
    first = asyncio.create_task(gate.admission.admit(sealed, HONEST.node_id))
    second = asyncio.create_task(gate.admission.admit(sealed, HOSTILE.node_id))
    assert isinstance(await first, ScoredGroup)
    first_is_done.set()
    result = await second
    assert isinstance(result, Refused) and result.reason is RefusalReason.DUPLICATE
    assert opened == 2 and gate.verifier.num_scored == 1


def _never_sooner_than_a_turn(contains: Callable[[bytes], Awaitable[bool]]) -> Callable[[bytes], Awaitable[bool]]:
    async def later(digest: bytes) -> bool:
        await asyncio.sleep(0)
        return await contains(digest)

    return later


async def test_a_forged_copy_on_its_way_does_not_displace_the_genuine_group() -> None:
    gate = Gate(offload=asyncio.to_thread)
    genuine = make_sealed(make_group(HONEST.node_id, task_id=77), HONEST)
    forged = [gate.admission.admit(replace(genuine, signature=bytes(64)), HOSTILE.node_id) for _ in range(3)]
    results = await asyncio.gather(*forged, gate.admission.admit(genuine, HONEST.node_id))
    assert isinstance(results[-1], ScoredGroup)


async def test_a_body_of_100_megabytes_costs_neither_time_nor_memory() -> None:
    gate = Gate()
    sealed = replace(hostile(), body=bytes(100 * 2**20))
    tracemalloc.start()
    began_s = time.thread_time()
    await gate.expect(sealed, RefusalReason.TOO_LARGE)
    used_s = time.thread_time() - began_s
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    began_s = time.thread_time()
    hashlib.sha256(sealed.body).digest()
    assert used_s < time.thread_time() - began_s, "it was hashed or parsed"
    assert peak_bytes < 2**20


async def test_a_compressed_bomb() -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(100 * 2**20))
    assert len(bomb) < MAX_BYTES
    sealed = seal_bytes(bomb, HOSTILE, is_compressed=True)
    tracemalloc.start()
    await Gate().expect(sealed, RefusalReason.TOO_LARGE)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 4 * 2**20


# --- the group -----------------------------------------------------------------------------------


EOS, PAD = ToyTokenizer.EOS_ID, 0
RIGHT, OTHER = ToyTokenizer().encode_response("7")[:-1], ToyTokenizer().encode_response("8")[:-1]


@pytest.mark.parametrize(
    ("token_ids", "untrained", "second_turn_at", "reason"),
    [
        pytest.param(
            [*OTHER * 200_000, *RIGHT, EOS],
            200_000,
            None,
            RefusalReason.BAD_TOKENS,
            id="pill",
        ),
        pytest.param([*OTHER * 6_000, *RIGHT, EOS], 6_000, None, RefusalReason.BAD_TOKENS, id="slow pill"),
        pytest.param([EOS, *RIGHT, EOS], 0, 1, RefusalReason.BAD_TOKENS, id="an end in a turn of its own"),
        pytest.param([EOS, *RIGHT, EOS], 0, None, RefusalReason.BAD_TOKENS, id="an end in the same turn"),
        pytest.param([PAD, *RIGHT, EOS], 0, None, RefusalReason.TEXT_MISMATCH, id="padding that decoding hides"),
        pytest.param([*RIGHT, PAD], 0, None, RefusalReason.TEXT_MISMATCH, id="padding as the end"),
        pytest.param([*OTHER, *RIGHT, EOS], 1, None, RefusalReason.BAD_TOKENS, id="another question first"),
        pytest.param([*RIGHT, EOS, EOS], 0, None, RefusalReason.BAD_TOKENS, id="two ends"),
        pytest.param([*RIGHT], 0, None, RefusalReason.BAD_TOKENS, id="ended without an end"),
    ],
)
async def test_tokens_that_the_text_does_not_show(
    token_ids: list[int], untrained: int, second_turn_at: int | None, reason: RefusalReason
) -> None:
    mask = np.arange(len(token_ids)) >= untrained
    turns = np.zeros(len(token_ids), np.int16)
    if second_turn_at is not None:
        turns[second_turn_at:] = 1
    hidden = TokenTrace(
        token_ids=np.array(token_ids, np.int32),
        action_mask=mask,
        logprobs=None,
        turn_ids=turns,
        spans=(VersionSpan(start=0, version=PolicyVersion(policy_id=HOSTILE.node_id, step=0)),),
    )

    def with_trace(rollout: Rollout) -> Rollout:
        assert rollout.trace is not None
        return replace(rollout, trace=replace(rollout.trace, logprobs=None))

    def change(group: RolloutGroup) -> RolloutGroup:
        first, *others = group.rollouts
        return replace(group, rollouts=(replace(first, trace=hidden), *map(with_trace, others)))

    gate = Gate(max_group_bytes=4 * 2**20)
    await gate.expect(hostile(change), reason)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        pytest.param("\t7\t\t", "theirs", id="white space that is trained as question marks"),
        pytest.param("\u4e2d", "theirs", id="a character that is unknown here"),
    ],
)
async def test_a_text_without_tokens_that_makes_another_row_here(text: str, name: str) -> None:
    gate, tokenizer = Gate(), ToyTokenizer(name)
    group = make_group(HOSTILE.node_id, texts=[text] * 8, tokenizer=tokenizer)
    group = replace(group, rollouts=tuple(replace(r, trace=None, claimed_reward=0.0) for r in group.rollouts))
    await gate.expect(make_sealed(group, HOSTILE), RefusalReason.UNUSABLE_TEXT)
    assert gate.reputation.score(HOSTILE.node_id) == 0, "an honest node of another model cannot know"


async def test_an_empty_prompt_of_another_tokenizer_is_nobodys_business() -> None:
    group = make_group(HOSTILE.node_id, tokenizer=ToyTokenizer("theirs"))
    empty = replace(group, prompt_ids=np.zeros(0, np.int32))
    scored = await Gate().admission.admit(make_sealed(empty, HOSTILE), HOSTILE.node_id)
    assert isinstance(scored, ScoredGroup)
    draw = Draw(step=1, groups=(DrawnGroup(scored=scored, age_steps=0, use=1),), num_zero_variance=0, source_weights={})
    batch = make_batch(draw, ToyTokenizer(), task_of=toy_task)
    assert batch.token_ids.shape == (8, 2), "the learner makes the prompt itself"


async def test_another_verifiers_rewards_are_replaced_by_ours() -> None:
    gate = Gate()

    def lie(group: RolloutGroup) -> RolloutGroup:
        rollouts = tuple(replace(r, claimed_reward=1.0) for r in group.rollouts)
        return replace(group, verifier="digits/2", rollouts=rollouts)

    result = await gate.admission.admit(hostile(lie), HOSTILE.node_id)
    assert isinstance(result, ScoredGroup) and result.rewards.tolist() == [1.0] * 4 + [0.0] * 4


async def test_a_log_prob_above_zero_by_rounding_is_clamped() -> None:
    result = await Gate().admission.admit(hostile(logprob=5e-5), HOSTILE.node_id)
    assert isinstance(result, ScoredGroup)
    for rollout in result.group.rollouts:
        assert rollout.trace is not None and rollout.trace.logprobs is not None
        assert rollout.trace.logprobs.tolist() == [0.0, 0.0]


async def test_an_answer_that_is_python_code_is_only_ever_text() -> None:
    gate = Gate()
    code = "exit(1)"
    result = await gate.admission.admit(hostile(texts=[code, "7"] * 4), HOSTILE.node_id)
    assert isinstance(result, ScoredGroup) and result.rewards.tolist() == [0.0, 1.0] * 4
    await gate.expect_good()


async def test_a_temperature_that_travelled_in_single_precision_is_the_runs() -> None:
    gate = Gate(temperature=0.7)
    sampling = Sampling(temperature=float(np.float32(0.7)), max_new_tokens=8)
    assert isinstance(await gate.admission.admit(hostile(sampling=sampling), HOSTILE.node_id), ScoredGroup)


# --- time and versions -------------------------------------------------------------------------


async def test_a_clock_a_year_off() -> None:
    await Gate().expect(hostile(created_at_s=TOY_NOW_S + YEAR_S), RefusalReason.FROM_THE_FUTURE)
    await Gate().expect(hostile(created_at_s=TOY_NOW_S - YEAR_S), RefusalReason.TOO_OLD)
    result = await Gate().admission.admit(hostile(created_at_s=float("nan")), HOSTILE.node_id)
    assert isinstance(result, Refused) and result.reason is RefusalReason.MALFORMED


async def test_a_clock_off_by_less_than_the_allowed_skew_is_no_crime() -> None:
    for skew_s in (-100.0, 100.0):
        result = await Gate().admission.admit(hostile(created_at_s=TOY_NOW_S + skew_s), HOSTILE.node_id)
        assert isinstance(result, ScoredGroup)


async def test_a_group_older_than_its_producers_head_allows() -> None:
    gate = Gate()
    gate.heads[HOSTILE.node_id] = PolicyVersion(policy_id=HOSTILE.node_id, step=15)
    await gate.expect(hostile(step=10), RefusalReason.TOO_OLD)
    assert isinstance(await gate.admission.admit(hostile(step=11), HOSTILE.node_id), ScoredGroup)


async def test_steps_far_beyond_the_signed_head() -> None:
    gate = Gate()
    gate.heads[HOSTILE.node_id] = PolicyVersion(policy_id=HOSTILE.node_id, step=3)
    assert isinstance(await gate.admission.admit(hostile(step=40), HOSTILE.node_id), ScoredGroup)
    await gate.expect(hostile(step=2**40), RefusalReason.UNKNOWN_HEAD)


async def test_a_lineage_that_is_not_the_producers() -> None:
    gate = Gate()
    other = replace(make_group(HONEST.node_id, task_id=5), producer=HOSTILE.node_id)
    await gate.expect(make_sealed(other, HOSTILE), RefusalReason.UNKNOWN_HEAD)
    gate.heads[HONEST.node_id] = PolicyVersion(policy_id=HONEST.node_id, step=0)
    assert isinstance(await gate.admission.admit(make_sealed(other, HOSTILE), HOSTILE.node_id), ScoredGroup)


# --- corrections ---------------------------------------------------------------------------------


async def test_what_ratios_are_legal_follows_from_the_group_and_not_from_a_claim() -> None:
    other = ToyTokenizer("another tokenizer")

    cases = [
        (hostile(), Correction.EXACT),
        (hostile(logprob=None), Correction.NO_LOGPROBS),
        (hostile(sampling=Sampling(top_p=0.9, max_new_tokens=8)), Correction.NO_LOGPROBS),
        (hostile(tokenizer=other), Correction.TEXT_ONLY),
        (hostile(without_traces), Correction.TEXT_ONLY),
    ]
    for sealed, correction in cases:
        result = await Gate().admission.admit(sealed, HOSTILE.node_id)
        assert isinstance(result, ScoredGroup) and result.correction is correction


# --- storage, reputation and floods -------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
async def test_a_full_disk_refuses_and_recovers(code: int, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate()
    gate.disk_error = code
    sealed = hostile()
    for _ in range(3):
        result = await gate.admission.admit(sealed, HOSTILE.node_id)
        assert isinstance(result, Refused) and result.reason is RefusalReason.NO_ROOM
    assert sum("store is full" in record.message for record in caplog.records) == 1
    assert gate.reputation.score(HOSTILE.node_id) == 0.0
    gate.disk_error = None
    assert isinstance(await gate.admission.admit(sealed, HOSTILE.node_id), ScoredGroup)


async def test_a_liar_is_soon_refused_without_work_and_forgiven_in_time() -> None:
    gate = Gate()
    for task_id in range(3):
        await gate.admission.admit(hostile(on_first_rollout(claimed_reward=0.3), task_id=task_id), HOSTILE.node_id)
    scored = gate.verifier.num_scored
    for task_id in range(3, 50):
        result = await gate.admission.admit(hostile(task_id=task_id), HOSTILE.node_id)
        assert isinstance(result, Refused) and result.reason is RefusalReason.LOW_REPUTATION
    assert gate.verifier.num_scored == scored
    through_a_relay = await gate.admission.admit(hostile(task_id=60), HONEST.node_id)
    assert isinstance(through_a_relay, Refused) and through_a_relay.reason is RefusalReason.LOW_REPUTATION
    gate.clock.advance(400.0)
    fresh = hostile(task_id=61, created_at_s=gate.clock.now_s())
    assert isinstance(await gate.admission.admit(fresh, HOSTILE.node_id), ScoredGroup)


async def test_a_relay_cannot_burn_an_honest_producer() -> None:
    gate = Gate()
    genuine = make_sealed(make_group(HONEST.node_id, task_id=900), HONEST)
    for number in range(20):
        broken = replace(genuine, body=genuine.body + bytes([number]))
        await gate.admission.admit(broken, HOSTILE.node_id)
    assert not gate.reputation.is_allowed(HOSTILE.node_id) and gate.reputation.score(HONEST.node_id) == 0.0
    assert isinstance(await gate.admission.admit(genuine, HONEST.node_id), ScoredGroup)


async def test_a_sender_of_liars_with_fresh_identities_is_found_out() -> None:
    gate = Gate()
    for number in range(30):
        liar = make_identity(1000 + number)
        group = make_group(liar.node_id, task_id=number, logprob=0.5)  # which no honest node passes on
        await gate.admission.admit(make_sealed(group, liar), HOSTILE.node_id)
    assert not gate.reputation.is_allowed(HOSTILE.node_id)
    assert gate.verifier.num_scored == 0
    await gate.expect_good()


async def test_a_flood_is_cut_off_by_the_quota_of_its_sender_alone() -> None:
    gate = Gate(groups_per_minute=50)
    sealed = hostile()
    began_s = time.thread_time()
    reasons = [await gate.admission.admit(sealed, HOSTILE.node_id) for _ in range(20_000)]
    per_refusal_s = (time.thread_time() - began_s) / 20_000
    over = [r for r in reasons if isinstance(r, Refused) and r.reason is RefusalReason.OVER_QUOTA]
    assert len(over) == 20_000 - 50
    began_s = time.thread_time()
    for _ in range(1000):
        HOSTILE.sign(DOMAIN_GROUP, sealed.body)
    per_signature_s = (time.thread_time() - began_s) / 1000
    assert per_refusal_s < per_signature_s, "refusing costs more than signing"
    await gate.expect_good()


async def test_a_producer_has_one_quota_over_all_relays() -> None:
    gate = Gate(groups_per_minute=10)
    results = [await gate.admission.admit(hostile(task_id=i), f"{i:064x}") for i in range(30)]
    assert sum(isinstance(r, ScoredGroup) for r in results) == 10
    assert {r.reason for r in results if isinstance(r, Refused)} == {RefusalReason.OVER_QUOTA}


async def test_a_cancelled_admission_leaves_the_door_open_for_the_same_group() -> None:
    gate = Gate(offload=asyncio.to_thread)
    sealed = hostile()
    admission = asyncio.create_task(gate.admission.admit(sealed, HOSTILE.node_id))
    await asyncio.sleep(0)
    admission.cancel()
    await asyncio.gather(admission, return_exceptions=True)
    assert isinstance(await gate.admission.admit(sealed, HOSTILE.node_id), ScoredGroup)


async def test_refusals_never_repeat_a_peers_text() -> None:
    secret = "zq7zq7zq"
    for sealed in (hostile(texts=[secret] * 3), hostile(on_first_rollout(actions=(secret,)))):
        result = await Gate().admission.admit(sealed, HOSTILE.node_id)
        assert isinstance(result, Refused) and secret not in result.detail
