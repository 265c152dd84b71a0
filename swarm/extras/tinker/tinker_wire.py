"""Conversion of the tinker SDK's protobuf: training data in, log-probs and samples out.

Invariant: the values of `read_training_request` are within their bounds, and no size that a client wrote is allocated
before it was compared with a bound.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from google.protobuf.message import DecodeError

from swarm.extras.tinker.v1 import tinker_pb2 as wire
from swarm.serving.openai_requests import RequestRefused
from swarm.types import FinishReason

MAX_DATA: Final = 4096  # of one request
MAX_TARGETS: Final = 2**21  # of all its data together
MAX_INPUTS: Final = 8  # tensors of a datum
_ELEMENTS: Final = {1: "<f4", 2: "<i8", 3: "<i4"}
_NO_TOKEN: Final = -99999.0  # log-prob of a place without a token, as the SDK has it


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingDatum:
    """One sequence to learn from."""

    token_ids: np.ndarray[Any, Any]  # int64 [S], what the network reads
    targets: np.ndarray[Any, Any]  # int64 [S] or [S, K], what is predicted at each of them
    inputs: Mapping[
        str, np.ndarray[Any, Any]
    ]  # of the loss, by name; each of the targets' shape where the loss says so


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingRequest:
    """Values of POST /api/v1/forward_backward: a loss over data, with or without its gradient."""

    loss: str
    config: Mapping[str, float]
    data: tuple[TrainingDatum, ...]  # not empty
    is_forward_only: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SampledAnswer:
    """One answer to a sample request, of T tokens."""

    token_ids: Sequence[int]  # [T]
    logprobs: Sequence[float]  # [T]
    top: Sequence[Sequence[tuple[int, float]]]  # [T], or empty
    finish: FinishReason


def parse_training_request(body: bytes) -> wire.TinkerForwardBackward:
    """Parses a request from the SDK's protobuf; its content is not checked. Raises RequestRefused."""
    try:
        return wire.TinkerForwardBackward.FromString(body)
    except DecodeError:
        raise RequestRefused("body: no protobuf of a forward_backward request") from None


def parse_order(beginning: bytes) -> wire.TinkerForwardBackward:
    """Parses model_id and seq_id, which the SDK writes first, from the beginning of a request.

    Raises:
        RequestRefused: the beginning does not have both.
    """
    try:
        end = 2 + beginning[1]  # behind the model's name, shorter than 128 bytes, comes the number
        while beginning[end + 1] & 0x80:
            end += 1
        return wire.TinkerForwardBackward.FromString(beginning[: end + 2])
    except (IndexError, DecodeError):
        raise RequestRefused("body: does not begin with model_id and seq_id", status=413) from None


def read_training_request(message: wire.TinkerForwardBackward, vocabulary: int, context_tokens: int) -> TrainingRequest:
    """Checks and converts a parsed request.

    Args:
        message: parsed request.
        vocabulary: size of the vocabulary; every token and target is below it.
        context_tokens: most tokens of one sequence.

    Raises:
        RequestRefused: names the datum or the constant, and the bound.
    """
    if not 0 < len(message.data) <= MAX_DATA:
        raise RequestRefused(f"data: {len(message.data)} of them, there must be 1 to {MAX_DATA}")
    config = dict(message.numbers)
    for name, constant in message.constants.items():
        if constant.WhichOneof("value") != "number":
            raise RequestRefused(f"loss_fn_config.{name}: {constant.text!r} is not a number")
        config[name] = constant.number
    if bad := [name for name, value in config.items() if not math.isfinite(value)]:
        raise RequestRefused(f"loss_fn_config.{bad[0]}: {config[bad[0]]} is not finite")
    data: list[TrainingDatum] = []
    num_targets = 0
    for row, each in enumerate(message.data):
        data.append(_datum(each, row, vocabulary, context_tokens))
        num_targets += max(values.size for values in (data[-1].targets, *data[-1].inputs.values()))
        if num_targets > MAX_TARGETS:
            raise RequestRefused(f"data: more than {MAX_TARGETS} targets in one request; send fewer data")
    return TrainingRequest(
        loss=message.loss,
        config=config,
        data=tuple(data),
        is_forward_only=message.is_forward_only,
    )


