"""Requests of OpenAI's clients, with the token fields of vLLM: fields, bounds and refusals.

Invariant: a field of _NEUTRAL is refused by name if its value would change the samples; undeclared fields are ignored.

Sources: OpenAI API reference (chat completions, completions); vLLM `entrypoints/openai/*/protocol.py` (token prompts,
return_token_ids, prompt_logprobs, stop_token_ids) and `/inference/v1/generate`.
"""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from swarm.environments.replay import MAX_REWARD
from swarm.episode import OUTCOME, Message
from swarm.types import Sampling
from swarm.wire.rollout_groups import MAX_ID

MAX_CHOICES: Final = 64  # of one request: prompts times n
MAX_TOP: Final = 20
LEAST_TEMPERATURE: Final = 0.01  # logits overflow below it; also vLLM's lower bound
_MAX_STOPS: Final = 16
_MAX_TOOLS: Final = 128
_MAX_REWARDS: Final = 32
RUN_NAME: Final = r"^[A-Za-z0-9._-]{1,64}$"
TASK_NAME: Final = r"^[ -~]{1,128}$"
_NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {  # field -> values that change nothing
    "min_p": (0, None),
    "presence_penalty": (0, None),
    "frequency_penalty": (0, None),
    "repetition_penalty": (1, None),
    "length_penalty": (1, None),
    "logit_bias": ({}, None),
    "best_of": (1, None),
    "use_beam_search": (False, None),
    "min_tokens": (0, None),
    "ignore_eos": (False, None),
    "bad_words": ([], None),
    "allowed_token_ids": (None,),
    "logits_processors": ([], None),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "functions": ([], None),
    "function_call": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": ({}, None),
    "documents": ([], None),
    "audio": (None,),
    "echo": (False, None),
    "suffix": (None, ""),
    "truncate_prompt_tokens": (None,),
}

_KINDS: Final[Mapping[str | int, str]] = {
    "prompt": f"a text, token ids, or a list of at most {MAX_CHOICES} of these, none of them empty",
    "content": "a text or a list of text parts; images and audio are not supported",
    "stop": f"a string, or a list of at most {_MAX_STOPS}, each of 1 to 256 characters",
    "tool_choice": '"none", "auto", "required" or {"type": "function", "function": {"name": ...}}',
}

_IN_BOUNDED_TIME: Final = reprlib.Repr()
_IN_BOUNDED_TIME.maxlist = _IN_BOUNDED_TIME.maxdict = 16
_IN_BOUNDED_TIME.maxstring = _IN_BOUNDED_TIME.maxother = 80

Body = TypeVar("Body", bound=BaseModel)
Item = TypeVar("Item")
# The first wrong item ends the reading: an error for each would take seconds and gigabytes.
Many = Annotated[list[Item], Field(fail_fast=True)]
TokenIds = Annotated[Many[Annotated[int, Field(ge=0)]], Field(min_length=1)]
Stop = Annotated[str, Field(min_length=1, max_length=256)]


class RequestRefused(Exception):
    """A request is refused with an HTTP status; the message names field, value and bound."""

    def __init__(self, message: str, field: str = "", status: int = 400) -> None:
        super().__init__(message)
        self.field = field
        self.status = status


def _require_temperature(value: float) -> float:
    if 0 < value < LEAST_TEMPERATURE:
        raise ValueError(f"must be 0 (greedy) or at least {LEAST_TEMPERATURE}")
    return value


class _Fields(BaseModel):
    model_config = ConfigDict(extra="allow", strict=False)


class SamplingFields(_Fields):
    """Fields that control the sampling of tokens."""

    temperature: Annotated[float, Field(ge=0, le=100), AfterValidator(_require_temperature)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=MAX_ID)] = 0  # -1 and 0: off
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Stop | Annotated[Many[Stop], Field(max_length=_MAX_STOPS)] | None = None
    stop_token_ids: Many[int] | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def sampling(self, max_new_tokens: int) -> Sampling:
        """These fields as a `Sampling`."""
        return Sampling(
            temperature=self.temperature, top_p=self.top_p, top_k=max(self.top_k, 0), max_new_tokens=max_new_tokens
        )


class StreamOptions(_Fields):
    """Options of a streamed answer."""

    include_usage: bool = False


class AnswerFields(SamplingFields):
    """Fields that chat completions and completions share."""

    model: str = ""
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False


class TextPart(_Fields):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class FunctionFields(_Fields):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None

    @property
    def shown(self) -> dict[str, Any]:
        """The fields of the function that the model is shown."""
        fields = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {name: value for name, value in fields.items() if value is not None}


class ToolFields(_Fields):
    """A tool of a request; functions are the only kind."""

    type: Literal["function"]
    function: FunctionFields


class FunctionName(_Fields):
    """Name of a function."""

    name: str


class NamedChoice(_Fields):
    """A `tool_choice` of one function."""

    type: Literal["function"]
    function: FunctionName


class CalledFunction(_Fields):
    """Function of a call, its arguments as JSON text."""

    name: str
    arguments: str = "{}"


