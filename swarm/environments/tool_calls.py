"""Tool calls in the text of a turn: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, or that object alone.

Invariant: the calls depend on the text alone, never on tokenizer or template, so that every node reads the same
actions; parsing takes time linear in the text and never raises. A change of the syntax increments
`swarm.episode.TOOL_SYNTAX`, so that nodes with different syntaxes do not take each other's turns as exact.

Source: chat templates of Hermes and Qwen for the tagged form, of Llama for the object alone and for `parameters`.
"""

import json
import re
from typing import Any, Final, Never, cast

from swarm.episode import Action, ToolCall

OPENING: Final = "<tool_call>"
CLOSING: Final = "</tool_call>"
MAX_CALLS: Final = 16  # of one turn; a turn with more is malformed
_MAX_CALL_CHARS: Final = 65_536
_MAX_NESTING: Final = 33  # lists and objects inside of one another, the call's own object among them
_MARKS: Final = re.compile(r'\\.|["{}\[\]]', re.DOTALL)  # brackets, quotes, and escaped characters


def parse_action(text: str) -> Action:
    """The action of a turn: its calls in order, none for plain text; malformed if unreadable or over MAX_CALLS."""
    if OPENING in text:
        calls = _tagged_calls(text)
        return Action(text=text, calls=calls or (), is_malformed=calls is None)
    stripped = text.strip()
    call = _call(stripped) if stripped.startswith("{") and stripped.endswith("}") else None
    return Action(text=text, calls=() if call is None else (call,))


def render_call(call: ToolCall) -> str:
    """A call in the tagged form, as `parse_action` reads it."""
    body = json.dumps({"name": call.name, "arguments": dict(call.arguments)})
    return f"{OPENING}{body}{CLOSING}"


def _tagged_calls(text: str) -> tuple[ToolCall, ...] | None:
    """Every tagged call; None if a call cannot be read or there are more than MAX_CALLS."""
    _, *parts = text.split(OPENING, MAX_CALLS + 1)
    calls: list[ToolCall] = []
    for part in parts:
        body, closing, _ = part.partition(CLOSING)
        call = _call(body.strip()) if closing else None
        if call is None or len(calls) == MAX_CALLS:
            return None
        calls.append(call)
    return tuple(calls)


def _call(body: str) -> ToolCall | None:
    """The call that a JSON object describes; None for any other text, and if it is too long or nested too deeply."""
    if len(body) > _MAX_CALL_CHARS or _is_deep(body):
        return None
    try:
        data: object = json.loads(body, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    fields = cast("dict[str, Any]", data)
    name, arguments = fields.get("name"), fields.get("arguments", fields.get("parameters"))
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return ToolCall(name=name, arguments=cast("dict[str, Any]", arguments))


def _is_deep(body: str) -> bool:
    """True if lists and objects of a JSON text are nested more than _MAX_NESTING deep.

    Checked first, as Python's own limit varies: 992 levels less those of the stack in 3.11, 1,497 in 3.12,
    9,998 in 3.13.
    """
    if body.count("{") + body.count("[") <= _MAX_NESTING:
        return False
    depth, is_quoted = 0, False
    for mark in cast("list[str]", _MARKS.findall(body)):
        if mark == '"':
            is_quoted = not is_quoted
        elif not is_quoted and mark in "{[":
            depth += 1
            if depth > _MAX_NESTING:
                return True
        elif not is_quoted and mark in "}]":
            depth -= 1
    return False


def _refuse_constant(name: str) -> Never:
    """Raises ValueError for NaN and Infinity, which Python's parser accepts although JSON has neither."""
    raise ValueError(name)
