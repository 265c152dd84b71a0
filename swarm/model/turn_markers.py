"""Turn markers: the text that a chat template writes between two turns of the model, found by rendering probes.

Invariant: the text that an observation adds to a conversation depends on the observation alone, never on the history.
Rendering a conversation anew does not have this property (old thinking is dropped, roles are merged, tools move), so
that its tokens would drift from those that were drawn; a template whose additions depend on the history is refused.

The package `renderers` has handwritten code for the templates that it knows; it cannot append turns with other
templates, does not keep contents plain text, and needs an API client and two more tokenizers.
"""

import itertools
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from swarm.episode import Message
from swarm.errors import ConfigError

MARKER, USER, TOOL, SYSTEM, ASSISTANT = "", "user", "tool", "system", "assistant"
OWN_ROLES: Final = (SYSTEM, ASSISTANT)  # their contents may name tokens that are not special, as `<think>`
Render = Callable[[Sequence[Message]], str]  # all of the messages, and the opening of the next turn
Form = Callable[[str], str]  # what the template makes of a content

# What templates do to contents; the first that explains every probe is the template's.
_FORMS: Final[tuple[Form, ...]] = (
    lambda content: content,
    str.strip,
    str.lstrip,
    str.rstrip,
    lambda content: content.strip("\n"),
    lambda content: json.dumps(content, ensure_ascii=False)[1:-1],  # Llama's for tools; the quotes are markers
)
_CONTENTS: Final = (
    "red",
    " red",
    "red ",
    "\n\nred\t\n",
    "",
    " \n",
    "red  fox\n\n\ndog",
    'a "quoted" \\ <b>&amp;</b> {{ x }} {% y %}',
    "\u00e9\u4e2d\U0001f600",
    "</think>red</think>",
    "<tool_response>red</tool_response>",
    '<tool_call>{"name": "f", "arguments": {}}</tool_call>',
    "[INST] red [/INST]",
    '{"name": "f", "arguments": {}}',
)
_ACTIONS: Final = ("SENT", "<think>red</think>\n\nSENT", '<tool_call>{"name": "f"}</tool_call> SENT', " red\n SENT")
_ACTION_END: Final = "SENT"
_JOINT: Final = "\n\n"  # between messages that the template refuses in a row


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A run of text of an observation, from a message or from the template."""

    text: str
    role: str  # of the environment's message; MARKER: the template writes the text


@dataclass(frozen=True, kw_only=True, slots=True)
class TurnMarkers:
    """Texts that a chat template writes around the messages of an observation.

    Messages of a role that the template cannot render here become user messages, with the content unchanged. Two
    messages in a row that the template refuses become one, with a blank line between the contents.
    """

    end: str  # the end token that the template writes after a turn; empty if it writes none
    roles: Mapping[str, str]  # role of a message -> role that it is rendered as
    forms: Mapping[str, Form]
    first: Mapping[str, str]  # from after the end token to the content, by rendered role
    between: Mapping[tuple[str, str], str]  # from content to content; no entry for a pair that is joined
    last: Mapping[str, str]  # from the content to where the next turn begins
    alone: str | None  # from after the end token to the next turn, without a message; None: impossible

    def pieces(self, messages: Sequence[Message]) -> Iterator[Piece]:
        """Yields the observation in order; a last message of role `assistant` begins the next turn.

        Raises:
            ConfigError: the template has no text for a message's role, or for an observation without a message.
        """
        is_prefilled = bool(messages) and messages[-1].role == ASSISTANT
        shown = self._joined(messages[:-1] if is_prefilled else messages)
        marker = self.first[shown[0].role] if shown else self.alone
        if marker is None:
            raise ConfigError("chat template: it has no text for an observation without a message; give it one")
        for index, message in enumerate(shown):
            yield Piece(text=marker, role=MARKER)
            yield Piece(text=self.forms[message.role](message.content), role=message.role)
            is_last = index + 1 == len(shown)
            marker = self.last[message.role] if is_last else self.between[message.role, shown[index + 1].role]
        yield Piece(text=marker, role=MARKER)
        if is_prefilled:
            yield Piece(text=messages[-1].content, role=ASSISTANT)

    def _joined(self, messages: Sequence[Message]) -> list[Message]:
        shown: list[Message] = []
        for message in messages:
            role = self.roles.get(message.role)
            if role is None:
                raise ConfigError(
                    f"an observation has a message of role {message.role!r} before its end; use {', '.join(self.roles)}"
                )
            if shown and (shown[-1].role, role) not in self.between:
                content = f"{shown.pop().content}{_JOINT}{message.content}"
                shown.append(Message(role=role, content=content))
            else:
                shown.append(Message(role=role, content=message.content))
        return shown


def find_turn_markers(render: Render, ends: Sequence[str]) -> TurnMarkers:
    """Finds the turn markers of a chat template by rendering probes.

    Args:
        render: renders messages with the template, up to where the next turn begins.
        ends: texts of the end tokens.

    Raises:
        ConfigError: the template cannot have several turns, or its text around an observation depends on other turns.
    """
    probe = _Probe(render)
    try:
        return _find(probe, ends, {TOOL, SYSTEM})
    except ConfigError:  # few templates allow a second system message; it becomes a user message
        return _find(probe, ends, {TOOL})


def _find(probe: "_Probe", ends: Sequence[str], wanted: Collection[str]) -> TurnMarkers:
    probe.measure((USER,))
    rendered_as = {USER: USER}
    for role in (TOOL, SYSTEM):
        rendered_as[role] = role if role in wanted and _can_render(probe, role, rendered_as) else USER
    roles = sorted(set(rendered_as.values()))
    first, between, last = dict[str, str](), dict[tuple[str, str], str](), dict[str, str]()
    for role in roles:
        first[role], last[role] = probe.measure((role,))
    for pair in itertools.product(roles, roles):
        found = _pair(probe, pair, first, last)
        if found is not None:
            between[pair] = found
    end, openings = _without_end(first, ends)
    forms = {role: _form(probe, role, first[role], last[role]) for role in roles}
    _check(probe, first, between, last, forms)
    return TurnMarkers(
        end=end,
        roles=rendered_as,
        forms=forms,
        first=openings,
        between=between,
        last=last,
        alone=_alone(probe, ends),
    )


class _Probe:
    """Measures the text that a template adds after the model's last turn, by rendering probe conversations."""

    def __init__(self, render: Render) -> None:
        self._render = render

    def added(self, history: Sequence[Message], action: str, messages: Sequence[Message]) -> str:
        """The text that `messages` add after `action`, the model's turn after `history`. Raises ConfigError."""
        rendered = self._render([*history, Message(role=ASSISTANT, content=action), *messages])
        before, _, added = rendered.rpartition(_ACTION_END)
        if not before:
            raise ConfigError("chat template: it leaves out the model's own turn, so that it cannot have several")
        return added

    def measure(self, roles: Sequence[str]) -> list[str]:
        """Texts before, between and after messages of these roles, in a short conversation. Raises ConfigError."""
        contents = [f"observed{index}" for index in range(len(roles))]
        messages = [Message(role=role, content=content) for role, content in zip(roles, contents, strict=True)]
        rest = self.added(_USER_ONLY, _ACTION_END, messages)
        around: list[str] = []
        for content in contents:
            if rest.count(content) != 1:
                raise ConfigError(f"chat template: it leaves out or repeats messages of roles {', '.join(roles)}")
            text, _, rest = rest.partition(content)
            around.append(text)
        return [*around, rest]


