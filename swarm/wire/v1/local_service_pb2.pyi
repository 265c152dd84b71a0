from swarm.wire.v1 import policy_pb2 as _policy_pb2
from swarm.wire.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CapacityRequest(_message.Message):
    __slots__ = ("wait",)
    WAIT_FIELD_NUMBER: _ClassVar[int]
    wait: bool
    def __init__(self, wait: bool = ...) -> None: ...

class CapacityResponse(_message.Message):
    __slots__ = ("num_groups", "num_asked")
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    NUM_ASKED_FIELD_NUMBER: _ClassVar[int]
    num_groups: int
    num_asked: int
    def __init__(self, num_groups: _Optional[int] = ..., num_asked: _Optional[int] = ...) -> None: ...

class PutRequest(_message.Message):
    __slots__ = ("body", "producer", "outcomes")
    BODY_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    body: _rollout_pb2.GroupBody
    producer: str
    outcomes: bytes
    def __init__(self, body: _Optional[_Union[_rollout_pb2.GroupBody, _Mapping]] = ..., producer: _Optional[str] = ..., outcomes: _Optional[bytes] = ...) -> None: ...

class PutResponse(_message.Message):
    __slots__ = ("reward_mean",)
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    reward_mean: float
    def __init__(self, reward_mean: _Optional[float] = ...) -> None: ...

class DrawnGroup(_message.Message):
    __slots__ = ("digest", "producer", "body", "rewards", "correction", "is_made_here", "first_seen_s", "size_bytes", "age_steps", "use", "is_established", "outcomes")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    CORRECTION_FIELD_NUMBER: _ClassVar[int]
    IS_MADE_HERE_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEEN_S_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    AGE_STEPS_FIELD_NUMBER: _ClassVar[int]
    USE_FIELD_NUMBER: _ClassVar[int]
    IS_ESTABLISHED_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    producer: str
    body: _rollout_pb2.GroupBody
    rewards: bytes
    correction: str
    is_made_here: bool
    first_seen_s: float
    size_bytes: int
    age_steps: int
    use: int
    is_established: bool
    outcomes: bytes
    def __init__(self, digest: _Optional[bytes] = ..., producer: _Optional[str] = ..., body: _Optional[_Union[_rollout_pb2.GroupBody, _Mapping]] = ..., rewards: _Optional[bytes] = ..., correction: _Optional[str] = ..., is_made_here: bool = ..., first_seen_s: _Optional[float] = ..., size_bytes: _Optional[int] = ..., age_steps: _Optional[int] = ..., use: _Optional[int] = ..., is_established: bool = ..., outcomes: _Optional[bytes] = ...) -> None: ...

class DrawRequest(_message.Message):
    __slots__ = ("head",)
    HEAD_FIELD_NUMBER: _ClassVar[int]
    head: _policy_pb2.PolicyVersion
    def __init__(self, head: _Optional[_Union[_policy_pb2.PolicyVersion, _Mapping]] = ...) -> None: ...

class DrawResponse(_message.Message):
    __slots__ = ("step", "num_zero_variance", "num_groups", "source_weights", "group")
    class SourceWeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_ZERO_VARIANCE_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    step: int
    num_zero_variance: int
    num_groups: int
    source_weights: _containers.ScalarMap[str, float]
    group: DrawnGroup
    def __init__(self, step: _Optional[int] = ..., num_zero_variance: _Optional[int] = ..., num_groups: _Optional[int] = ..., source_weights: _Optional[_Mapping[str, float]] = ..., group: _Optional[_Union[DrawnGroup, _Mapping]] = ...) -> None: ...

class RedrawRequest(_message.Message):
    __slots__ = ("from_step",)
    FROM_STEP_FIELD_NUMBER: _ClassVar[int]
    from_step: int
    def __init__(self, from_step: _Optional[int] = ...) -> None: ...

class RedrawResponse(_message.Message):
    __slots__ = ("step", "num_zero_variance", "num_groups", "source_weights", "group")
    class SourceWeightsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_ZERO_VARIANCE_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    step: int
    num_zero_variance: int
    num_groups: int
    source_weights: _containers.ScalarMap[str, float]
    group: DrawnGroup
    def __init__(self, step: _Optional[int] = ..., num_zero_variance: _Optional[int] = ..., num_groups: _Optional[int] = ..., source_weights: _Optional[_Mapping[str, float]] = ..., group: _Optional[_Union[DrawnGroup, _Mapping]] = ...) -> None: ...

