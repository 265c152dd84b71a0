"""Wire: each broken bound is refused with its own reason, and bytes of the first release still decode."""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarm.errors import TooLarge
from swarm.identity import DOMAIN_ADVERT, DOMAIN_GROUP, Identity
from swarm.types import (
    Advert,
    Advice,
    Correction,
    Cursor,
    EdgeReport,
    FinishReason,
    NodeReport,
    PolicyVersion,
    RefusalReason,
    Refused,
    Role,
    Rollout,
    RolloutGroup,
    Sampling,
    SealedGroup,
    TokenTrace,
    VersionSpan,
)
from swarm.wire.adverts import MAX_ADVERT_BYTES, open_advert, seal_advert
from swarm.wire.envelopes import open_group, seal_group, sealed_from_bytes
from swarm.wire.reports import advice_from_message, advice_to_message, heartbeat_to_report, report_to_heartbeat
from swarm.wire.rollout_groups import body_to_group, group_to_body
from swarm.wire.v1 import advert_pb2, rollout_pb2

DATA = Path(__file__).parent / "data"
IDENTITY = Identity.from_seed(bytes(range(32)))
HEAD = PolicyVersion(policy_id=IDENTITY.node_id, step=12, digest=b"w" * 32)
TRACE = TokenTrace(
    token_ids=np.array([5, 6, 7, 8, 9], dtype=np.int32),
    action_mask=np.array([True, True, False, True, True]),
    logprobs=np.array([-0.5, -0.25, np.nan, 0.0, -8.0], dtype=np.float32),
    turn_ids=np.array([0, 0, 0, 1, 1], dtype=np.int16),
    spans=(VersionSpan(start=0, version=HEAD), VersionSpan(start=3, version=replace(HEAD, step=13))),
)
ROLLOUT = Rollout(
    actions=("five",), trace=TRACE, sampling=Sampling(temperature=0.7), finish=FinishReason.LENGTH, claimed_reward=0.1
)
GROUP = RolloutGroup(
    run_id="demo",
    producer=IDENTITY.node_id,
    policy_id=IDENTITY.node_id,
    env="sums",
    task_id=41,
    tokenizer_digest=b"t" * 32,
    prompt_ids=np.array([1, 2, 3], dtype=np.int32),
    rollouts=(ROLLOUT, replace(ROLLOUT, actions=("six",), trace=None)),
    verifier="v/1",
    created_at_s=1_700_000_000.5,
)
ADVERT = Advert(
    node_id=IDENTITY.node_id,
    run_id="demo",
    endpoints=("127.0.0.1:4001",),
    roles=(Role.TRAINER, Role.GENERATOR),
    tokenizer_digest=b"t" * 32,
    head=HEAD,
    oldest_step=3,
    num_groups=7,
    reward_mean=0.5,
    reward_std=0.25,
    correction=Correction.EXACT,
    held_bytes=10**9,
    cursor=Cursor(epoch="e" * 16, sequence=99),
    expires_at_s=1090.0,
)


def resigned(body: rollout_pb2.GroupBody) -> SealedGroup:
    data = body.SerializeToString()
    digest = hashlib.sha256(data).digest()
    return SealedGroup(
        digest=digest,
        producer=IDENTITY.node_id,
        public_key=IDENTITY.public_key,
        signature=IDENTITY.sign(DOMAIN_GROUP, b"\1" + digest),
        is_compressed=False,
        body=data,
    )


def reason_of(sealed: SealedGroup, max_bytes: int = 10_000) -> RefusalReason:
    opened = open_group(sealed, max_bytes)
    assert isinstance(opened, Refused), opened
    assert (opened.producer, opened.digest) == (sealed.producer, sealed.digest)
    return opened.reason


