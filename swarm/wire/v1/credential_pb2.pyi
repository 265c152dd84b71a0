from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Invitation(_message.Message):
    __slots__ = ("public_key", "expires_at_s", "signature")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_AT_S_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    expires_at_s: int
    signature: bytes
    def __init__(self, public_key: _Optional[bytes] = ..., expires_at_s: _Optional[int] = ..., signature: _Optional[bytes] = ...) -> None: ...

class WorkProof(_message.Message):
    __slots__ = ("epoch", "nonce")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    nonce: int
    def __init__(self, epoch: _Optional[int] = ..., nonce: _Optional[int] = ...) -> None: ...

class Credential(_message.Message):
    __slots__ = ("invitation", "work")
    INVITATION_FIELD_NUMBER: _ClassVar[int]
    WORK_FIELD_NUMBER: _ClassVar[int]
    invitation: Invitation
    work: WorkProof
    def __init__(self, invitation: _Optional[_Union[Invitation, _Mapping]] = ..., work: _Optional[_Union[WorkProof, _Mapping]] = ...) -> None: ...
