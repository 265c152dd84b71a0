from swarm.wire.v1 import advert_pb2 as _advert_pb2
from swarm.wire.v1 import policy_pb2 as _policy_pb2
from swarm.wire.v1 import rollout_pb2 as _rollout_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SubscribeRequest(_message.Message):
    __slots__ = ("cursor", "relay", "zero_variance", "commitments", "turn_signal")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    ZERO_VARIANCE_FIELD_NUMBER: _ClassVar[int]
    COMMITMENTS_FIELD_NUMBER: _ClassVar[int]
    TURN_SIGNAL_FIELD_NUMBER: _ClassVar[int]
    cursor: _advert_pb2.Cursor
    relay: bool
    zero_variance: bool
    commitments: bool
    turn_signal: bool
    def __init__(self, cursor: _Optional[_Union[_advert_pb2.Cursor, _Mapping]] = ..., relay: bool = ..., zero_variance: bool = ..., commitments: bool = ..., turn_signal: bool = ...) -> None: ...

class SubscribeResponse(_message.Message):
    __slots__ = ("cursor", "digest", "size_bytes", "group", "commitments", "producer")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    COMMITMENTS_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    cursor: _advert_pb2.Cursor
    digest: bytes
    size_bytes: int
    group: _rollout_pb2.SealedGroup
    commitments: _containers.RepeatedScalarFieldContainer[bytes]
    producer: str
    def __init__(self, cursor: _Optional[_Union[_advert_pb2.Cursor, _Mapping]] = ..., digest: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., group: _Optional[_Union[_rollout_pb2.SealedGroup, _Mapping]] = ..., commitments: _Optional[_Iterable[bytes]] = ..., producer: _Optional[str] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("digest", "offset")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    offset: int
    def __init__(self, digest: _Optional[bytes] = ..., offset: _Optional[int] = ...) -> None: ...

class FetchResponse(_message.Message):
    __slots__ = ("total_bytes", "offset", "data")
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    offset: int
    data: bytes
    def __init__(self, total_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ("policy_id", "window")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    window: int
    def __init__(self, policy_id: _Optional[str] = ..., window: _Optional[int] = ...) -> None: ...

class WatchResponse(_message.Message):
    __slots__ = ("manifest", "credit")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CREDIT_FIELD_NUMBER: _ClassVar[int]
    manifest: _policy_pb2.SealedManifest
    credit: Credit
    def __init__(self, manifest: _Optional[_Union[_policy_pb2.SealedManifest, _Mapping]] = ..., credit: _Optional[_Union[Credit, _Mapping]] = ...) -> None: ...

class Credit(_message.Message):
    __slots__ = ("head_step", "granted")
    HEAD_STEP_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    head_step: int
    granted: int
    def __init__(self, head_step: _Optional[int] = ..., granted: _Optional[int] = ...) -> None: ...

class FetchChunkRequest(_message.Message):
    __slots__ = ("digest", "offset")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    offset: int
    def __init__(self, digest: _Optional[bytes] = ..., offset: _Optional[int] = ...) -> None: ...

class FetchChunkResponse(_message.Message):
    __slots__ = ("total_bytes", "offset", "data")
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    total_bytes: int
    offset: int
    data: bytes
    def __init__(self, total_bytes: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...
