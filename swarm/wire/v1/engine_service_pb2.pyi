from swarm.wire.v1 import policy_pb2 as _policy_pb2
from swarm.wire.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StateRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StateResponse(_message.Message):
    __slots__ = ("version", "name", "num_loads")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    NUM_LOADS_FIELD_NUMBER: _ClassVar[int]
    version: _policy_pb2.PolicyVersion
    name: str
    num_loads: int
    def __init__(self, version: _Optional[_Union[_policy_pb2.PolicyVersion, _Mapping]] = ..., name: _Optional[str] = ..., num_loads: _Optional[int] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("prompts", "num_samples", "sampling", "seeds", "greedy")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEEDS_FIELD_NUMBER: _ClassVar[int]
    GREEDY_FIELD_NUMBER: _ClassVar[int]
    prompts: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    num_samples: int
    sampling: _rollout_pb2.Sampling
    seeds: _containers.RepeatedScalarFieldContainer[int]
    greedy: bool
    def __init__(self, prompts: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., num_samples: _Optional[int] = ..., sampling: _Optional[_Union[_rollout_pb2.Sampling, _Mapping]] = ..., seeds: _Optional[_Iterable[int]] = ..., greedy: bool = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("prompt", "sample", "rollout")
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    prompt: int
    sample: int
    rollout: _rollout_pb2.Rollout
    def __init__(self, prompt: _Optional[int] = ..., sample: _Optional[int] = ..., rollout: _Optional[_Union[_rollout_pb2.Rollout, _Mapping]] = ...) -> None: ...

class CancelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CancelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScoreSequencesRequest(_message.Message):
    __slots__ = ("sequences",)
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    def __init__(self, sequences: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ...) -> None: ...

class ScoreSequencesResponse(_message.Message):
    __slots__ = ("logprobs",)
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprobs: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, logprobs: _Optional[_Iterable[bytes]] = ...) -> None: ...

class LoadRequest(_message.Message):
    __slots__ = ("version", "path", "digest", "canaries", "tolerance_nats", "in_flight")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    CANARIES_FIELD_NUMBER: _ClassVar[int]
    TOLERANCE_NATS_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    version: _policy_pb2.PolicyVersion
    path: str
    digest: bytes
    canaries: _containers.RepeatedCompositeFieldContainer[Canary]
    tolerance_nats: float
    in_flight: bool
    def __init__(self, version: _Optional[_Union[_policy_pb2.PolicyVersion, _Mapping]] = ..., path: _Optional[str] = ..., digest: _Optional[bytes] = ..., canaries: _Optional[_Iterable[_Union[Canary, _Mapping]]] = ..., tolerance_nats: _Optional[float] = ..., in_flight: bool = ...) -> None: ...

class Canary(_message.Message):
    __slots__ = ("token_ids", "logprobs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: bytes
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[bytes] = ...) -> None: ...

class LoadResponse(_message.Message):
    __slots__ = ("error", "mismatch_nats", "pause_seconds")
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MISMATCH_NATS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    error: str
    mismatch_nats: float
    pause_seconds: float
    def __init__(self, error: _Optional[str] = ..., mismatch_nats: _Optional[float] = ..., pause_seconds: _Optional[float] = ...) -> None: ...
