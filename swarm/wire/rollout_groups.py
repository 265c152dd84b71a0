"""Conversion of rollout groups to and from protobuf messages, with a bound on every field that determines a size.

Invariant: a group from `body_to_group` is structurally whole (lengths agree, ids fit int32, spans are ordered),
whichever node sent the message. Admission judges values that need the vocabulary, the task or the clock.

Shape letters: G rollouts, P prompt tokens, T response tokens, K trained tokens.
"""

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Final

import numpy as np

from swarm.episode import TurnStatus
from swarm.types import (
    BoolArray,
    ClaimedTurn,
    FinishReason,
    FloatArray,
    IntArray,
    NodeId,
    PolicyVersion,
    RefusalReason,
    Rollout,
    RolloutGroup,
    Sampling,
    TokenTrace,
    VersionSpan,
)
from swarm.wire.v1 import policy_pb2, rollout_pb2

MAX_ROLLOUTS: Final = 256
MAX_TOKENS: Final = 2**20  # of one prompt, and of one response
MAX_SPANS: Final = 1024  # of one rollout
MAX_TURNS: Final = 1024
MAX_NAME_CHARS: Final = 128  # run, lineage, environment, verifier
MAX_STEP: Final = 2**53  # exact as a float and in SQLite
MAX_TASK_ID: Final = 2**63
MAX_ID: Final = 2**31  # exclusive bound of token ids and other int32 values

_FINISH: Final = {
    FinishReason.STOP: rollout_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: rollout_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORTED: rollout_pb2.FINISH_REASON_ABORTED,
}
_STATUS: Final = {
    TurnStatus.OK: rollout_pb2.TURN_STATUS_OK,
    TurnStatus.TOOL_ERROR: rollout_pb2.TURN_STATUS_TOOL_ERROR,
    TurnStatus.MALFORMED: rollout_pb2.TURN_STATUS_MALFORMED,
    TurnStatus.LIMIT: rollout_pb2.TURN_STATUS_LIMIT,
}
_STATUS_BACK: Final = {number: status for status, number in _STATUS.items()}
_DTYPE: Final = {
    "float32": rollout_pb2.COMPUTE_DTYPE_FLOAT32,
    "bfloat16": rollout_pb2.COMPUTE_DTYPE_BFLOAT16,
}
_DTYPE_BACK: Final = {number: dtype for dtype, number in _DTYPE.items()}
_FLOAT32: Final = np.dtype("<f4")
_FINISH_BACK: Final = {number: reason for reason, number in _FINISH.items()}


