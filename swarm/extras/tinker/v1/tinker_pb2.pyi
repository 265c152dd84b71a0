from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TinkerSparse(_message.Message):
    __slots__ = ("values", "row_starts", "columns")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    ROW_STARTS_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    row_starts: bytes
    columns: bytes
    def __init__(self, values: _Optional[bytes] = ..., row_starts: _Optional[bytes] = ..., columns: _Optional[bytes] = ...) -> None: ...

class TinkerTensor(_message.Message):
    __slots__ = ("dense", "sparse", "element_type", "shape")
    DENSE_FIELD_NUMBER: _ClassVar[int]
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    dense: bytes
    sparse: TinkerSparse
    element_type: int
    shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, dense: _Optional[bytes] = ..., sparse: _Optional[_Union[TinkerSparse, _Mapping]] = ..., element_type: _Optional[int] = ..., shape: _Optional[_Iterable[int]] = ...) -> None: ...

class TinkerTokens(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    def __init__(self, token_ids: _Optional[bytes] = ...) -> None: ...

class TinkerChunk(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: TinkerTokens
    def __init__(self, text: _Optional[_Union[TinkerTokens, _Mapping]] = ...) -> None: ...

class TinkerDatum(_message.Message):
    __slots__ = ("model_input", "loss_inputs")
    class LossInputsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TinkerTensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TinkerTensor, _Mapping]] = ...) -> None: ...
    MODEL_INPUT_FIELD_NUMBER: _ClassVar[int]
    LOSS_INPUTS_FIELD_NUMBER: _ClassVar[int]
    model_input: _containers.RepeatedCompositeFieldContainer[TinkerChunk]
    loss_inputs: _containers.MessageMap[str, TinkerTensor]
    def __init__(self, model_input: _Optional[_Iterable[_Union[TinkerChunk, _Mapping]]] = ..., loss_inputs: _Optional[_Mapping[str, TinkerTensor]] = ...) -> None: ...

class TinkerConstant(_message.Message):
    __slots__ = ("number", "text")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    number: float
    text: str
    def __init__(self, number: _Optional[float] = ..., text: _Optional[str] = ...) -> None: ...

class TinkerForwardBackward(_message.Message):
    __slots__ = ("model_id", "seq_id", "data", "loss", "numbers", "is_forward_only", "constants")
    class NumbersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class ConstantsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TinkerConstant
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TinkerConstant, _Mapping]] = ...) -> None: ...
    MODEL_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    NUMBERS_FIELD_NUMBER: _ClassVar[int]
    IS_FORWARD_ONLY_FIELD_NUMBER: _ClassVar[int]
    CONSTANTS_FIELD_NUMBER: _ClassVar[int]
    model_id: str
    seq_id: int
    data: _containers.RepeatedCompositeFieldContainer[TinkerDatum]
    loss: str
    numbers: _containers.ScalarMap[str, float]
    is_forward_only: bool
    constants: _containers.MessageMap[str, TinkerConstant]
    def __init__(self, model_id: _Optional[str] = ..., seq_id: _Optional[int] = ..., data: _Optional[_Iterable[_Union[TinkerDatum, _Mapping]]] = ..., loss: _Optional[str] = ..., numbers: _Optional[_Mapping[str, float]] = ..., is_forward_only: bool = ..., constants: _Optional[_Mapping[str, TinkerConstant]] = ...) -> None: ...

class TinkerColumn(_message.Message):
    __slots__ = ("data", "offsets", "element_type", "trailing_shape")
    DATA_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    ELEMENT_TYPE_FIELD_NUMBER: _ClassVar[int]
    TRAILING_SHAPE_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    offsets: bytes
    element_type: int
    trailing_shape: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, data: _Optional[bytes] = ..., offsets: _Optional[bytes] = ..., element_type: _Optional[int] = ..., trailing_shape: _Optional[_Iterable[int]] = ...) -> None: ...

class TinkerRecords(_message.Message):
    __slots__ = ("type_tag", "columns", "num_data")
    class ColumnsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TinkerColumn
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TinkerColumn, _Mapping]] = ...) -> None: ...
    TYPE_TAG_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    NUM_DATA_FIELD_NUMBER: _ClassVar[int]
    type_tag: str
    columns: _containers.MessageMap[str, TinkerColumn]
    num_data: int
    def __init__(self, type_tag: _Optional[str] = ..., columns: _Optional[_Mapping[str, TinkerColumn]] = ..., num_data: _Optional[int] = ...) -> None: ...

class TinkerForwardBackwardReply(_message.Message):
    __slots__ = ("output_type", "outputs", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    OUTPUT_TYPE_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    output_type: str
    outputs: _containers.RepeatedCompositeFieldContainer[TinkerRecords]
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, output_type: _Optional[str] = ..., outputs: _Optional[_Iterable[_Union[TinkerRecords, _Mapping]]] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class TinkerTopTokens(_message.Message):
    __slots__ = ("token_ids", "logprobs", "k", "length")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    token_ids: bytes
    logprobs: bytes
    k: int
    length: int
    def __init__(self, token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., k: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class TinkerSequence(_message.Message):
    __slots__ = ("stop_reason", "token_ids", "logprobs", "top")
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    stop_reason: int
    token_ids: bytes
    logprobs: bytes
    top: TinkerTopTokens
    def __init__(self, stop_reason: _Optional[int] = ..., token_ids: _Optional[bytes] = ..., logprobs: _Optional[bytes] = ..., top: _Optional[_Union[TinkerTopTokens, _Mapping]] = ...) -> None: ...

class TinkerSampleReply(_message.Message):
    __slots__ = ("sequences", "prompt_logprobs", "prompt_top", "prompt_targets")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TARGETS_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[TinkerSequence]
    prompt_logprobs: bytes
    prompt_top: TinkerTopTokens
    prompt_targets: TinkerTensor
    def __init__(self, sequences: _Optional[_Iterable[_Union[TinkerSequence, _Mapping]]] = ..., prompt_logprobs: _Optional[bytes] = ..., prompt_top: _Optional[_Union[TinkerTopTokens, _Mapping]] = ..., prompt_targets: _Optional[_Union[TinkerTensor, _Mapping]] = ...) -> None: ...