def test_bytes_of_the_first_release_still_decode():
    sealed = sealed_from_bytes(bytes.fromhex((DATA / "wire_group_v1.hex").read_text()))
    assert isinstance(sealed, SealedGroup)
    group = open_group(sealed, 10_000)
    assert isinstance(group, RolloutGroup), group
    trace = group.rollouts[0].trace
    assert trace is not None and trace.spans == TRACE.spans
    for name in ("token_ids", "action_mask", "logprobs", "turn_ids"):
        np.testing.assert_array_equal(getattr(trace, name), getattr(TRACE, name))
    assert group.prompt_ids.tolist() == [1, 2, 3]
    assert replace(group.rollouts[0], trace=None) == replace(ROLLOUT, trace=None)
    assert group.rollouts[1] == GROUP.rollouts[1]
    assert replace(group, rollouts=(), prompt_ids=None) == replace(GROUP, rollouts=(), prompt_ids=None)
    assert open_advert(bytes.fromhex((DATA / "wire_advert_v1.hex").read_text()), 1000.0) == ADVERT


def test_envelope_is_checked_before_the_body():
    sealed, other = seal_group(GROUP, IDENTITY), Identity.create()
    assert reason_of(sealed, sealed.size_bytes - 1) is RefusalReason.TOO_LARGE
    assert reason_of(replace(sealed, producer=other.node_id)) is RefusalReason.FORGED_PRODUCER
    assert reason_of(replace(sealed, public_key=other.public_key)) is RefusalReason.FORGED_PRODUCER
    assert reason_of(replace(sealed, signature=bytes(64))) is RefusalReason.WRONG_SIGNATURE
    assert reason_of(replace(sealed, is_compressed=not sealed.is_compressed)) is RefusalReason.WRONG_SIGNATURE
    assert reason_of(replace(sealed, digest=bytes(32))) is RefusalReason.WRONG_SIGNATURE
    assert reason_of(replace(sealed, body=sealed.body + b"x")) is RefusalReason.WRONG_DIGEST


def _set(path: str, value: Any) -> Callable[[rollout_pb2.GroupBody], None]:
    """Sets a field of the body, its first rollout, or that one's trace."""

    def change(body: rollout_pb2.GroupBody) -> None:
        *parents, name = path.split(".")
        target: Any = body
        for parent in parents:
            target = target.rollouts[0] if parent == "rollout" else getattr(target, parent)
        if isinstance(value, list):
            del getattr(target, name)[:]
            getattr(target, name).extend(value)
        else:
            setattr(target, name, value)

    return change