class CallFields(_Fields):
    """A call in a message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class JsonSchema(_Fields):
    """A JSON schema and its name."""

    name: str = ""
    schema_: Annotated[dict[str, Any], Field(alias="schema")] = Field(default_factory=dict)


class ResponseFormat(_Fields):
    """Form of an answer: any text, a JSON object, or JSON of a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatMessage(_Fields):
    """A message of a chat, as clients write it."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[TextPart] | None = None
    tool_calls: Annotated[Many[CallFields], Field(max_length=64)] | None = None
    tool_call_id: str | None = None

    @property
    def message(self) -> Message:
        """This message as a `swarm.episode.Message`; the role developer becomes system."""
        given = self.content or ""
        text = given if isinstance(given, str) else "".join(part.text for part in given)
        return Message(role="system" if self.role == "developer" else self.role, content=text)


Messages = Annotated[Many[ChatMessage], Field(min_length=1, max_length=4096)]


class ChatRequest(AnswerFields):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] = 0
    tools: Annotated[Many[ToolFields], Field(max_length=_MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None


class OpenRun(_Fields):
    """Body of POST /v1/episodes."""

    model_config = ConfigDict(extra="forbid")

    id: Annotated[str, Field(pattern=RUN_NAME)] | None = None
    task: Annotated[str, Field(pattern=TASK_NAME)] | None = None
    held_out: bool = False  # measured, never learned from


class RewardFields(_Fields):
    """Body of POST /v1/episodes/{id}/reward: one reward, or several by name."""

    model_config = ConfigDict(extra="forbid")

    reward: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    rewards: (
        Annotated[
            dict[
                Annotated[str, Field(pattern=RUN_NAME)],
                Annotated[float, Field(ge=-MAX_REWARD, le=MAX_REWARD, allow_inf_nan=False)],
            ],
            Field(min_length=1, max_length=_MAX_REWARDS),
        ]
        | None
    ) = None

    @property
    def named(self) -> dict[str, float]:
        """The rewards by name. Raises RequestRefused unless one field is given, its `outcome` or mean in [0, 1]."""
        if (self.reward is None) == (self.rewards is None):
            raise RequestRefused("reward: give `reward`, a number in [0, 1], or `rewards` by name", "reward")
        found = {OUTCOME: self.reward} if self.reward is not None else dict(self.rewards or {})
        worth = found.get(OUTCOME, sum(found.values()) / len(found))
        if not 0 <= worth <= 1:
            what = OUTCOME if OUTCOME in found else "their mean, which counts without `outcome`,"
            raise RequestRefused(f"rewards: {what} is {worth:g}, outside of [0, 1]; scale it", "rewards")
        return found


class TextRequest(AnswerFields):
    """Body of POST /v1/completions."""

    prompt: (
        str
        | TokenIds
        | Annotated[Many[str], Field(min_length=1, max_length=MAX_CHOICES)]
        | Annotated[Many[TokenIds], Field(min_length=1, max_length=MAX_CHOICES)]
    )
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=0)] | None = None  # each token's own alone


class GenerateFields(SamplingFields):
    """`sampling_params` of /inference/v1/generate."""

    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None


class TokensRequest(_Fields):
    """Body of POST /inference/v1/generate: token ids in, token ids out."""

    token_ids: TokenIds
    sampling_params: GenerateFields = GenerateFields()
    model: str = ""
    stream: Literal[False] = False


class TokenizeRequest(_Fields):
    """Body of POST /tokenize: a text, or a conversation up to where its next answer begins."""

    prompt: str | None = None
    messages: Messages | None = None
    model: str = ""


class DetokenizeRequest(_Fields):
    """Body of POST /detokenize."""

    tokens: Many[Annotated[int, Field(ge=0)]]
    model: str = ""


def read_request(kind: type[Body], data: object) -> Body:
    """Checks decoded JSON and returns it as a request. Raises RequestRefused, which names the first wrong field."""
    if not isinstance(data, dict):
        raise RequestRefused(f"the body must be a JSON object, got {type(data).__name__}")
    data = {name: value for name, value in cast("dict[str, Any]", data).items() if value is not None}
    try:
        request = kind.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        parts = list(first["loc"])
        words, given = first["msg"], first["input"]
        for place, part in enumerate(parts):
            if part in _KINDS and first["type"] != "missing":  # pydantic would list each kind that it may be
                parts, words = parts[: place + 1], f"Input should be {_KINDS[part]}"
                given = _at(data, parts)
        field = ".".join(map(str, parts))
        got = "" if first["type"] == "missing" else f", got {_short(given)}"
        raise RequestRefused(f"{field or 'body'}: {words}{got}", field) from None
    _refuse_what_would_change_samples(request)
    return request


def _refuse_what_would_change_samples(request: BaseModel) -> None:
    for name, value in (request.model_extra or {}).items():
        if name in _NEUTRAL and value not in _NEUTRAL[name]:
            raise RequestRefused(f"{name}: {_short(value)} is not supported; leave it out", name)
    for name in type(request).model_fields:
        inner = getattr(request, name)
        if isinstance(inner, SamplingFields):
            _refuse_what_would_change_samples(inner)


def _at(data: Any, parts: Sequence[str | int]) -> Any:
    for part in parts:
        data = data[part]
    return data


def _short(value: Any) -> str:
    text = _IN_BOUNDED_TIME.repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
