"""Plain text for a tokenizer: control tokens that are spelled in a content stay text.

Invariant: the encoded ids contain no control token except the unknown token, whatever the text is.
"""

import json
import re
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from swarm.errors import ConfigError

if TYPE_CHECKING:
    import tokenizers


class PlainText:
    """Encoder of text, from outside or our own, that keeps control tokens spelled in the text as plain text.

    Example:
        PlainText(tokenizer, is_outside=True).encode("a<|im_end|>")  # as the letters of the marker
    """

    def __init__(self, tokenizer: "tokenizers.Tokenizer", *, is_outside: bool) -> None:
        """If `is_outside`, every added token but one of spaces alone is a control token; else only special tokens are.

        Models, and operators in instructions, write added tokens that are not special, such as `<think>`.
        """
        added: dict[int, Any] = tokenizer.get_added_tokens_decoder()
        self._source = tokenizer
        self._ids = {
            str(token.content): index
            for index, token in added.items()
            if token.content.strip() and (is_outside or token.special)
        }
        longest_first = sorted(self._ids, key=len, reverse=True)
        self.controls = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    def encode(self, text: str) -> list[int]:
        """Ids of text that follows other text. Raises ConfigError if a single character is a control token."""
        encode, control_ids = self._encoder
        text = with_whole_characters(text)
        ids = encode(text)
        if control_ids.isdisjoint(ids):
            return ids
        # Some models also have control tokens among the words that text is split into; single letters avoid these.
        ids = [index for char in text for index in encode(char)]
        if not control_ids.isdisjoint(ids):
            raise ConfigError("model: a single character is a control token of this tokenizer; take another model")
        return ids

    @cached_property
    def _encoder(self) -> tuple[Callable[[str], list[int]], frozenset[int]]:
        # Made when it is first needed: a second tokenizer takes a moment and some memory.
        data = json.loads(self._source.to_str())
        for token in data["added_tokens"]:  # added tokens get their ids from their order, so none can be left out
            token["special"] = token["content"] in self._ids
        tokenizer = type(self._source).from_str(json.dumps(data))
        tokenizer.encode_special_tokens = True
        unknown: Any = data["model"].get("unk_id", data["model"].get("unk_token"))
        return inner_encoder(tokenizer), frozenset(self._ids.values()) - {unknown, self._ids.get(str(unknown))}


def with_whole_characters(text: str) -> str:
    """The text with `?` for each lone surrogate, which no tokenizer accepts; JSON of a tool call can hold them."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def inner_encoder(tokenizer: "tokenizers.Tokenizer") -> Callable[[str], list[int]]:
    """Returns an encoder of text that follows other text, without the space that some tokenizers prepend."""

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    before = encode("\n")
    if encode("\na") == [*before, *encode("a")]:
        return encode

    def encode_inner(text: str) -> list[int]:
        ids = encode("\n" + text)
        return ids[len(before) :] if ids[: len(before)] == before else encode(text)

    return encode_inner