def _spans(*starts: int, policy_id: str = "p", step: int = 1, digest: bytes = b"") -> list[Any]:
    version = {"policy_id": policy_id, "step": step, "digest": digest}
    return [rollout_pb2.TokenTrace(spans=[{"start": s, "version": version}]).spans[0] for s in starts]  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("run_id", "", RefusalReason.MALFORMED),
        ("env", "e" * 129, RefusalReason.MALFORMED),
        ("task_id", 2**63, RefusalReason.MALFORMED),
        ("tokenizer_digest", b"short", RefusalReason.MALFORMED),
        ("created_at_s", float("nan"), RefusalReason.MALFORMED),
        ("rollouts", [], RefusalReason.MALFORMED),
        ("rollouts", [rollout_pb2.Rollout()] * 257, RefusalReason.MALFORMED),
        ("prompt_ids", [2**31], RefusalReason.BAD_TOKENS),
        ("rollout.finish", 0, RefusalReason.MALFORMED),
        ("rollout.finish", 77, RefusalReason.MALFORMED),
        ("rollout.claimed_reward", float("inf"), RefusalReason.MALFORMED),
        ("rollout.sampling.temperature", float("nan"), RefusalReason.BAD_SAMPLING),
        ("rollout.sampling.top_k", 2**31, RefusalReason.BAD_SAMPLING),
        ("rollout.trace.token_ids", [1, 2, 3, 4, 2**31], RefusalReason.BAD_TOKENS),
        ("rollout.trace.token_ids", [], RefusalReason.BAD_TOKENS),
        ("rollout.trace.action_runs", [4], RefusalReason.BAD_TOKENS),
        ("rollout.trace.action_runs", [2, 0, 3], RefusalReason.BAD_TOKENS),
        ("rollout.trace.action_runs", [2**32 - 1, 6], RefusalReason.BAD_TOKENS),
        ("rollout.trace.turn_starts", [3, 2], RefusalReason.BAD_TOKENS),
        ("rollout.trace.turn_starts", [0], RefusalReason.BAD_TOKENS),
        ("rollout.trace.turn_starts", [5], RefusalReason.BAD_TOKENS),
        ("rollout.trace.logprobs", b"x" * 15, RefusalReason.BAD_LOGPROBS),
        ("rollout.trace.logprobs", b"x" * 20, RefusalReason.BAD_LOGPROBS),
        ("rollout.trace.spans", [], RefusalReason.BAD_VERSION),
        ("rollout.trace.spans", _spans(1), RefusalReason.BAD_VERSION),
        ("rollout.trace.spans", _spans(0, 3, 3), RefusalReason.BAD_VERSION),
        ("rollout.trace.spans", _spans(0, 5), RefusalReason.BAD_VERSION),
        ("rollout.trace.spans", _spans(0, step=2**53), RefusalReason.BAD_VERSION),
        ("rollout.trace.spans", _spans(0, digest=b"short"), RefusalReason.BAD_VERSION),
        ("rollout.trace.spans", _spans(0, policy_id=""), RefusalReason.BAD_VERSION),
    ],
)
def test_each_broken_bound_has_its_reason(path: str, value: Any, reason: RefusalReason):
    body = group_to_body(GROUP)
    assert isinstance(open_group(resigned(body), 100_000), RolloutGroup)
    _set(path, value)(body)
    assert reason_of(resigned(body), 100_000) is reason


def test_logprob_values_are_left_to_admission():
    body = group_to_body(GROUP)
    body.rollouts[0].trace.logprobs = np.array([np.nan, 5.0, -np.inf, 0.0], dtype="<f4").tobytes()
    assert isinstance(open_group(resigned(body), 10_000), RolloutGroup)


def test_a_compute_dtype_travels_and_an_unknown_one_is_none():
    body = group_to_body(replace(GROUP, compute_dtype="bfloat16"))
    assert body_to_group(body, GROUP.producer).compute_dtype == "bfloat16"
    body.ParseFromString(body.SerializeToString() + b"\x58\x63")  # field 11: 99
    assert body_to_group(body, GROUP.producer).compute_dtype == ""
    assert body_to_group(group_to_body(GROUP), GROUP.producer).compute_dtype == ""


def test_masked_logprobs_do_not_travel():
    body = group_to_body(GROUP)
    assert np.frombuffer(body.rollouts[0].trace.logprobs, "<f4").tolist() == [-0.5, -0.25, 0.0, -8.0]
    assert list(body.rollouts[0].trace.action_runs) == [2, 1, 2]


def test_compression_is_used_where_it_is_smaller():
    many = replace(GROUP, rollouts=(ROLLOUT,) * 16)
    assert seal_group(many, IDENTITY).is_compressed
    assert seal_group(many, IDENTITY).size_bytes < group_to_body(many).ByteSize()


def test_group_or_advert_of_another_cannot_be_sealed():
    with pytest.raises(ValueError, match="cannot be sealed"):
        seal_group(GROUP, Identity.create())
    with pytest.raises(ValueError, match="cannot be sealed"):
        seal_advert(ADVERT, Identity.create())


def test_advert_over_its_bound_is_an_error_of_ours():
    with pytest.raises(TooLarge, match=f"exceeds {MAX_ADVERT_BYTES}"):
        seal_advert(replace(ADVERT, endpoints=tuple(f"{'host' * 24}{i}:4001" for i in range(8))), IDENTITY)