def write_training_reply(logprobs: Sequence[np.ndarray[Any, Any]], metrics: Mapping[str, float]) -> bytes:
    """Encodes log-probs of the targets of each datum ([S] or [S, K]) and metrics named `name:reduction`."""
    reply = wire.TinkerForwardBackwardReply(output_type="ArrayRecord", metrics=metrics)
    runs: list[list[np.ndarray[Any, Any]]] = []
    for each in logprobs:  # one record for each run of equal trailing shape
        if not runs or runs[-1][0].shape[1:] != each.shape[1:]:
            runs.append([])
        runs[-1].append(each)
    for run in runs:
        parts = [np.ascontiguousarray(each, "<f4").tobytes() for each in run]
        offsets = np.cumsum([0, *map(len, parts)], dtype="<i8")
        column = wire.TinkerColumn(
            data=b"".join(parts), offsets=offsets.tobytes(), element_type=1, trailing_shape=run[0].shape[1:]
        )
        reply.outputs.append(
            wire.TinkerRecords(type_tag="ArrayRecord", columns={"logprobs": column}, num_data=len(run))
        )
    return reply.SerializeToString()


def write_sample_reply(
    answers: Sequence[SampledAnswer],
    prompt_logprobs: Sequence[float] | None,
    num_top: int,
    prompt_top: Sequence[Sequence[tuple[int, float]]] = (),
    num_prompt_top: int = 0,
    targets: wire.TinkerTensor | None = None,
) -> bytes:
    """Encodes the answers to one prompt.

    Args:
        answers: answers, in order.
        prompt_logprobs: log-prob of each token of the prompt, NaN for a token without one; None: not asked for.
        num_top: most likely tokens to encode for each place of an answer; 0: none.
        prompt_top: most likely tokens at each place of the prompt.
        num_prompt_top: most likely tokens to encode for each of these; 0: none.
        targets: log-probs of tokens that the request names (`target_reply`); None: it names none.
    """
    reply = wire.TinkerSampleReply()
    for answer in answers:
        sequence = reply.sequences.add(
            stop_reason=1 if answer.finish is FinishReason.LENGTH else 0,
            token_ids=np.asarray(answer.token_ids, "<i4").tobytes(),
            logprobs=np.asarray(answer.logprobs, "<f4").tobytes(),
        )
        if num_top:
            sequence.top.CopyFrom(_top(answer.top, num_top))
    if prompt_logprobs is not None:
        reply.prompt_logprobs = np.asarray(prompt_logprobs, "<f4").tobytes()
    if num_prompt_top:
        reply.prompt_top.CopyFrom(_top(prompt_top, num_prompt_top))
    if targets is not None:
        reply.prompt_targets.CopyFrom(targets)
    return reply.SerializeToString()


def target_reply(
    shape: Sequence[int], logprobs: np.ndarray[Any, Any], row_starts: Sequence[int] | None, columns: Sequence[int]
) -> wire.TinkerTensor:
    """Log-probs of the cells of a tensor of tokens, float32 [C] in order, in its shape; sparse if it has row starts."""
    reply = wire.TinkerTensor(element_type=1, shape=shape)
    values = logprobs.astype("<f4").tobytes()
    if row_starts is None:
        reply.dense = values
    else:
        starts, places = (np.asarray(each, "<i8").tobytes() for each in (row_starts, columns))
        reply.sparse.CopyFrom(wire.TinkerSparse(values=values, row_starts=starts, columns=places))
    return reply


def _top(top: Sequence[Sequence[tuple[int, float]]], num_top: int) -> wire.TinkerTopTokens:
    ids = np.zeros((len(top), num_top), "<i4")
    logprobs = np.full((len(top), num_top), _NO_TOKEN, "<f4")
    for row, place in enumerate(top):
        for column, (token, logprob) in enumerate(place[:num_top]):
            ids[row, column], logprobs[row, column] = token, max(logprob, _NO_TOKEN)
    return wire.TinkerTopTokens(token_ids=ids.tobytes(), logprobs=logprobs.tobytes(), k=num_top, length=len(top))