_USER_ONLY: Final = (Message(role=USER, content="question"),)


def _histories(tool: str | None, is_paired: bool) -> list[tuple[str, Sequence[Message]]]:
    """(distinctive feature, messages) of each beginning of a conversation to probe."""
    say = partial(Message, role=USER)
    act = partial(Message, role=ASSISTANT)
    system = Message(role=SYSTEM, content="rules")
    long = [message for index in range(5) for message in (say(content=f"q{index}"), act(content=f"a{index}"))]
    thinking = [say(content="q"), act(content="<think>\nhm\n</think>\n\na"), say(content="r")]
    found = [
        ("another question", [say(content=" what?\n")]),
        ("the number of turns", [*long, say(content="q")]),
        ("a system message", [system, *_USER_ONLY]),
        ("a system message in a long conversation", [system, *long, say(content="q")]),
        ("thinking in an earlier turn", thinking),
    ]
    if tool is not None:
        called = [*_USER_ONLY, act(content="f()"), Message(role=tool, content="3")]
        found += [("an earlier result of a tool", called), ("a question after it", [*called, act(content="a"), *long])]
    if is_paired:
        found.append(("two messages in a row", [*_USER_ONLY, *_USER_ONLY]))
    return [(name, history if history[-1].role != ASSISTANT else history[:-1]) for name, history in found]


