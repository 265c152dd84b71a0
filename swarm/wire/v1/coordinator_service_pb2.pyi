from swarm.wire.v1 import advert_pb2 as _advert_pb2
from swarm.wire.v1 import policy_pb2 as _policy_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetManifestRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetManifestResponse(_message.Message):
    __slots__ = ("public_key", "signature", "manifest", "bootstrap_peers")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    BOOTSTRAP_PEERS_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    signature: bytes
    manifest: bytes
    bootstrap_peers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., manifest: _Optional[bytes] = ..., bootstrap_peers: _Optional[_Iterable[str]] = ...) -> None: ...

class EdgeReport(_message.Message):
    __slots__ = ("source", "num_groups", "age_mean_steps", "ess_share", "mismatch_kl", "reward_mean")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    AGE_MEAN_STEPS_FIELD_NUMBER: _ClassVar[int]
    ESS_SHARE_FIELD_NUMBER: _ClassVar[int]
    MISMATCH_KL_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    source: str
    num_groups: int
    age_mean_steps: float
    ess_share: float
    mismatch_kl: float
    reward_mean: float
    def __init__(self, source: _Optional[str] = ..., num_groups: _Optional[int] = ..., age_mean_steps: _Optional[float] = ..., ess_share: _Optional[float] = ..., mismatch_kl: _Optional[float] = ..., reward_mean: _Optional[float] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("name", "roles", "endpoints", "head", "tokens_per_s", "reward_mean", "num_local", "num_external", "num_refused", "edges", "evaluations")
    class EvaluationsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    NUM_LOCAL_FIELD_NUMBER: _ClassVar[int]
    NUM_EXTERNAL_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    EDGES_FIELD_NUMBER: _ClassVar[int]
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    name: str
    roles: _containers.RepeatedScalarFieldContainer[_advert_pb2.Role]
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    head: _policy_pb2.PolicyVersion
    tokens_per_s: float
    reward_mean: float
    num_local: int
    num_external: int
    num_refused: int
    edges: _containers.RepeatedCompositeFieldContainer[EdgeReport]
    evaluations: _containers.ScalarMap[str, float]
    def __init__(self, name: _Optional[str] = ..., roles: _Optional[_Iterable[_Union[_advert_pb2.Role, str]]] = ..., endpoints: _Optional[_Iterable[str]] = ..., head: _Optional[_Union[_policy_pb2.PolicyVersion, _Mapping]] = ..., tokens_per_s: _Optional[float] = ..., reward_mean: _Optional[float] = ..., num_local: _Optional[int] = ..., num_external: _Optional[int] = ..., num_refused: _Optional[int] = ..., edges: _Optional[_Iterable[_Union[EdgeReport, _Mapping]]] = ..., evaluations: _Optional[_Mapping[str, float]] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("max_age_steps", "source_weights", "state", "lease_s")
    class SourceWeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_AGE_STEPS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    max_age_steps: int
    source_weights: _containers.ScalarMap[str, float]
    state: str
    lease_s: float
    def __init__(self, max_age_steps: _Optional[int] = ..., source_weights: _Optional[_Mapping[str, float]] = ..., state: _Optional[str] = ..., lease_s: _Optional[float] = ...) -> None: ...

class RecordVersionsRequest(_message.Message):
    __slots__ = ("versions",)
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    versions: _containers.RepeatedCompositeFieldContainer[_policy_pb2.PolicyVersion]
    def __init__(self, versions: _Optional[_Iterable[_Union[_policy_pb2.PolicyVersion, _Mapping]]] = ...) -> None: ...

class RecordedVersion(_message.Message):
    __slots__ = ("accepted", "reason")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    accepted: bool
    reason: str
    def __init__(self, accepted: bool = ..., reason: _Optional[str] = ...) -> None: ...

class RecordVersionsResponse(_message.Message):
    __slots__ = ("answers",)
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[RecordedVersion]
    def __init__(self, answers: _Optional[_Iterable[_Union[RecordedVersion, _Mapping]]] = ...) -> None: ...

class WatchVersionsRequest(_message.Message):
    __slots__ = ("policy_id",)
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    def __init__(self, policy_id: _Optional[str] = ...) -> None: ...

class WatchVersionsResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: _policy_pb2.PolicyVersion
    def __init__(self, version: _Optional[_Union[_policy_pb2.PolicyVersion, _Mapping]] = ...) -> None: ...

class LeaveRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LeaveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
