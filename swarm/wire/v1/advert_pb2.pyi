from swarm.wire.v1 import policy_pb2 as _policy_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Role(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROLE_UNSPECIFIED: _ClassVar[Role]
    ROLE_TRAINER: _ClassVar[Role]
    ROLE_GENERATOR: _ClassVar[Role]
    ROLE_RELAY: _ClassVar[Role]

class Correction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CORRECTION_UNSPECIFIED: _ClassVar[Correction]
    CORRECTION_EXACT: _ClassVar[Correction]
    CORRECTION_NO_LOGPROBS: _ClassVar[Correction]
    CORRECTION_TEXT_ONLY: _ClassVar[Correction]
ROLE_UNSPECIFIED: Role
ROLE_TRAINER: Role
ROLE_GENERATOR: Role
ROLE_RELAY: Role
CORRECTION_UNSPECIFIED: Correction
CORRECTION_EXACT: Correction
CORRECTION_NO_LOGPROBS: Correction
CORRECTION_TEXT_ONLY: Correction

class Cursor(_message.Message):
    __slots__ = ("epoch", "sequence")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    sequence: int
    def __init__(self, epoch: _Optional[str] = ..., sequence: _Optional[int] = ...) -> None: ...

class Advert(_message.Message):
    __slots__ = ("run_id", "endpoints", "roles", "tokenizer_digest", "head", "oldest_step", "num_groups", "reward_mean", "reward_std", "correction", "held_bytes", "cursor", "expires_at_s", "credential", "equivocator", "relay_reservations")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ENDPOINTS_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    OLDEST_STEP_FIELD_NUMBER: _ClassVar[int]
    NUM_GROUPS_FIELD_NUMBER: _ClassVar[int]
    REWARD_MEAN_FIELD_NUMBER: _ClassVar[int]
    REWARD_STD_FIELD_NUMBER: _ClassVar[int]
    CORRECTION_FIELD_NUMBER: _ClassVar[int]
    HELD_BYTES_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_S_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    EQUIVOCATOR_FIELD_NUMBER: _ClassVar[int]
    RELAY_RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    endpoints: _containers.RepeatedScalarFieldContainer[str]
    roles: _containers.RepeatedScalarFieldContainer[Role]
    tokenizer_digest: bytes
    head: _policy_pb2.PolicyVersion
    oldest_step: int
    num_groups: int
    reward_mean: float
    reward_std: float
    correction: Correction
    held_bytes: int
    cursor: Cursor
    expires_at_s: float
    credential: bytes
    equivocator: bytes
    relay_reservations: int
    def __init__(self, run_id: _Optional[str] = ..., endpoints: _Optional[_Iterable[str]] = ..., roles: _Optional[_Iterable[_Union[Role, str]]] = ..., tokenizer_digest: _Optional[bytes] = ..., head: _Optional[_Union[_policy_pb2.PolicyVersion, _Mapping]] = ..., oldest_step: _Optional[int] = ..., num_groups: _Optional[int] = ..., reward_mean: _Optional[float] = ..., reward_std: _Optional[float] = ..., correction: _Optional[_Union[Correction, str]] = ..., held_bytes: _Optional[int] = ..., cursor: _Optional[_Union[Cursor, _Mapping]] = ..., expires_at_s: _Optional[float] = ..., credential: _Optional[bytes] = ..., equivocator: _Optional[bytes] = ..., relay_reservations: _Optional[int] = ...) -> None: ...

class SignedAdvert(_message.Message):
    __slots__ = ("public_key", "signature", "body")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    signature: bytes
    body: bytes
    def __init__(self, public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., body: _Optional[bytes] = ...) -> None: ...