def _can_render(probe: _Probe, role: str, rendered_as: Mapping[str, str]) -> bool:
    """True if the template renders messages of the role, alone and next to messages of the roles so far."""
    try:
        probe.measure((role,))
        for other in {*rendered_as.values()} - {role}:
            probe.measure((role, other))
            probe.measure((other, role))
    except ConfigError:
        return False
    return True


def _pair(probe: _Probe, pair: tuple[str, str], first: Mapping[str, str], last: Mapping[str, str]) -> str | None:
    """The text between two messages in a row; None if the template refuses them. Raises ConfigError."""
    try:
        opening, between, closing = probe.measure(pair)
    except ConfigError:
        return None
    if (opening, closing) != (first[pair[0]], last[pair[1]]):
        raise _dependent("a second message of the same observation", pair)
    return between


def _form(probe: _Probe, role: str, first: str, last: str) -> Form:
    """The first of _FORMS that explains the template's text for all probe contents. Raises ConfigError if none does."""
    found = [
        (content, probe.added(_USER_ONLY, _ACTION_END, [Message(role=role, content=content)])) for content in _CONTENTS
    ]
    for form in _FORMS:
        if all(added == first + form(content) + last for content, added in found):
            return form
    content = next(content for content, added in found if added != first + content + last)
    raise _dependent(f"the content of a message, as of {content!r}", (role,))


def _check(
    probe: _Probe,
    first: Mapping[str, str],
    between: Mapping[tuple[str, str], str],
    last: Mapping[str, str],
    forms: Mapping[str, Form],
) -> None:
    """Raises ConfigError unless each observation of up to three messages adds the same text in all probes."""
    histories = _histories(TOOL if TOOL in forms else None, (USER, USER) in between)
    contents = (" one\n", "two", "\nthree ")
    for size in (1, 2, 3):
        for roles in itertools.product(sorted(forms), repeat=size):
            pairs = [*itertools.pairwise(roles)]
            if any(pair not in between for pair in pairs):
                continue
            messages = [Message(role=role, content=text) for role, text in zip(roles, contents, strict=False)]
            expected = first[roles[0]]
            for index, message in enumerate(messages):
                expected += forms[message.role](message.content)
                expected += between[pairs[index]] if index < len(pairs) else last[message.role]
            if probe.added(_USER_ONLY, _ACTION_END, messages) != expected:
                raise _dependent("the other messages of the same observation", roles)
            if size == 3:
                continue
            for action in _ACTIONS:
                if probe.added(_USER_ONLY, action, messages) != expected:
                    raise _dependent(f"the model's turn, as {action!r}", roles)
            for name, history in histories:
                added = _added_where_possible(probe, history, messages)
                if added is not None and added != expected:
                    raise _dependent(name, roles)


def _added_where_possible(probe: _Probe, history: Sequence[Message], messages: Sequence[Message]) -> str | None:
    try:
        return probe.added(history, _ACTION_END, messages)
    except ConfigError:  # it renders no conversation of this kind, such as one with a system message
        return None


def _without_end(first: Mapping[str, str], ends: Sequence[str]) -> tuple[str, dict[str, str]]:
    """(end token of a turn, text after the token by role); raises ConfigError if the end token depends on the role."""
    found = {role: _split_end(text, ends) for role, text in first.items()}
    if len({end for end, _ in found.values()}) > 1:
        raise _dependent("the role of the message that follows, in the end of the model's turn", [*first])
    return next(end for end, _ in found.values()), {role: rest for role, (_, rest) in found.items()}


def _split_end(text: str, ends: Sequence[str]) -> tuple[str, str]:
    for end in sorted(filter(None, ends), key=len, reverse=True):
        if text.lstrip().startswith(end):
            return end, text.lstrip()[len(end) :]
    return "", text


def _alone(probe: _Probe, ends: Sequence[str]) -> str | None:
    added = _added_where_possible(probe, _USER_ONLY, ())
    if added is None or any(
        _added_where_possible(probe, history, ()) not in (added, None) for _, history in _histories(None, False)
    ):
        return None
    return _split_end(added, ends)[1]


def _dependent(what: str, roles: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"chat template: what it writes around an observation ({', '.join(roles)}) depends on {what}, so that a "
        "conversation of several turns cannot be appended to token by token; single answers work. Put a template "
        "without this into chat_template.jinja of the model's folder, or use environments of one turn"
    )
