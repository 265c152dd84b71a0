"""JSON requests of the tinker SDK: their fields, bounds and refusals.

Invariant: a known field that would change training or sampling is honoured or refused by name, except `train_unembed`,
which is accepted without effect. Unknown fields, and fields for the service's billing and search, are ignored.

Source: types of the tinker SDK 0.38 (Apache-2.0): field names, defaults and URL paths.
"""

import itertools
import math
import re
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator

from swarm.serving.openai_requests import LEAST_TEMPERATURE, Many, RequestRefused
from swarm.types import Sampling

MAX_RANK: Final = 512
MAX_SAMPLES: Final = 256  # of one request
MAX_TOP: Final = 20
MAX_STOPS: Final = 16
MAX_CELLS: Final = 2**16  # of target_prompt_logprobs
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")

Body = TypeVar("Body", bound=BaseModel)
Id = Annotated[str, Field(min_length=1, max_length=200)]
Place = Annotated[int, Field(ge=0, lt=2**63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Notes = Annotated[
    dict[Annotated[str, Field(max_length=200)], Annotated[str, Field(max_length=2000)]], Field(max_length=64)
]
"""What a client wrote to a run, such as the renderer of its chats; given back as it is."""


class _Request(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class CreateSession(_Request):
    """Body of POST /api/v1/create_session and client/config."""

    sdk_version: str = ""


class InSession(_Request):
    """Body of POST /api/v1/session_heartbeat, and base of requests in a session."""

    session_id: Id


class LoraSettings(_Request):
    """`lora_config` of a new model."""

    rank: Annotated[int, Field(ge=1, le=MAX_RANK)]
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True  # its layer stays as it is: see docs/serving.md


class OptimizerKind(_Request):
    """`optimizer_config` of a new model."""

    type: Literal["adamw"] = "adamw"


class CreateModel(InSession):
    """Body of POST /api/v1/create_model."""

    model_seq_id: Place
    base_model: str
    lora_config: LoraSettings | None = None
    optimizer_config: OptimizerKind = OptimizerKind()
    user_metadata: Notes | None = None


class OfModel(_Request):
    """Body of POST /api/v1/get_info, and base of requests to a model."""

    model_id: Id


class InOrder(OfModel):
    """Base of requests to a model that are done in the order of `seq_id`, which begins at 1."""

    seq_id: Annotated[int, Field(ge=1, lt=2**31)]


class AdamStep(_Request):
    """`adam_params` of an optimizer step."""

    learning_rate: Annotated[Finite, Field(ge=0)] = 1e-4
    beta1: Annotated[Finite, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[Finite, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[Finite, Field(ge=0)] = 1e-12
    weight_decay: Annotated[Finite, Field(ge=0)] = 0.0
    grad_clip_norm: Annotated[Finite, Field(ge=0)] = 0.0  # 0: none


class OptimStep(InOrder):
    """Body of POST /api/v1/optim_step."""

    adam: AdamStep = Field(validation_alias=AliasChoices("adam_params", "optim_params"))


class SaveWeights(InOrder):
    """Body of POST /api/v1/save_weights and save_weights_for_sampler."""

    path: str | None = None  # a name; None: for sampling alone, until newer ones take its place
    sampling_session_seq_id: Place | None = None
    kind: Literal["snapshot"] = "snapshot"
    ttl_seconds: Annotated[int, Field(ge=1)] | None = None
    overwrite: bool = False


class _Load(_Request):
    base_model: str | None = None
    path: str
    optimizer: bool


class LoadIntoModel(InOrder, _Load):
    """Body of POST /api/v1/load_weights with a model_id: into that model."""


class LoadNewModel(InSession, _Load):
    """Body of POST /api/v1/load_weights without a model_id: into a new model of a session."""

    model_seq_id: Place
    optimizer_config: OptimizerKind | None = None
    user_metadata: Notes | None = None


class WeightsPath(_Request):
    """Body of POST /api/v1/weights_info."""

    tinker_path: str


class CreateSampler(InSession):
    """Body of POST /api/v1/create_sampling_session."""

    sampling_session_seq_id: Place
    base_model: str | None = None
    model_path: str | None = None


class TokenChunk(_Request):
    """One chunk of a prompt, as token ids."""

    type: str = "encoded_text"
    tokens: Many[Annotated[int, Field(ge=0)]]

    @field_validator("type")
    @classmethod
    def _of_text(cls, value: str) -> str:
        if value != "encoded_text":
            raise ValueError("only chunks of tokens are served, no images or audio")
        return value


class Chunks(_Request):
    """A prompt, as a list of chunks."""

    chunks: Many[TokenChunk]

    @property
    def token_ids(self) -> list[int]:
        """Token ids of all chunks, in order."""
        return [token for chunk in self.chunks for token in chunk.tokens]


class TinkerSampling(_Request):
    """`sampling_params` of a sample request."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    seed: int | None = None
    stop: str | Many[str] | Many[int] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(s for s in self.stop or () if isinstance(s, str))

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer, besides the model's own end tokens."""
        return () if isinstance(self.stop, str) else tuple(s for s in self.stop or () if isinstance(s, int))

    def sampling(self, room: int) -> Sampling:
        """Converts these parameters to `Sampling`.

        Args:
            room: tokens that the context has left; the default of `max_tokens`.

        Raises:
            RequestRefused: max_tokens exceeds the room, or a value is not served.
        """
        if 0 < self.temperature < LEAST_TEMPERATURE:
            raise RequestRefused(f"sampling_params.temperature: must be 0 (greedy) or at least {LEAST_TEMPERATURE}")
        if self.stop == []:
            raise RequestRefused("sampling_params.stop: [] would go on behind the end token; not served, leave it out")
        if len(self.stops) > MAX_STOPS or any(not 1 <= len(text) <= 256 for text in self.stops):
            raise RequestRefused(f"sampling_params.stop: at most {MAX_STOPS} strings, each of 1 to 256 characters")
        if (self.max_tokens or 1) > room:
            raise RequestRefused(f"sampling_params.max_tokens: {self.max_tokens or 1}, the context has {room} left")
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=max(self.top_k, 0),
            max_new_tokens=self.max_tokens or room,
        )


class PromptTargets(_Request):
    """`target_prompt_logprobs` of a sample request: tokens to score at a prompt's places, [L - 1, K], -1 for none."""

    dtype: Literal["int64"]
    data: Annotated[Many[Annotated[int, Field(ge=-1)]], Field(min_length=1, max_length=MAX_CELLS)]
    shape: tuple[Place, Place]
    sparse_crow_indices: Many[Place] | None = None  # CSR: where each row begins in `data`, and where the last one ends
    sparse_col_indices: Many[Place] | None = None

    def cells(self, num_rows: int, vocabulary: int) -> tuple[list[int], list[int]]:
        """Row and token of each cell in `data`, in order; -1 counts as token 0. Raises RequestRefused."""
        starts, columns, count = self.sparse_crow_indices, self.sparse_col_indices, len(self.data)
        if starts is None:
            rows, is_whole = [place // max(self.shape[1], 1) for place in range(count)], count == math.prod(self.shape)
        else:
            sizes = [after - before for before, after in itertools.pairwise(starts[: num_rows + 2])]
            is_whole = starts[:1] == [0] and starts[-1] == count == len(columns or ()) and len(starts) == num_rows + 1
            is_whole = is_whole and min(sizes) >= 0 and max(columns or ()) < self.shape[1]
            rows = [row for row, size in enumerate(sizes) for _ in range(size)] if is_whole else []
        if self.shape[0] != num_rows or not is_whole or max(self.data) >= vocabulary:
            raise RequestRefused(
                f"target_prompt_logprobs: shape {list(self.shape)} with {count} tokens up to {max(self.data)}; this "
                f"prompt has {num_rows} rows, and tokens are below {vocabulary}"
            )
        return rows, [max(token, 0) for token in self.data]


class SampleRequest(_Request):
    """Body of POST /api/v1/asample."""

    sampling_session_id: Id
    seq_id: Place
    num_samples: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] = 1
    prompt: Chunks
    sampling_params: TinkerSampling = TinkerSampling()
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=0)] = 0
    target_prompt_logprobs: PromptTargets | None = None
    record_stability_info: bool | None = None

    @field_validator("record_stability_info")
    @classmethod
    def _not_recorded(cls, value: bool | None) -> bool | None:
        if value:
            raise ValueError("stable_reinforce is not served, as its formula is not public; set another loss_fn")
        return value


class OfRequest(_Request):
    """Body of POST /api/v1/retrieve_future and cancel_future."""

    request_id: Id


def read_tinker_request(kind: type[Body], data: object) -> Body:
    """Reads a request from decoded JSON. Raises RequestRefused, which names the first field that is not accepted."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        given = "" if first["type"] == "missing" else f", got {_short(first['input'])}"
        reason = first["msg"].removeprefix("Value error, ")
        raise RequestRefused(f"{field or 'body'}: {reason}{given}", field, 422) from None


def checked_name(name: str) -> str:
    """Returns a name of saved weights that is fit for a folder. Raises RequestRefused for any other name."""
    if not _NAME.fullmatch(name):
        raise RequestRefused(
            f"path: {_short(name)} is no name of weights; letters, digits, '.', '_' and '-', at most 128, "
            "a letter or digit first"
        )
    return name


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