class Malformed(Exception):
    """A message from another process breaks a bound; `open_group` turns the error into a `Refused` value."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@lru_cache(maxsize=256)  # rewards and sampling parameters repeat, and formatting one costs more than all its checks
def decimal(value: float) -> float:
    """The float of the shortest decimal that rounds to the same float32, so that 0.7 is 0.7 again after transfer."""
    return float(str(np.float32(value)))


# --- to the wire -------------------------------------------------------------------------------


def version_to_message(version: PolicyVersion) -> policy_pb2.PolicyVersion:
    """Converts a policy version to its protobuf message."""
    return policy_pb2.PolicyVersion(policy_id=version.policy_id, step=version.step, digest=version.digest)


def group_to_body(group: RolloutGroup) -> rollout_pb2.GroupBody:
    """Converts a rollout group to its protobuf message, without log-probs of tokens that the model did not choose."""
    body = rollout_pb2.GroupBody(
        run_id=group.run_id,
        policy_id=group.policy_id,
        env=group.env,
        task_id=group.task_id,
        tokenizer_digest=group.tokenizer_digest,
        prompt_ids=group.prompt_ids.tolist(),
        verifier=group.verifier,
        created_at_s=group.created_at_s,
        compute_dtype=_DTYPE.get(group.compute_dtype),
    )
    for rollout in group.rollouts:
        _fill_rollout(body.rollouts.add(), rollout)
    return body


# Messages are filled in place, since a constructor would copy its arguments again at each level.


def _fill_rollout(message: rollout_pb2.Rollout, rollout: Rollout) -> None:
    message.text = rollout.actions[0] if rollout.actions else ""
    message.later_texts.extend(rollout.actions[1:])
    if rollout.trace is not None:
        _fill_trace(message.trace, rollout.trace)
    _fill_sampling(message.sampling, rollout.sampling)
    message.finish = _FINISH[rollout.finish]
    message.claimed_reward = rollout.claimed_reward
    for claim in rollout.claimed_turns:
        message.claimed_turns.add(reward=claim.reward, status=_STATUS[claim.status])


def _fill_sampling(message: rollout_pb2.Sampling, sampling: Sampling) -> None:
    message.temperature = sampling.temperature
    message.top_p = sampling.top_p
    message.top_k = sampling.top_k
    message.repetition_penalty = sampling.repetition_penalty
    message.max_new_tokens = sampling.max_new_tokens


def _fill_trace(message: rollout_pb2.TokenTrace, trace: TokenTrace) -> None:
    mask = trace.action_mask
    is_all = np.count_nonzero(mask) == mask.size  # nearly every response
    message.token_ids.extend(trace.token_ids.tolist())
    message.action_runs.extend(_runs_of_mask(mask, is_all))
    if trace.logprobs is not None:
        message.logprobs = (trace.logprobs if is_all else trace.logprobs[mask]).astype(_FLOAT32).tobytes()
    if np.count_nonzero(trace.turn_ids):
        message.turn_starts.extend((np.flatnonzero(np.diff(trace.turn_ids)) + 1).tolist())
    for span in trace.spans:
        _fill_version(message.spans.add(start=span.start).version, span.version)
    if trace.byte_lengths is not None:
        message.byte_lengths.extend(trace.byte_lengths.tolist())


def _fill_version(message: policy_pb2.PolicyVersion, version: PolicyVersion) -> None:
    message.policy_id = version.policy_id
    message.step = version.step
    message.digest = version.digest


def _runs_of_mask(mask: BoolArray, is_all: bool) -> list[int]:
    """[T] -> lengths of alternating runs, trained first (0 if the first token is not trained)."""
    if is_all:
        return [mask.size] if mask.size else []
    edges = np.flatnonzero(np.diff(mask)) + 1
    lengths: list[int] = np.diff(np.concatenate(([0], edges, [mask.size]))).tolist()
    return lengths if mask[0] else [0, *lengths]


# --- from the wire -----------------------------------------------------------------------------


def version_from_message(message: policy_pb2.PolicyVersion) -> PolicyVersion:
    """Reads a policy version from its protobuf message. Raises Malformed (BAD_VERSION) if it breaks a bound."""
    return _version(message.policy_id, message.step, message.digest)


@lru_cache(maxsize=1024)  # the rollouts of a group share one; an exception is not cached
def _version(policy_id: str, step: int, digest: bytes) -> PolicyVersion:
    _require(0 < len(policy_id) <= MAX_NAME_CHARS, RefusalReason.BAD_VERSION, "policy id length")
    _require(step < MAX_STEP, RefusalReason.BAD_VERSION, f"step {step} not below {MAX_STEP}")
    size = len(digest)
    _require(size in (0, 32), RefusalReason.BAD_VERSION, f"weights digest of {size} bytes, expected 0 or 32")
    return PolicyVersion(policy_id=policy_id, step=step, digest=digest)


def body_to_group(body: rollout_pb2.GroupBody, producer: NodeId) -> RolloutGroup:
    """Reads a group from a message of bounded size. Raises Malformed if the group breaks a bound.

    Args:
        body: the message; hostile unless it came over the local socket.
        producer: the group's author, as proven elsewhere.
    """
    malformed = RefusalReason.MALFORMED
    for text in (body.run_id, body.policy_id, body.env, body.verifier):
        if not 0 < len(text) <= MAX_NAME_CHARS:
            raise Malformed(malformed, f"a name of {len(text)} characters, expected 1 to {MAX_NAME_CHARS}")
    if not 1 <= len(body.rollouts) <= MAX_ROLLOUTS:
        raise Malformed(malformed, f"{len(body.rollouts)} rollouts, expected 1 to {MAX_ROLLOUTS}")
    if body.task_id >= MAX_TASK_ID:
        raise Malformed(malformed, f"task id {body.task_id} not below {MAX_TASK_ID}")
    if len(body.tokenizer_digest) != 32:
        raise Malformed(malformed, f"tokenizer digest of {len(body.tokenizer_digest)} bytes, expected 32")
    if not math.isfinite(body.created_at_s):
        raise Malformed(malformed, f"created_at_s {body.created_at_s} is not finite")
    return RolloutGroup(
        run_id=body.run_id,
        producer=producer,
        policy_id=body.policy_id,
        env=body.env,
        task_id=body.task_id,
        tokenizer_digest=body.tokenizer_digest,
        prompt_ids=_token_ids(body.prompt_ids, "prompt"),
        rollouts=tuple(rollout_from_message(message) for message in body.rollouts),
        verifier=body.verifier,
        created_at_s=body.created_at_s,
        compute_dtype=_DTYPE_BACK.get(body.compute_dtype, ""),  # empty for a dtype of later releases
    )


def rollout_from_message(message: rollout_pb2.Rollout) -> Rollout:
    """Reads a rollout from a message of bounded size. Raises Malformed if the rollout breaks a bound."""
    finish = _FINISH_BACK.get(message.finish)
    if finish is None:
        raise Malformed(RefusalReason.MALFORMED, f"unknown finish reason {int(message.finish)}")
    later_texts, claimed_turns = message.later_texts, message.claimed_turns  # empty for single answers
    return Rollout(
        actions=(message.text, *later_texts) if later_texts else (message.text,),
        trace=_trace_from_message(message.trace) if message.HasField("trace") else None,
        sampling=sampling_from_message(message.sampling),
        finish=finish,
        claimed_reward=decimal(message.claimed_reward),
        claimed_turns=tuple([_claimed_turn(claim) for claim in claimed_turns]) if claimed_turns else (),
    )


def _claimed_turn(message: rollout_pb2.ClaimedTurn) -> ClaimedTurn:
    status = _STATUS_BACK.get(message.status)
    if status is None:
        raise Malformed(RefusalReason.MALFORMED, f"unknown status {int(message.status)} of a turn")
    return ClaimedTurn(reward=decimal(message.reward), status=status)


def sampling_from_message(message: rollout_pb2.Sampling) -> Sampling:
    """Reads sampling parameters from their message. Raises Malformed if one breaks a bound."""
    return _sampling(
        message.temperature, message.top_p, message.repetition_penalty, message.top_k, message.max_new_tokens
    )


@lru_cache(maxsize=64)  # the rollouts of a swarm share a few; an exception is not cached
def _sampling(temperature: float, top_p: float, repetition_penalty: float, top_k: int, max_new_tokens: int) -> Sampling:
    floats = (temperature, top_p, repetition_penalty)
    _require(all(map(math.isfinite, floats)), RefusalReason.BAD_SAMPLING, f"not finite: {floats}")
    largest = max(top_k, max_new_tokens)
    _require(largest < MAX_ID, RefusalReason.BAD_SAMPLING, f"count {largest} not below {MAX_ID}")
    return Sampling(
        temperature=decimal(temperature),
        top_p=decimal(top_p),
        top_k=top_k,
        repetition_penalty=decimal(repetition_penalty),
        max_new_tokens=max_new_tokens,
    )


def _trace_from_message(message: rollout_pb2.TokenTrace) -> TokenTrace:
    token_ids = _token_ids(message.token_ids, "response")
    num_tokens = token_ids.size
    mask = _mask_of_runs(message.action_runs, num_tokens)
    return TokenTrace(
        token_ids=token_ids,
        action_mask=mask,
        logprobs=_logprobs(message.logprobs, mask),
        turn_ids=_turn_ids(message.turn_starts, num_tokens),
        spans=_spans(message.spans, num_tokens),
        byte_lengths=_byte_lengths(message.byte_lengths, num_tokens),
    )


def _token_ids(values: Sequence[int], what: str) -> IntArray:
    count = len(values)
    if count > MAX_TOKENS:
        raise Malformed(RefusalReason.BAD_TOKENS, f"{count} {what} tokens exceed {MAX_TOKENS}")
    ids = np.fromiter(values, dtype=np.uint32, count=count)
    largest = int(np.maximum.reduce(ids)) if count else 0
    if largest >= MAX_ID:
        raise Malformed(RefusalReason.BAD_TOKENS, f"{what} token id {largest} not below {MAX_ID}")
    return ids.view(np.int32)


def _mask_of_runs(runs: Sequence[int], num_tokens: int) -> BoolArray:
    """Run lengths -> bool [T]; only the first run may be empty. Raises Malformed."""
    count = len(runs)
    if count > num_tokens + 1:
        raise Malformed(RefusalReason.BAD_TOKENS, f"{count} action runs for {num_tokens} tokens")
    lengths = list(runs)
    if lengths == [num_tokens]:  # all trained: nearly every response
        mask = np.empty(num_tokens, dtype=np.bool_)
        mask.fill(True)
        return mask
    total = sum(lengths)
    _require(total == num_tokens, RefusalReason.BAD_TOKENS, f"action runs cover {total} of {num_tokens} tokens")
    _require(0 not in lengths[1:], RefusalReason.BAD_TOKENS, "an action run of length 0")
    return np.repeat(np.arange(count) % 2 == 0, lengths) if count else np.zeros(0, dtype=np.bool_)


def _logprobs(data: bytes, mask: BoolArray) -> FloatArray | None:
    """Bytes of [K] float32 -> [T] with NaN off the mask; None for no bytes. Raises Malformed."""
    if not data:
        return None
    expected = 4 * int(np.count_nonzero(mask))
    if len(data) != expected:
        raise Malformed(RefusalReason.BAD_LOGPROBS, f"{len(data)} bytes, expected {expected}")
    if expected == 4 * mask.size:
        return np.frombuffer(data, dtype=_FLOAT32).astype(np.float32)
    logprobs = np.full(mask.shape, np.nan, dtype=np.float32)
    logprobs[mask] = np.frombuffer(data, dtype=_FLOAT32)
    return logprobs


def _byte_lengths(values: Sequence[int], num_tokens: int) -> IntArray | None:
    """int32 [T]; None for no values. Their sum is checked against the text later. Raises Malformed."""
    if not values:
        return None
    _require(len(values) == num_tokens, RefusalReason.BAD_TOKENS, f"{len(values)} byte lengths of {num_tokens} tokens")
    _require(max(values) < MAX_ID, RefusalReason.BAD_TOKENS, f"a byte length not below {MAX_ID}")
    return np.fromiter(values, dtype=np.int32, count=num_tokens)


def _turn_ids(starts: Sequence[int], num_tokens: int) -> "np.ndarray[tuple[int], np.dtype[np.int16]]":
    count = len(starts)
    if count >= MAX_TURNS:
        raise Malformed(RefusalReason.BAD_TOKENS, f"{count + 1} turns exceed {MAX_TURNS}")
    turn_ids = np.zeros(num_tokens, dtype=np.int16)
    if not count:
        return turn_ids
    _require_rising([0, *starts], num_tokens, RefusalReason.BAD_TOKENS, "turn starts")
    turn_ids[list(starts)] = 1
    return np.cumsum(turn_ids, dtype=np.int16)


def _spans(messages: Sequence[policy_pb2.VersionSpan], num_tokens: int) -> tuple[VersionSpan, ...]:
    count = len(messages)
    if not 1 <= count <= MAX_SPANS:
        raise Malformed(RefusalReason.BAD_VERSION, f"{count} spans, expected 1 to {MAX_SPANS}")
    if count == 1 and messages[0].start == 0:  # nearly every response
        return (VersionSpan(start=0, version=version_from_message(messages[0].version)),)
    starts = [message.start for message in messages]
    _require(starts[0] == 0, RefusalReason.BAD_VERSION, f"first span starts at {starts[0]}, expected 0")
    _require_rising(starts, num_tokens, RefusalReason.BAD_VERSION, "span starts")
    return tuple(VersionSpan(start=m.start, version=version_from_message(m.version)) for m in messages)


def _require_rising(starts: list[int], num_tokens: int, reason: RefusalReason, what: str) -> None:
    _require(all(a < b for a, b in pairwise(starts)), reason, f"{what} do not rise")
    _require(starts[-1] < max(num_tokens, 1), reason, f"{what} reach {starts[-1]} of {num_tokens} tokens")


def _require(condition: bool, reason: RefusalReason, detail: str) -> None:
    if not condition:
        raise Malformed(reason, detail)


def require_finite(values: Iterable[float], what: str) -> None:
    """Raises Malformed unless every value is finite."""
    for value in values:
        _require(math.isfinite(value), RefusalReason.MALFORMED, f"{what} {value} is not finite")
