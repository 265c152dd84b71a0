from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PolicyVersion(_message.Message):
    __slots__ = ("policy_id", "step", "digest")
    POLICY_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    policy_id: str
    step: int
    digest: bytes
    def __init__(self, policy_id: _Optional[str] = ..., step: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("start", "version")
    START_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    start: int
    version: PolicyVersion
    def __init__(self, start: _Optional[int] = ..., version: _Optional[_Union[PolicyVersion, _Mapping]] = ...) -> None: ...

class SealedManifest(_message.Message):
    __slots__ = ("public_key", "signature", "body")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    signature: bytes
    body: bytes
    def __init__(self, public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., body: _Optional[bytes] = ...) -> None: ...
