"""Tokenizers: a Hugging Face tokenizer without torch, and the character tokenizer of the tiny model.

Invariant: the text of a rollout is always `decode` of its tokens, so that what is scored is what is learned.
"""

import hashlib
import json
from collections.abc import Sequence
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from swarm.config import ModelConfig
from swarm.episode import TOOL_SYNTAX
from swarm.errors import ConfigError
from swarm.interfaces import Tokenizer
from swarm.model.source import TINY, resolve_source
from swarm.types import Digest, Task

if TYPE_CHECKING:
    import tokenizers

_NO_TEXT = "\ufffd"  # shown for an id that stands for no text, as for bytes that are no UTF-8
RENDERER = 1  # version of how messages become tokens here; it enters the digest
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789:=#>+-*? "


class CharTokenizer:
    """One token per character of ALPHABET, for the tiny model; id 0 pads, id 1 ends.

    Example:
        CharTokenizer().decode([2, 3, 1])  # "ab"
    """

    pad_id = 0
    eos_id = 1
    _first = 2

    def __init__(self) -> None:
        self.digest: Digest = _digest({"codec": "swarm char codec 1", "alphabet": ALPHABET, "ends": [self.eos_id]})
        self.vocab_size = len(ALPHABET) + self._first
        self.eos_ids = frozenset({self.eos_id})
        self._ids = {char: self._first + index for index, char in enumerate(ALPHABET)}

    def encode_prompt(self, task: Task) -> list[int]:
        """Ids of the last user message, verbatim. Raises ConfigError for a character the tiny model lacks."""
        text = next((m.content for m in reversed(task.messages) if m.role == "user"), "")
        unknown = sorted(set(text) - self._ids.keys())
        if unknown or not text:
            what = f"character {unknown[0]!r}" if unknown else "an empty question"
            raise ConfigError(f"environment {task.env!r}: the tiny model cannot read {what}; use it with kind = 'char'")
        return [self._ids[char] for char in text]

    def encode_response(self, text: str) -> list[int]:
        """Ids of a response, EOS appended; a character outside the alphabet becomes `?`."""
        unknown = self._ids["?"]
        return [*(self._ids.get(char, unknown) for char in text), self.eos_id]

    def byte_lengths(self, text: str) -> list[int]:
        """UTF-8 bytes of each character, 0 for EOS."""
        return [*(len(char.encode()) for char in text), 0]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of response tokens; a last EOS is left out. Raises IndexError for ids outside the vocabulary."""
        shown = _without_end(token_ids, self.eos_ids)
        return "".join(ALPHABET[index - self._first] if index >= self._first else _NO_TEXT for index in shown)


class HfTokenizer:
    """A fast tokenizer with its chat template, read from a folder in Hugging Face layout.

    Uses `tokenizers` directly: about 60 MB and 0.5 s where transformers' classes import torch.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer = self._read_tokenizer()
        settings = _read_json(folder / "tokenizer_config.json")
        self._special = {k: _token_text(v) for k, v in settings.items() if k.endswith("_token")}
        self._template = _chat_template(folder, settings)
        # Embeddings are often padded beyond the tokenizer; such an id is legal and stands for no text.
        in_model = _read_json(folder / "config.json").get("vocab_size", 0)
        self.vocab_size = max(int(in_model), self._tokenizer.get_vocab_size(with_added_tokens=True))
        self._textless_ids = frozenset(range(self.vocab_size)) - set(self._tokenizer.get_vocab(True).values())
        self.eos_ids = self._find_eos_ids()
        self.digest: Digest = _digest(
            {
                "tokenizer": json.loads(self._tokenizer.to_str()),
                "template": self._template,
                # Only those that it can write: names of padding tokens differ between copies of one model.
                "tokens": {name: text for name, text in self._special.items() if name in self._template},
                "ends": [self._eos_id, *sorted(self.eos_ids)],
            }
        )
        self._letter_ids: list[int] = self._tokenizer.encode("a", add_special_tokens=False).ids
        self._letter = str(self._tokenizer.decode(self._letter_ids, skip_special_tokens=False))

    def encode_prompt(self, task: Task) -> list[int]:
        """Ids of the chat; a last message of role `assistant` is continued, else a new turn is opened."""
        from transformers.utils.chat_template_utils import render_jinja_template

        messages = [{"role": m.role, "content": m.content} for m in task.messages]
        is_prefilled = bool(messages) and messages[-1]["role"] == "assistant"
        rendered, _ = cast(
            "tuple[list[str], Any]",
            render_jinja_template(
                conversations=[messages],
                chat_template=self._template,
                continue_final_message=is_prefilled,
                add_generation_prompt=not is_prefilled,
                **cast("dict[str, Any]", self._special),
            ),
        )
        return list(self._tokenizer.encode(rendered[0], add_special_tokens=False).ids)

    def encode_response(self, text: str) -> list[int]:
        """Ids of a response, EOS appended; markers like `<|im_end|>` inside the text stay plain text."""
        return [*self._plain_tokenizer.encode(text, add_special_tokens=False).ids, self._eos_id]

    def byte_lengths(self, text: str) -> list[int]:
        """UTF-8 bytes of the text that each token stands for, 0 for EOS.

        Where tokens share a character, all of its bytes count for the first of them.
        """
        spans: list[tuple[int, int]] = self._plain_tokenizer.encode(text, add_special_tokens=False).offsets
        return [*_byte_lengths(text, spans), 0]

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of response tokens, markers as they are written; a last EOS is left out."""
        shown = _without_end(token_ids, self.eos_ids)
        if self._textless_ids.isdisjoint(shown):
            return self._decode(shown)
        # Here the decoder would leave out what it does not know.
        runs = groupby(shown, self._textless_ids.__contains__)
        return "".join(_NO_TEXT * len([*run]) if is_textless else self._decode([*run]) for is_textless, run in runs)

    def _decode(self, token_ids: Sequence[int]) -> str:
        # Behind a letter, as some decoders leave out a space in the first place: a token could hide there.
        text = str(self._tokenizer.decode([*self._letter_ids, *token_ids], skip_special_tokens=False))
        return text.removeprefix(self._letter)

    @cached_property
    def _plain_tokenizer(self) -> "tokenizers.Tokenizer":
        from tokenizers import processors

        tokenizer = self._read_tokenizer()
        tokenizer.encode_special_tokens = True
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # adds nothing; offsets keep their spaces
        return tokenizer

    def _read_tokenizer(self) -> "tokenizers.Tokenizer":
        try:
            import tokenizers
        except ImportError:
            raise ConfigError("model: tokenizers is missing: pip install 'swarm-trainer[learn]'") from None
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception for a file that is absent or broken
            raise ConfigError(f"{self._folder}: tokenizer.json cannot be read: {error}") from error
        tokenizer.no_padding()
        tokenizer.no_truncation()
        return tokenizer

    def _find_eos_ids(self) -> frozenset[int]:
        eos = self._tokenizer.token_to_id(self._special.get("eos_token", ""))
        if eos is None:
            raise ConfigError(f"{self._folder}: tokenizer_config.json names no known eos_token; add it")
        self._eos_id = int(eos)
        ids = {self._eos_id}
        for name in ("config.json", "generation_config.json"):
            found = _read_json(self._folder / name).get("eos_token_id")
            ids.update(cast("list[int]", found) if isinstance(found, list) else [] if found is None else [int(found)])
        return frozenset(ids)


def load_tokenizer(config: ModelConfig, cache_dir: Path | None = None) -> Tokenizer:
    """The tokenizer of a model, without its weights and without torch.

    Args:
        cache_dir: of converted models; None takes default_cache_dir().

    Raises:
        ConfigError: the source is missing or unusable.
    """
    if config.source == TINY:
        return CharTokenizer()
    return HfTokenizer(resolve_source(config, cache_dir, with_weights=False))


def _digest(parts: dict[str, Any]) -> Digest:
    """Names all that decides which tokens a conversation has: nodes of one digest write the same ids."""
    canonical = json.dumps(parts | {"renderer": RENDERER, "tools": TOOL_SYNTAX}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).digest()


def _without_end(token_ids: Sequence[int], eos_ids: frozenset[int]) -> list[int]:
    shown = list(token_ids)
    return shown[:-1] if shown and shown[-1] in eos_ids else shown


def _byte_lengths(text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Bytes of each token, from the characters [start, end) that it touches; their sum is the text's."""
    ends: list[int] = []
    end = len(text)
    for index in reversed(range(len(spans))):
        is_clean = index + 1 < len(spans) and spans[index][1] <= spans[index + 1][0]
        end = min(end, spans[index][1]) if is_clean else end
        ends.append(end)
    ends.reverse()
    return [len(text[start:end].encode()) for start, end in pairwise([0, *ends])]


def _chat_template(folder: Path, settings: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    template = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    if not isinstance(template, str):
        raise ConfigError(f"{folder}: no chat template; a base model needs chat_template.jinja beside tokenizer.json")
    return template


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None


def _token_text(value: Any) -> str:
    # Older files write a special token as an object with its text under "content".
    return str(cast("dict[str, Any]", value).get("content", "")) if isinstance(value, dict) else str(value)