def _datum(message: wire.TinkerDatum, row: int, vocabulary: int, context_tokens: int) -> TrainingDatum:
    where = f"data.{row}"
    parts: list[np.ndarray[Any, Any]] = []
    for place, chunk in enumerate(message.model_input):
        if not chunk.HasField("text"):
            raise RequestRefused(f"{where}.model_input.{place}: only chunks of tokens are served, no images or audio")
        parts.append(_numbers(chunk.text.token_ids, "<i4", f"{where}.model_input.{place}"))
    token_ids = np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, np.int64)
    if not 0 < token_ids.size <= context_tokens:
        raise RequestRefused(f"{where}.model_input: {token_ids.size} tokens, there must be 1 to {context_tokens}")
    if len(message.loss_inputs) > MAX_INPUTS:
        raise RequestRefused(f"{where}.loss_fn_inputs: {len(message.loss_inputs)} tensors, at most {MAX_INPUTS}")
    inputs = {name: _tensor(each, f"{where}.loss_fn_inputs.{name}") for name, each in message.loss_inputs.items()}
    targets = inputs.pop("target_tokens", None)
    if targets is None or targets.dtype.kind != "i":
        raise RequestRefused(f"{where}.loss_fn_inputs.target_tokens: token ids (int64) are missing")
    if targets.ndim not in (1, 2) or targets.shape[0] != token_ids.size or targets.size == 0:
        raise RequestRefused(
            f"{where}.loss_fn_inputs.target_tokens: shape {list(targets.shape)}, the first must be the "
            f"{token_ids.size} tokens of model_input"
        )
    for name, ids in (("model_input", token_ids), ("loss_fn_inputs.target_tokens", targets)):
        if ids.min() < 0 or ids.max() >= vocabulary:
            raise RequestRefused(f"{where}.{name}: token {ids.max()} is outside the vocabulary of {vocabulary}")
    return TrainingDatum(token_ids=token_ids, targets=targets.astype(np.int64), inputs=inputs)


def _tensor(message: wire.TinkerTensor, where: str) -> np.ndarray[Any, Any]:
    kind = _ELEMENTS.get(message.element_type)
    if kind is None:
        raise RequestRefused(
            f"{where}: element type {message.element_type}; float32 (1), int64 (2), int32 (3) are known"
        )
    shape = tuple(message.shape)
    if len(shape) > 2 or any(not 0 <= size <= MAX_TARGETS for size in shape) or math.prod(shape) > MAX_TARGETS:
        raise RequestRefused(f"{where}: shape {list(shape)}; at most 2 dimensions and {MAX_TARGETS} elements")
    if not message.HasField("sparse"):
        values = _numbers(message.dense, kind, where)
        if shape and math.prod(shape) != values.size:
            raise RequestRefused(f"{where}: {values.size} values for shape {list(shape)}")
        return values.reshape(shape) if shape else values
    values = _numbers(message.sparse.values, kind, where)
    starts, columns = (_numbers(each, "<i8", where) for each in (message.sparse.row_starts, message.sparse.columns))
    is_csr = (
        len(shape) == 2
        and starts.size == shape[0] + 1
        and starts[0] == 0
        and starts[-1] == columns.size == values.size
        and bool((np.diff(starts) >= 0).all())
        and (columns.size == 0 or (columns.min() >= 0 and columns.max() < shape[1]))
    )
    if not is_csr:
        raise RequestRefused(f"{where}: rows and columns are not those of a sparse tensor of shape {list(shape)}")
    dense = np.zeros(shape, values.dtype)
    dense[np.repeat(np.arange(starts.size - 1), np.diff(starts)), columns] = values
    return dense


def _numbers(content: bytes, kind: str, where: str) -> np.ndarray[Any, Any]:
    if len(content) % np.dtype(kind).itemsize:
        raise RequestRefused(f"{where}: {len(content)} bytes are no whole number of elements")
    return np.frombuffer(content, kind)