class BeginAgainRequest(_message.Message):
    __slots__ = ("step", "passed")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    step: int
    passed: bytes
    def __init__(self, step: _Optional[int] = ..., passed: _Optional[bytes] = ...) -> None: ...

class BeginAgainResponse(_message.Message):
    __slots__ = ("trial", "left_out")
    TRIAL_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_FIELD_NUMBER: _ClassVar[int]
    trial: bytes
    left_out: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, trial: _Optional[bytes] = ..., left_out: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PublishRequest(_message.Message):
    __slots__ = ("version", "manifests")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFESTS_FIELD_NUMBER: _ClassVar[int]
    version: _policy_pb2.PolicyVersion
    manifests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, version: _Optional[_Union[_policy_pb2.PolicyVersion, _Mapping]] = ..., manifests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NextUpdateRequest(_message.Message):
    __slots__ = ("held", "wait")
    HELD_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    held: _policy_pb2.PolicyVersion
    wait: bool
    def __init__(self, held: _Optional[_Union[_policy_pb2.PolicyVersion, _Mapping]] = ..., wait: bool = ...) -> None: ...

class NextUpdateResponse(_message.Message):
    __slots__ = ("manifest",)
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    manifest: _policy_pb2.SealedManifest
    def __init__(self, manifest: _Optional[_Union[_policy_pb2.SealedManifest, _Mapping]] = ...) -> None: ...

class AppliedRequest(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: bytes
    def __init__(self, report: _Optional[bytes] = ...) -> None: ...

class AppliedResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: bytes
    def __init__(self, report: _Optional[bytes] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SavedRequest(_message.Message):
    __slots__ = ("next_draw", "error")
    NEXT_DRAW_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    next_draw: int
    error: str
    def __init__(self, next_draw: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class SavedResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EvaluatedRequest(_message.Message):
    __slots__ = ("evaluations",)
    EVALUATIONS_FIELD_NUMBER: _ClassVar[int]
    evaluations: bytes
    def __init__(self, evaluations: _Optional[bytes] = ...) -> None: ...

class EvaluatedResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WarmedUpRequest(_message.Message):
    __slots__ = ("report",)
    REPORT_FIELD_NUMBER: _ClassVar[int]
    report: bytes
    def __init__(self, report: _Optional[bytes] = ...) -> None: ...

class WarmedUpResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("env", "task_id", "actions")
    ENV_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    env: str
    task_id: int
    actions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, env: _Optional[str] = ..., task_id: _Optional[int] = ..., actions: _Optional[_Iterable[str]] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: bytes
    def __init__(self, outcome: _Optional[bytes] = ...) -> None: ...

class ReportActivityRequest(_message.Message):
    __slots__ = ("what", "done", "total", "num_tokens", "at_s")
    WHAT_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AT_S_FIELD_NUMBER: _ClassVar[int]
    what: str
    done: int
    total: int
    num_tokens: int
    at_s: float
    def __init__(self, what: _Optional[str] = ..., done: _Optional[int] = ..., total: _Optional[int] = ..., num_tokens: _Optional[int] = ..., at_s: _Optional[float] = ...) -> None: ...

class ReportActivityResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("env", "task_id", "episodes")
    ENV_FIELD_NUMBER: _ClassVar[int]
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    EPISODES_FIELD_NUMBER: _ClassVar[int]
    env: str
    task_id: int
    episodes: bytes
    def __init__(self, env: _Optional[str] = ..., task_id: _Optional[int] = ..., episodes: _Optional[bytes] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("task", "outcomes", "verifier", "reference")
    TASK_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    task: bytes
    outcomes: bytes
    verifier: str
    reference: str
    def __init__(self, task: _Optional[bytes] = ..., outcomes: _Optional[bytes] = ..., verifier: _Optional[str] = ..., reference: _Optional[str] = ...) -> None: ...
