from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class DialBackRequest(_message.Message):
    __slots__ = ("port",)
    PORT_FIELD_NUMBER: _ClassVar[int]
    port: int
    def __init__(self, port: _Optional[int] = ...) -> None: ...

class DialBackResponse(_message.Message):
    __slots__ = ("host", "is_reached", "detail")
    HOST_FIELD_NUMBER: _ClassVar[int]
    IS_REACHED_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    host: str
    is_reached: bool
    detail: str
    def __init__(self, host: _Optional[str] = ..., is_reached: bool = ..., detail: _Optional[str] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("ticket", "origin", "port")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    origin: bytes
    port: int
    def __init__(self, ticket: _Optional[bytes] = ..., origin: _Optional[bytes] = ..., port: _Optional[int] = ...) -> None: ...

class ConnectRequest(_message.Message):
    __slots__ = ("node_id", "data")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    data: bytes
    def __init__(self, node_id: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class ConnectResponse(_message.Message):
    __slots__ = ("data", "ticket", "port")
    DATA_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    ticket: bytes
    port: int
    def __init__(self, data: _Optional[bytes] = ..., ticket: _Optional[bytes] = ..., port: _Optional[int] = ...) -> None: ...

class AcceptRequest(_message.Message):
    __slots__ = ("ticket", "data")
    TICKET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ticket: bytes
    data: bytes
    def __init__(self, ticket: _Optional[bytes] = ..., data: _Optional[bytes] = ...) -> None: ...

class AcceptResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class AnnounceRequest(_message.Message):
    __slots__ = ("advert",)
    ADVERT_FIELD_NUMBER: _ClassVar[int]
    advert: bytes
    def __init__(self, advert: _Optional[bytes] = ...) -> None: ...

class AnnounceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("adverts",)
    ADVERTS_FIELD_NUMBER: _ClassVar[int]
    adverts: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, adverts: _Optional[_Iterable[bytes]] = ...) -> None: ...
