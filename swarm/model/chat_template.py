"""Chat template of a model: messages to text, with contents that stay distinct from the template's own text.

Invariant: the text is a function of the template, its tokens and arguments, and the messages. No clock enters:
templates that ask for the date get DATE, so that every node writes the same prompt, today and when it is replayed.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, cast

from swarm.episode import Message
from swarm.errors import ConfigError
from swarm.model.plain_text import with_whole_characters

DATE: Final = datetime(2024, 7, 26)  # what Llama's own templates write where they know no date
TemplateArgument = bool | int | float | str
_DATE_FORMAT = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1""")
_MARKS: Final = range(0xF0000, 0x10FFFE)  # characters that Unicode leaves to private use, more than a prompt has


class ChatTemplate:
    """A jinja template, with the special tokens and the arguments to render it with."""

    def __init__(self, text: str, tokens: Mapping[str, str], arguments: Mapping[str, TemplateArgument]) -> None:
        """`tokens` are by name, as `bos_token`. Raises ConfigError for an argument that the template never names."""
        for name in arguments:
            if re.search(rf"\b{re.escape(name)}\b", text) is None:
                raise ConfigError(f"model.template_arguments: the chat template never names {name!r}; leave it out")
        self.text = text
        self.arguments = dict(arguments)
        # Only those that it can write: the names of padding tokens differ between copies of one model.
        self.tokens = {name: token for name, token in tokens.items() if name in text}
        self._formats = {found.group(2) for found in _DATE_FORMAT.finditer(text)}

    def render(self, messages: Sequence[Message]) -> str:
        """The text up to where generation begins; continues a last message of role `assistant`. Raises ConfigError."""
        is_prefilled = bool(messages) and messages[-1].role == "assistant"
        return self._render(messages, continue_final_message=is_prefilled, add_generation_prompt=not is_prefilled)

    def render_next(self, messages: Sequence[Message]) -> str:
        """The text up to the start of a new turn after `messages`, even after an assistant's. Raises ConfigError."""
        return self._render(messages, continue_final_message=False, add_generation_prompt=True)

    def _render(self, messages: Sequence[Message], **options: Any) -> str:
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        text, dates = self.text, dict[str, str]()
        if self._formats:
            # The renderer has a clock of its own, which no argument replaces; a macro hides it.
            text = "{% macro strftime_now(format) %}{{ swarm_dates[format] }}{% endmacro %}\n" + text
            dates = {format: DATE.strftime(format) for format in self._formats}
        try:
            rendered, _ = cast(
                "tuple[list[str], Any]",
                render_jinja_template(
                    conversations=[[{"role": m.role, "content": m.content} for m in messages]],
                    chat_template=text,
                    **cast("dict[str, Any]", self.arguments | options | {"swarm_dates": dates} | self.tokens),
                ),
            )
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            roles = ", ".join(message.role for message in messages)
            raise ConfigError(f"chat template: it cannot render messages of roles {roles}: {error}") from error
        return rendered[0]


def read_chat_template(
    folder: Path, settings: Mapping[str, Any], arguments: Mapping[str, TemplateArgument]
) -> ChatTemplate:
    """The template of a folder in Hugging Face layout; `settings` are those of tokenizer_config.json.

    Raises:
        ConfigError: the folder has no template, it is not UTF-8, or it does not name one of `arguments`.
    """
    file = folder / "chat_template.jinja"
    try:
        text = file.read_text(encoding="utf-8") if file.is_file() else _default_of(settings.get("chat_template"))
    except ValueError as error:
        raise ConfigError(f"{file}: it is no UTF-8: {error}") from None
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"{folder}: no chat template; a base model needs chat_template.jinja beside tokenizer.json")
    # A token that is null is not defined, as in transformers: a template that names it writes nothing.
    tokens = {k: token_text(v) for k, v in settings.items() if k.endswith("_token") and v is not None}
    return ChatTemplate(text, tokens, arguments)


def _default_of(template: Any) -> Any:
    """The template itself, or the one named `default` in a list of named templates; None if there is none."""
    if not isinstance(template, list):
        return template
    named = {each.get("name"): each.get("template") for each in cast("list[Any]", template) if isinstance(each, dict)}
    return named.get("default")


class MarkedContents:
    """Messages with marks around the control tokens that contents spell, so that these stay text once rendered.

    Example:
        marked = MarkedContents(messages, {"": re.compile(re.escape("<|im_end|>"))})
        marked.split(template.render(marked.messages))  # [text, spelled token, text, ...]
    """

    def __init__(self, messages: Sequence[Message], controls: Mapping[str, re.Pattern[str]]) -> None:
        """`controls` match control tokens by role; the pattern of "" is for all other roles."""
        used = {char for message in messages for char in message.content if ord(char) in _MARKS}
        unused = (char for char in map(chr, _MARKS) if char not in used)
        opening, closing = next(unused), next(unused)
        self._pattern = re.compile(f"{opening}([^{opening}{closing}]*){closing}|[{opening}{closing}]")
        self.messages = tuple(
            Message(
                role=each.role,
                content=controls.get(each.role, controls[""]).sub(
                    rf"{opening}\g<0>{closing}", with_whole_characters(each.content)
                ),
            )
            for each in messages
        )

    def split(self, rendered: str) -> list[str]:
        """Splits rendered text into plain text and spelled control tokens, alternating, text first."""
        return [piece or "" for piece in self._pattern.split(rendered)]


def token_text(value: Any) -> str:
    """Text of a token in tokenizer_config.json, "" for null; older files write an object with the text as `content`."""
    text = cast("dict[str, Any]", value).get("content") if isinstance(value, dict) else value
    return "" if text is None else str(text)
