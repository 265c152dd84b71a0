"""Form of a chat answer: tools that it may call, and JSON mode, shown to the model in words and read from its text.

A model calls a tool in the text of its turn, in the syntax of `swarm.environments.tool_calls`. An answer without the
form (a call, JSON) is sampled again, up to MAX_TRIES answers in all.

Invariant: a turn that a client sends back, its calls as fields or as text, has the text of the turn that was sent.

Sources: OpenAI API reference (function calling, structured outputs); the words of Qwen 2.5's chat template for tools.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, cast

from swarm.environments.tool_calls import CLOSING, OPENING, parse_action
from swarm.episode import Message, ToolCall
from swarm.serving.answers import Answer
from swarm.serving.json_schema import misfit
from swarm.serving.openai_requests import ChatMessage, ChatRequest, NamedChoice, RequestRefused

MAX_TRIES: Final = 4  # answers sampled for one request, if none has the form that it asks for
_TOOLS: Final = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
_JSON: Final = "Answer with one JSON object and nothing else."
_SCHEMA: Final = "Answer with one JSON value of this JSON schema and nothing else:\n{schema}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatTurn:
    """An answer in the form that its client gets."""

    answer: Answer  # as it was sampled
    content: str  # without the calls
    calls: tuple[ToolCall, ...]

    @property
    def text(self) -> str:
        """Content and calls as one text, equal to `assistant_text` of the turn that the client sends back."""
        return assistant_text(self.content, [(call.name, dict(call.arguments)) for call in self.calls])


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnForm:
    """Form that a request asks of its answers."""

    tools: frozenset[str] = frozenset()  # that may be called
    needs_call: bool = False
    is_json: bool = False
    schema: Mapping[str, Any] | None = None  # of the JSON
    system: str = ""  # instructions that the model is shown
    prefill: str = ""  # beginning of the turn, which the model continues
    stops: tuple[str, ...] = ()  # strings that end the answer besides those of the request

    @property
    def is_free(self) -> bool:
        """True if any text is an answer, and every text is content."""
        return not self.tools and not self.is_json

    def shown(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """The conversation, with the instructions added to its system message."""
        if not self.system:
            return tuple(messages)
        if messages[0].role != "system":
            return Message(role="system", content=self.system), *messages
        return replace(messages[0], content=f"{messages[0].content}\n\n{self.system}".lstrip()), *messages[1:]

    def read(self, answer: Answer) -> ChatTurn:
        """Content and calls of an answer; a call of an unknown tool, or one that cannot be read, is content."""
        if answer.stop in self.stops:
            answer = replace(answer, text=answer.text + answer.stop, stop="")
        text = self.prefill + answer.text
        is_open = bool(self.prefill) and CLOSING not in text  # it ended after the object of the prefilled call
        calls = parse_action(text + CLOSING * is_open).calls if self.tools else ()
        if not calls or any(call.name not in self.tools for call in calls):
            return ChatTurn(answer=answer, content=text, calls=())
        before, opening, _ = text.partition(OPENING)
        return ChatTurn(answer=answer, content=before.strip() if opening else "", calls=calls)

    def problem(self, turn: ChatTurn) -> str:
        """Reason why a turn lacks the form; "" if the turn has the form."""
        if self.needs_call and not turn.calls:
            return "it calls no tool"
        if not self.is_json or turn.calls:
            return ""
        try:
            value: object = json.loads(turn.content, parse_constant=_refuse)
        except (ValueError, RecursionError) as error:
            return f"it is no JSON: {error}"
        if self.schema is None:
            return "" if isinstance(value, dict) else "it is no JSON object"
        return misfit(value, self.schema)


def form_of(asked: ChatRequest) -> TurnForm:
    """The form that a request asks for. Raises RequestRefused for a `tool_choice` without its tool, or equal names."""
    words: list[str] = []
    form = TurnForm()
    choice = asked.tool_choice or "auto"
    if not asked.tools and asked.tool_choice not in (None, "none"):
        raise RequestRefused("tool_choice: only allowed with `tools`", "tool_choice")
    if asked.tools and choice != "none":
        tools = {tool.function.name: tool.function for tool in asked.tools}
        if len(tools) < len(asked.tools):
            raise RequestRefused("tools: two functions have one name", "tools")
        if isinstance(choice, NamedChoice) and choice.function.name not in tools:
            raise RequestRefused(f"tool_choice: {choice.function.name!r} is none of `tools`", "tool_choice")
        is_single = isinstance(choice, NamedChoice) or asked.parallel_tool_calls is False
        only = choice.function.name if isinstance(choice, NamedChoice) else next(iter(tools)) if len(tools) == 1 else ""
        opening = f'{OPENING}\n{{"name": "' + (f'{only}", "arguments":' if only else "")
        form = replace(
            form,
            tools=frozenset([only] if isinstance(choice, NamedChoice) else tools),
            needs_call=choice != "auto",
            prefill="" if choice == "auto" else opening,
            stops=(CLOSING,) if is_single else (),
        )
        lines = [_line({"type": "function", "function": tool.shown}) for tool in tools.values()]
        words.append(_TOOLS.format(tools="\n".join(lines)))
    wanted = asked.response_format
    if wanted is not None and wanted.type != "text":
        schema = None if wanted.json_schema is None else wanted.json_schema.schema_
        words.append(_JSON if schema is None else _SCHEMA.format(schema=_line(schema)))
        form = replace(form, is_json=True, schema=schema)
    return replace(form, system="\n\n".join(words))


def messages_of(chat: Sequence[ChatMessage]) -> tuple[Message, ...]:
    """Converts a chat to the conversation to answer, with calls written into the text of their turns.

    Raises:
        RequestRefused: the last message is the assistant's, a call lacks its result, or a result lacks its call.
    """
    if chat[-1].role == "assistant":
        raise RequestRefused("messages: the last one is the assistant's; an answer is not continued", "messages")
    open_ids: set[str] = set()  # of calls that wait for their results
    messages: list[Message] = []
    for place, each in enumerate(chat):
        if each.role == "tool" and each.tool_call_id is not None:
            if each.tool_call_id not in open_ids:
                raise RequestRefused(
                    f"messages.{place}: role `tool` must answer a call before it; {each.tool_call_id!r} is none",
                    "messages",
                )
            open_ids.discard(each.tool_call_id)
        elif open_ids and each.role != "tool":
            raise _unanswered(open_ids)
        message = each.message
        if each.tool_calls:
            calls = [(call.function.name, _arguments(call.function.arguments)) for call in each.tool_calls]
            message = replace(message, content=assistant_text(message.content, calls))
            open_ids = {call.id for call in each.tool_calls}
        messages.append(message)
    if open_ids:
        raise _unanswered(open_ids)
    return tuple(messages)


def assistant_text(content: str, calls: Sequence[tuple[str, Any]]) -> str:
    """Text of a turn of the model: the content alone or, if there are calls, the stripped content and the calls."""
    if not calls:
        return content
    parts = [content.strip()] if content.strip() else []
    for name, arguments in calls:
        parts.append(f"{OPENING}\n{_line({'name': name, 'arguments': arguments}, sort_keys=True)}\n{CLOSING}")
    return "\n".join(parts)


def _unanswered(open_ids: set[str]) -> RequestRefused:
    ids = ", ".join(sorted(open_ids))
    return RequestRefused(
        f"messages: an assistant message with `tool_calls` must be followed by the result of each; missing: {ids}",
        "messages",
    )


def _arguments(text: str) -> Any:
    """Decoded arguments of a call that a client sends back; the text itself if it is no JSON object."""
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return cast("dict[str, Any]", value) if isinstance(value, dict) else text


def _line(value: object, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
