from swarm.wire.v1 import policy_pb2 as _policy_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORTED: _ClassVar[FinishReason]

class BodyCodec(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BODY_CODEC_UNSPECIFIED: _ClassVar[BodyCodec]
    BODY_CODEC_IDENTITY: _ClassVar[BodyCodec]
    BODY_CODEC_ZSTD: _ClassVar[BodyCodec]

class TurnStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TURN_STATUS_UNSPECIFIED: _ClassVar[TurnStatus]
    TURN_STATUS_OK: _ClassVar[TurnStatus]
    TURN_STATUS_TOOL_ERROR: _ClassVar[TurnStatus]
    TURN_STATUS_MALFORMED: _ClassVar[TurnStatus]
    TURN_STATUS_LIMIT: _ClassVar[TurnStatus]

class ComputeDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMPUTE_DTYPE_UNSPECIFIED: _ClassVar[ComputeDtype]
    COMPUTE_DTYPE_FLOAT32: _ClassVar[ComputeDtype]
    COMPUTE_DTYPE_BFLOAT16: _ClassVar[ComputeDtype]
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORTED: FinishReason
BODY_CODEC_UNSPECIFIED: BodyCodec
BODY_CODEC_IDENTITY: BodyCodec
BODY_CODEC_ZSTD: BodyCodec
TURN_STATUS_UNSPECIFIED: TurnStatus
TURN_STATUS_OK: TurnStatus
TURN_STATUS_TOOL_ERROR: TurnStatus
TURN_STATUS_MALFORMED: TurnStatus
TURN_STATUS_LIMIT: TurnStatus
COMPUTE_DTYPE_UNSPECIFIED: ComputeDtype
COMPUTE_DTYPE_FLOAT32: ComputeDtype
COMPUTE_DTYPE_BFLOAT16: ComputeDtype

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "repetition_penalty", "max_new_tokens")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    max_new_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., repetition_penalty: _Optional[float] = ..., max_new_tokens: _Optional[int] = ...) -> None: ...

class TokenTrace(_message.Message):
    __slots__ = ("token_ids", "action_runs", "logprobs", "turn_starts", "spans", "byte_lengths")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ACTION_RUNS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TURN_STARTS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    BYTE_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    action_runs: _containers.RepeatedScalarFieldContainer[int]
    logprobs: bytes
    turn_starts: _containers.RepeatedScalarFieldContainer[int]
    spans: _containers.RepeatedCompositeFieldContainer[_policy_pb2.VersionSpan]
    byte_lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., action_runs: _Optional[_Iterable[int]] = ..., logprobs: _Optional[bytes] = ..., turn_starts: _Optional[_Iterable[int]] = ..., spans: _Optional[_Iterable[_Union[_policy_pb2.VersionSpan, _Mapping]]] = ..., byte_lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class Rollout(_message.Message):
    __slots__ = ("text", "trace", "sampling", "finish", "claimed_reward", "later_texts", "claimed_turns")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_REWARD_FIELD_NUMBER: _ClassVar[int]
    LATER_TEXTS_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_TURNS_FIELD_NUMBER: _ClassVar[int]
    text: str
    trace: TokenTrace
    sampling: Sampling
    finish: FinishReason
    claimed_reward: float
    later_texts: _containers.RepeatedScalarFieldContainer[str]
    claimed_turns: _containers.RepeatedCompositeFieldContainer[ClaimedTurn]
    def __init__(self, text: _Optional[str] = ..., trace: _Optional[_Union[TokenTrace, _Mapping]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., finish: _Optional[_Union[FinishReason, str]] = ..., claimed_reward: _Optional[float] = ..., later_texts: _Optional[_Iterable[str]] = ..., claimed_turns: _Optional[_Iterable[_Union[ClaimedTurn, _Mapping]]] = ...) -> None: ...

class ClaimedTurn(_message.Message):
    __slots__ = ("reward", "status")
    REWARD_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    reward: float
    status: TurnStatus
    def __init__(self, reward: _Optional[float] = ..., status: _Optional[_Union[TurnStatus, str]] = ...) -> None: ...

class GroupBody(_message.Message):
    __slots__ = ("run_id", "policy_id", "env", "task_id", "tokenizer_digest", "prompt_ids", "rollouts", "verifier", "created_at_s", "producer", "compute_dtype")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_S_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    policy_id: str
    env: str
    task_id: int
    tokenizer_digest: bytes
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    rollouts: _containers.RepeatedCompositeFieldContainer[Rollout]
    verifier: str
    created_at_s: float
    producer: bytes
    compute_dtype: ComputeDtype
    def __init__(self, run_id: _Optional[str] = ..., policy_id: _Optional[str] = ..., env: _Optional[str] = ..., task_id: _Optional[int] = ..., tokenizer_digest: _Optional[bytes] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., rollouts: _Optional[_Iterable[_Union[Rollout, _Mapping]]] = ..., verifier: _Optional[str] = ..., created_at_s: _Optional[float] = ..., producer: _Optional[bytes] = ..., compute_dtype: _Optional[_Union[ComputeDtype, str]] = ...) -> None: ...

class SealedGroup(_message.Message):
    __slots__ = ("public_key", "signature", "codec", "body")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    CODEC_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    signature: bytes
    codec: BodyCodec
    body: bytes
    def __init__(self, public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., codec: _Optional[_Union[BodyCodec, str]] = ..., body: _Optional[bytes] = ...) -> None: ...
