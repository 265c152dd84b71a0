from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class ChallengeRequest(_message.Message):
    __slots__ = ("client_nonce",)
    CLIENT_NONCE_FIELD_NUMBER: _ClassVar[int]
    client_nonce: bytes
    def __init__(self, client_nonce: _Optional[bytes] = ...) -> None: ...

class ChallengeResponse(_message.Message):
    __slots__ = ("public_key", "server_nonce", "signature", "protocol_version")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SERVER_NONCE_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    server_nonce: bytes
    signature: bytes
    protocol_version: int
    def __init__(self, public_key: _Optional[bytes] = ..., server_nonce: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class HelloRequest(_message.Message):
    __slots__ = ("public_key", "signature", "run_id", "protocol_version", "credential")
    PUBLIC_KEY_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    CREDENTIAL_FIELD_NUMBER: _ClassVar[int]
    public_key: bytes
    signature: bytes
    run_id: str
    protocol_version: int
    credential: bytes
    def __init__(self, public_key: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., run_id: _Optional[str] = ..., protocol_version: _Optional[int] = ..., credential: _Optional[bytes] = ...) -> None: ...

class HelloResponse(_message.Message):
    __slots__ = ("session_token", "expires_in_s", "now_s")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_S_FIELD_NUMBER: _ClassVar[int]
    NOW_S_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    expires_in_s: int
    now_s: float
    def __init__(self, session_token: _Optional[bytes] = ..., expires_in_s: _Optional[int] = ..., now_s: _Optional[float] = ...) -> None: ...
