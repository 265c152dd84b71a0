"""OpenAI's Responses dialect over chat completions: the part that agents need, with the whole input in each request.

Invariant: nothing is kept between requests; fields that need kept state (`previous_response_id`), references and tools
that the server runs are refused by name. Adjacent items of the assistant are one turn of the model, as sampled.

Source: OpenAI API reference (responses, streaming events).
"""

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, cast

from pydantic import BaseModel, ConfigDict, Field

from swarm.serving.openai_replies import call_fields, usage
from swarm.serving.openai_requests import ChatRequest, RequestRefused, read_request
from swarm.serving.turn_form import ChatTurn
from swarm.types import FinishReason, JsonDict

_KEPT_NOWHERE = {
    "previous_response_id": (None,),
    "conversation": (None,),
    "prompt": (None,),
    "background": (False, None),
}
_SAMPLING = ("model", "temperature", "top_p", "top_logprobs", "stream", "parallel_tool_calls", "seed")


class ResponsesRequest(BaseModel):
    """Body of POST /v1/responses."""

    model_config = ConfigDict(extra="allow")

    model: str = ""
    input: str | Annotated[list[dict[str, Any]], Field(min_length=1, max_length=4096)]
    instructions: str | None = None
    tools: Annotated[list[dict[str, Any]], Field(max_length=128)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    text: dict[str, Any] | None = None
    stream: bool = False


def to_chat(asked: ResponsesRequest) -> ChatRequest:
    """Converts a request to a chat completion. Raises RequestRefused for an unsupported field, item or tool."""
    extra = asked.model_extra or {}
    for name in _KEPT_NOWHERE:
        if extra.get(name):
            raise RequestRefused(f"{name}: nothing is kept here between requests; send the whole input", name)
    fields = {name: extra[name] for name in _SAMPLING if name in extra}
    fields |= {"model": asked.model, "stream": asked.stream, "max_completion_tokens": asked.max_output_tokens}
    fields |= {"parallel_tool_calls": asked.parallel_tool_calls, "tool_choice": asked.tool_choice}
    if asked.tools:
        fields["tools"] = [_tool(each, place) for place, each in enumerate(asked.tools)]
    if isinstance(asked.tool_choice, dict):
        choice = asked.tool_choice
        fields["tool_choice"] = {"type": choice.get("type"), "function": {"name": choice.get("name")}}
    form = (asked.text or {}).get("format") or {}
    if form:
        named = {"name": form.get("name", ""), "schema": form.get("schema")}
        fields["response_format"] = {"type": form.get("type")} | ({"json_schema": named} if "schema" in form else {})
    first = [{"role": "system", "content": asked.instructions}] if asked.instructions else []
    fields["messages"] = [*first, *_messages(asked.input)]
    return read_request(ChatRequest, fields)


def response_body(asked: ResponsesRequest, turn: ChatTurn, head: JsonDict) -> JsonDict:
    """The reply with a whole turn; `head` is from `response_head`."""
    is_cut = turn.answer.completion.finish is FinishReason.LENGTH
    counts = usage([turn.answer], 1)
    return head | {
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": [*_output(turn, is_cut)],
        "usage": {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": counts["total_tokens"],
        },
    }


def response_head(asked: ResponsesRequest, model: str) -> JsonDict:
    """The body of a response before any output."""
    extra = asked.model_extra or {}
    return {
        "id": f"resp_{secrets.token_hex(12)}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": asked.instructions,
        "metadata": extra.get("metadata") or {},
        "model": model,
        "output": [],
        "parallel_tool_calls": asked.parallel_tool_calls is not False,
        "temperature": extra.get("temperature", 1.0),
        "tool_choice": asked.tool_choice or "auto",
        "tools": asked.tools,
        "top_p": extra.get("top_p", 1.0),
        "usage": None,
    }


def stream_events(head: JsonDict, body: JsonDict | None) -> Iterator[JsonDict]:
    """Yields the events of a streamed response, without numbers: the first two if `body` is None, else the others."""
    if body is None:
        yield {"type": "response.created", "response": head}
        yield {"type": "response.in_progress", "response": head}
        return
    for index, item in enumerate(body["output"]):
        at = {"output_index": index, "item_id": item["id"]}
        begun = item | {"status": "in_progress"}
        if item["type"] == "message":
            (part,) = item["content"]
            text = {**at, "content_index": 0}
            yield {"type": "response.output_item.added", "output_index": index, "item": begun | {"content": []}}
            yield {"type": "response.content_part.added", **text, "part": part | {"text": ""}}
            yield {"type": "response.output_text.delta", **text, "delta": part["text"], "logprobs": []}
            yield {"type": "response.output_text.done", **text, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **text, "part": part}
        else:
            arguments = item["arguments"]
            yield {"type": "response.output_item.added", "output_index": index, "item": begun | {"arguments": ""}}
            yield {"type": "response.function_call_arguments.delta", **at, "delta": arguments}
            yield {
                "type": "response.function_call_arguments.done",
                **at,
                "name": item["name"],
                "arguments": arguments,
            }
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{body['status']}", "response": body}


def _output(turn: ChatTurn, is_cut: bool) -> Iterator[JsonDict]:
    status = "incomplete" if is_cut else "completed"
    if turn.content or not turn.calls:
        part = {"type": "output_text", "text": turn.content, "annotations": [], "logprobs": []}
        head = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant", "status": status}
        yield head | {"content": [part]}
    for call in call_fields(turn):
        yield {
            "id": f"fc_{secrets.token_hex(12)}",
            "type": "function_call",
            "call_id": call["id"],
            **call["function"],
            "status": status,
        }


def _tool(tool: Mapping[str, Any], place: int) -> JsonDict:
    if tool.get("type") != "function":
        raise RequestRefused(
            f"tools.{place}.type: {str(tool.get('type'))[:80]!r} is not supported; `function` is", "tools"
        )
    return {
        "type": "function",
        "function": {k: v for k, v in tool.items() if k in ("name", "description", "parameters")},
    }


def _messages(given: str | Sequence[Mapping[str, Any]]) -> list[JsonDict]:
    """Messages of the items; adjacent items of the assistant, text and calls, become one message."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[JsonDict] = []
    is_open = False  # the last message is the assistant's
    for place, item in enumerate(given):
        kind = item.get("type", "message")
        if kind == "reasoning":
            continue
        if kind == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"))})
        elif kind == "function_call" or (kind == "message" and item.get("role") == "assistant"):
            if not is_open:
                messages.append({"role": "assistant", "content": ""})
            if kind == "message":
                messages[-1]["content"] += _text(item.get("content"))
            else:
                function = {"name": item.get("name"), "arguments": item.get("arguments", "{}")}
                call = {"id": item.get("call_id"), "type": "function", "function": function}
                messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": _text(item.get("content"))})
        else:
            raise RequestRefused(f"input.{place}.type: {str(kind)[:80]!r} is not supported", "input")
        is_open = messages[-1]["role"] == "assistant"
    return messages


def _text(content: object) -> Any:
    """Content as chat messages have it: a text of all parts; anything else is left to the chat request's check."""
    if not isinstance(content, list):
        return "" if content is None else content if isinstance(content, str) else json.dumps(content)
    parts = cast("list[Any]", content)
    for part in parts:
        if not isinstance(part, dict) or part.get("type") not in ("input_text", "output_text", "text", "refusal"):
            raise RequestRefused(
                "input: a content is a text or a list of text parts; images and files are not", "input"
            )
    return "".join(str(part.get("text", part.get("refusal", ""))) for part in parts)