@pytest.mark.parametrize(("now_s", "is_valid"), [(789.0, False), (790.0, True), (1089.9, True), (1090.0, False)])
def test_advert_lives_at_most_300_seconds(now_s: float, is_valid: bool):
    assert (open_advert(seal_advert(ADVERT, IDENTITY), now_s) is not None) is is_valid


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("run_id", ""),
        ("run_id", "a/b"),
        ("endpoints", ["unix:/tmp/x"]),
        ("endpoints", ["a:1"] * 5),
        ("endpoints", ["a:0"]),
        ("roles", [0]),
        ("roles", [1, 1]),
        ("tokenizer_digest", b"x"),
        ("oldest_step", 2**60),
        ("reward_mean", float("nan")),
        ("reward_std", float("inf")),
        ("correction", 0),
        ("held_bytes", 2**63),
        ("expires_at_s", float("nan")),
        ("expires_at_s", float("inf")),
        ("head", None),
    ],
)
def test_advert_with_a_broken_bound_is_none(name: str, value: Any):
    signed = advert_pb2.SignedAdvert.FromString(seal_advert(ADVERT, IDENTITY))
    body = advert_pb2.Advert.FromString(signed.body)
    body.ClearField(name)  # type: ignore[arg-type]
    if isinstance(value, list):
        getattr(body, name).extend(value)
    elif value is not None:
        setattr(body, name, value)
    signed.body = body.SerializeToString()
    signed.signature = IDENTITY.sign(DOMAIN_ADVERT, signed.body)
    assert open_advert(signed.SerializeToString(), 1000.0) is None


REPORT = NodeReport(
    node_id=IDENTITY.node_id,
    name="left",
    roles=(Role.TRAINER,),
    endpoints=("127.0.0.1:1",),
    head=HEAD,
    tokens_per_s=120.5,
    reward_mean=0.3,
    num_local=4,
    num_external=5,
    num_refused=6,
    edges=(
        EdgeReport(
            source="ab" * 32, num_groups=3, age_mean_steps=1.5, ess_share=0.9, mismatch_kl=0.01, reward_mean=0.5
        ),
    ),
    evaluations={"sums/held_out": 0.75},
)


def test_heartbeat_round_trips():
    assert heartbeat_to_report(report_to_heartbeat(REPORT), IDENTITY.node_id) == REPORT


@pytest.mark.parametrize(
    "change",
    [
        {"name": "x" * 41},
        {"name": "two\nlines"},
        {"endpoints": ("nowhere",)},
        {"tokens_per_s": float("nan")},
        {"head": replace(HEAD, step=2**53)},
        {"evaluations": {"sums": float("inf")}},
        {"edges": (replace(REPORT.edges[0], ess_share=1.5),)},
        {"edges": (replace(REPORT.edges[0], source="x"),)},
        {"edges": (replace(REPORT.edges[0], mismatch_kl=float("nan")),)},
    ],
)
def test_heartbeat_with_a_broken_bound_is_none(change: dict[str, Any]):
    assert heartbeat_to_report(report_to_heartbeat(replace(REPORT, **change)), IDENTITY.node_id) is None


@pytest.mark.parametrize("max_age", [None, 0, 5])
def test_advice_round_trips(max_age: int | None):
    advice = Advice(max_age_steps=max_age, source_weights={"ab" * 32: 0.1}, state="tightened", lease_s=30.0)
    assert advice_from_message(advice_to_message(advice)) == advice


@pytest.mark.parametrize(
    "change",
    [
        {"source_weights": {"x": 0.5}},
        {"source_weights": {"ab" * 32: 1.5}},
        {"source_weights": {"ab" * 32: float("nan")}},
        {"state": "other"},
        {"lease_s": 0.0},
        {"lease_s": float("nan")},
        {"max_age_steps": 2**30},
    ],
)
def test_advice_with_a_broken_bound_is_none(change: dict[str, Any]):
    assert advice_from_message(advice_to_message(replace(Advice(), **change))) is None
