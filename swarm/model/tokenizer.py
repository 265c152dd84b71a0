"""Tokenizers: a Hugging Face tokenizer without torch, and the character tokenizer of the tiny model.

Invariant: the text of a rollout is always `decode` of its tokens, so that what is scored is what is learned.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, wraps
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

from swarm.config import ModelConfig
from swarm.config.generation_config import is_char_model
from swarm.episode import TOOL_SYNTAX, Message
from swarm.errors import ConfigError
from swarm.interfaces import Environment, Tokenizer
from swarm.model.chat_template import MarkedContents, TemplateArgument, read_chat_template, token_text
from swarm.model.plain_text import PlainText, inner_encoder
from swarm.model.source import MAX_JSON_BYTES, SMOLLM2, resolve_source
from swarm.model.tokenizer_trial import require_tried
from swarm.model.turn_markers import MARKER, OWN_ROLES, TurnMarkers, find_turn_markers
from swarm.read_files import read_json
from swarm.types import Digest, Task

if TYPE_CHECKING:
    import tokenizers

_NO_TEXT = "\ufffd"  # shown for an id that stands for no text, as for bytes that are no UTF-8
RENDERER = 1  # version of how messages become tokens here; it enters the digest
ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789:=#>+-*? "

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")


class CharTokenizer:
    """Tokenizer with one token per character of ALPHABET, for the tiny model; id 0 is padding, id 1 is EOS.

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
        """Ids of the last user message and of a prefilled answer, if the task ends with one, verbatim.

        Raises:
            ConfigError: an empty question, or a character that is not in ALPHABET.
        """
        text = next((m.content for m in reversed(task.messages) if m.role == "user"), "")
        where = f"environment {task.env!r}, task {task.task_id}"
        if not text:
            raise ConfigError(_not_readable(where, "an empty question"))
        begun = task.messages[-1].content if task.messages[-1].role == "assistant" else ""
        return self._read(text + begun, where)

    def encode_observation(self, messages: Sequence[Message], is_ended: bool) -> list[int]:
        """Ids of the concatenated contents, verbatim, after EOS if the turn before has none (`is_ended` is False).

        Raises:
            ConfigError: a character is not in ALPHABET.
        """
        ids = self._read("".join(message.content for message in messages), "an observation")
        return ids if is_ended else [self.eos_id, *ids]

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

    def _read(self, text: str, where: str) -> list[int]:
        unknown = sorted(set(text) - self._ids.keys())
        if unknown:
            raise ConfigError(_not_readable(where, f"character {unknown[0]!r}"))
        return [self._ids[char] for char in text]


def _panics_named(method: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Turns a panic inside `tokenizers` into a ConfigError; a runaway pattern in tokenizer.json can cause a panic.

    `PanicException` is not a subclass of Exception, so nothing else would catch it.
    """

    @wraps(method)
    def named(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        try:
            return method(*args, **kwargs)
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            raise ConfigError(f"model: its tokenizer.json cannot be used: {str(error)[:200]}; take another") from None

    return named


class HfTokenizer:
    """A fast tokenizer with its chat template, read from a folder in Hugging Face layout.

    Uses `tokenizers` directly, which takes about 60 MB and 0.5 s; the classes of transformers import torch.
    """

    @_panics_named
    def __init__(self, folder: Path, arguments: Mapping[str, TemplateArgument] | None = None) -> None:
        """`arguments` go to the chat template. Raises ConfigError for an unusable file or argument."""
        self._folder = folder
        self._tokenizer = self._read_tokenizer()
        settings = _read_json(folder / "tokenizer_config.json")
        self._eos_token = token_text(settings.get("eos_token", ""))
        self._template = read_chat_template(folder, settings, arguments or {})
        # Embeddings are often padded beyond the tokenizer; an id there is legal and stands for no text.
        in_model = _read_json(folder / "config.json").get("vocab_size", 0)
        self.vocab_size = max(int(in_model), self._tokenizer.get_vocab_size(with_added_tokens=True))
        self._textless_ids = frozenset(range(self.vocab_size)) - set(self._tokenizer.get_vocab(True).values())
        self.eos_ids = self._find_eos_ids()
        self.digest: Digest = _digest(
            {
                "tokenizer": json.loads(self._tokenizer.to_str()),
                "template": self._template.text,
                "tokens": self._template.tokens,
                "ends": [self._eos_id, *sorted(self.eos_ids)],
                **({"arguments": self._template.arguments} if arguments else {}),
            }
        )
        self._inner = inner_encoder(self._tokenizer)
        self._markers_encoded: dict[tuple[str, bool], list[int]] = {}  # as many as the template has markers
        self._letter_ids: list[int] = self._tokenizer.encode("a", add_special_tokens=False).ids
        self._letter = str(self._tokenizer.decode(self._letter_ids, skip_special_tokens=False))

    @_panics_named
    def encode_prompt(self, task: Task) -> list[int]:
        """Ids of the chat; a last message of role `assistant` is continued, else a new turn is opened.

        Control tokens spelled in a content stay plain text; if there are none, the rendered text is encoded as a whole.
        """
        outside, own = self._outside_text, self._own_text
        marked = MarkedContents(task.messages, {"": outside.controls} | dict.fromkeys(OWN_ROLES, own.controls))
        first, *rest = marked.split(self._template.render(marked.messages))
        ids: list[int] = self._tokenizer.encode(first, add_special_tokens=False).ids
        for index, piece in enumerate(rest):
            ids += self._inner(piece) if index % 2 else outside.encode(piece)
        return ids

    @_panics_named
    def encode_observation(self, messages: Sequence[Message], is_ended: bool) -> list[int]:
        """Ids between two turns: markers as the template writes them, contents as plain text.

        Raises:
            ConfigError: the template cannot append turns (see `find_turn_markers`) or has no text for the messages.
        """
        ids = [] if is_ended else [self._turn_end_id]
        for index, piece in enumerate(self._turn_markers.pieces(messages)):
            if piece.role == MARKER:
                ids += self._marker_ids(piece.text, follows_end=not index)
            else:
                ids += (self._own_text if piece.role in OWN_ROLES else self._outside_text).encode(piece.text)
        return ids

    @_panics_named
    def encode_response(self, text: str) -> list[int]:
        """Ids of a response, EOS appended; markers like `<|im_end|>` inside the text stay plain text."""
        return [*self._plain_tokenizer.encode(text, add_special_tokens=False).ids, self._eos_id]

    @_panics_named
    def byte_lengths(self, text: str) -> list[int]:
        """UTF-8 bytes of the text that each token stands for, 0 for EOS.

        If tokens share a character, all bytes of the character count for the first of these tokens.
        """
        spans: list[tuple[int, int]] = self._plain_tokenizer.encode(text, add_special_tokens=False).offsets
        return [*_byte_lengths(text, spans), 0]

    @_panics_named
    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of response tokens, with special tokens as text; a last EOS is left out."""
        shown = _without_end(token_ids, self.eos_ids)
        if self._textless_ids.isdisjoint(shown):
            return self._decode(shown)
        # The decoder would leave out ids that it does not know.
        runs = groupby(shown, self._textless_ids.__contains__)
        return "".join(_NO_TEXT * len([*run]) if is_textless else self._decode([*run]) for is_textless, run in runs)

    @cached_property
    def undeclared_end(self) -> str:
        """Control token that the chat template writes after an answer and that is no end token; "" if there is none."""
        answer = "swarm"
        turns = [Message(role=role, content=answer) for role in ("user", "assistant", "user")]
        try:
            behind = self._template.render_next(turns).split(answer)[2].lstrip()
        except (ConfigError, IndexError):  # it has no second turn, or leaves out or doubles contents
            return ""
        ids: list[int] = self._tokenizer.encode(behind, add_special_tokens=False).ids[:1]
        is_control = bool(ids) and ids[0] in self._tokenizer.get_added_tokens_decoder()
        return (self._tokenizer.id_to_token(ids[0]) or "") if is_control and ids[0] not in self.eos_ids else ""

    def _decode(self, token_ids: Sequence[int]) -> str:
        # After a letter, since some decoders leave out a leading space: a token could hide there.
        text = str(self._tokenizer.decode([*self._letter_ids, *token_ids], skip_special_tokens=False))
        return text.removeprefix(self._letter)

    def _marker_ids(self, text: str, follows_end: bool) -> list[int]:
        found = self._markers_encoded.get((text, follows_end))
        if found is None:
            # After its end token, since some end tokens take the spaces that follow.
            end = self._turn_markers.end if follows_end else ""
            found = self._tokenizer.encode(end + text, add_special_tokens=False).ids[1:] if end else self._inner(text)
            self._markers_encoded[text, follows_end] = found
        return found

    @cached_property
    def _turn_markers(self) -> TurnMarkers:
        return find_turn_markers(self._template.render_next, [*self._end_texts])

    @cached_property
    def _end_texts(self) -> dict[str, int]:
        return {self._tokenizer.id_to_token(index) or "": index for index in (self._eos_id, *sorted(self.eos_ids))}

    @cached_property
    def _turn_end_id(self) -> int:
        end = self._turn_markers.end
        return self._end_texts[end] if end else self._eos_id

    @cached_property
    def _outside_text(self) -> PlainText:
        return PlainText(self._tokenizer, is_outside=True)

    @cached_property
    def _own_text(self) -> PlainText:
        own = PlainText(self._tokenizer, is_outside=False)
        return own if own.controls != self._outside_text.controls else self._outside_text

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
        eos = self._tokenizer.token_to_id(self._eos_token)
        if eos is None:
            raise ConfigError(f"{self._folder}: tokenizer_config.json names no known eos_token; add it")
        self._eos_id = int(eos)
        ids = {self._eos_id}
        for name in ("config.json", "generation_config.json"):
            found = _read_json(self._folder / name).get("eos_token_id")
            listed = cast("list[Any]", found) if isinstance(found, list) else [] if found is None else [found]
            if not all(type(index) is int and 0 <= index < self.vocab_size for index in listed):
                most = self.vocab_size - 1
                raise ConfigError(f"{self._folder / name}: eos_token_id is {found!r}, expected ids from 0 to {most}")
            ids.update(cast("list[int]", listed))
        return frozenset(ids)


def _not_readable(where: str, what: str) -> str:
    return (
        f"{where}: the tiny model cannot read {what}; it reads {ALPHABET!r} alone: write all texts in these (kind = "
        "'char', or style = 'char' where a kind has it), or set model.source to another model"
    )


def load_tokenizer(config: ModelConfig, cache_dir: Path | None = None) -> Tokenizer:
    """The tokenizer of a model, without its weights and without torch.

    Args:
        cache_dir: folder of converted models; None takes default_cache_dir().

    Raises:
        ConfigError: the source is missing or unusable, or its template never names one of `template_arguments`.
    """
    if is_char_model(config.source):
        return tokenizer_of(config, Path())
    return tokenizer_of(config, resolve_source(config, cache_dir, with_weights=False))


def tokenizer_of(config: ModelConfig, folder: Path) -> Tokenizer:
    """The tokenizer of a model whose files are in `folder`. Raises ConfigError."""
    if not is_char_model(config.source):
        if config.source != SMOLLM2:  # whose tokenizer comes with this package's own conversion
            require_tried(folder, config.template_arguments)
        return HfTokenizer(folder, config.template_arguments)
    if config.template_arguments:
        raise ConfigError(f"model.template_arguments: {config.source!r} has no chat template; leave them out")
    return CharTokenizer()


def try_out() -> None:
    """Encodes texts with the tokenizer that standard input names, and prints "tried"; `require_tried` runs it.

    Prints nothing for a tokenizer that cannot be read: the caller reads it next and reports the error.

    Raises:
        ConfigError: an answer cannot be encoded.
    """
    request = json.loads(sys.stdin.buffer.read())
    try:
        tokenizer = HfTokenizer(Path(request["folder"]), request["arguments"])
    except ConfigError:
        return
    for unit in ("a", "A", "7", " ", "\n", "=", "ab", "a ", "\u00e9", "\u4e2d"):
        text = f"{unit * 2000}!"  # a pattern that backtracks at each repeated character takes for ever
        tokenizer.decode(tokenizer.encode_response(text))
        said = Message(role="user", content=text)
        with suppress(ConfigError):  # such as a template without system messages, or that cannot append turns
            for messages in ((said,), (Message(role="system", content=text), said)):
                tokenizer.encode_prompt(Task(env="tried", task_id=0, messages=messages))
            tokenizer.encode_observation([said], is_ended=True)
    sys.stdout.write("tried")


def check_turns(tokenizer: Tokenizer, environments: Iterable[Environment]) -> None:
    """Checks that the tokenizer can append turns to a conversation, if any environment is multi-turn.

    Raises:
        ConfigError: the tokenizer cannot; the message names the environments, the cause and the fix.
    """
    names = [environment.name for environment in environments if environment.max_turns > 1]
    if names and isinstance(tokenizer, HfTokenizer):
        try:
            tokenizer.encode_observation([Message(role="user", content="a")], is_ended=False)
        except ConfigError as error:
            raise ConfigError(f"environments of several turns ({', '.join(names)}): {error}") from error


def require_no_system_message(tokenizer: Tokenizer, messages: Iterable[Message]) -> None:
    """Raises ConfigError if a message is a system message and the tokenizer is the tiny model's, which ignores it."""
    if isinstance(tokenizer, CharTokenizer) and any(message.role == "system" for message in messages):
        raise ConfigError(
            "messages: the tiny model has no system message and would not read it; leave it out, or write it into the "
            "question"
        )


def _digest(parts: dict[str, Any]) -> Digest:
    """Digest of everything that determines a conversation's tokens: nodes with equal digests write the same ids."""
    canonical = json.dumps(parts | {"renderer": RENDERER, "tools": TOOL_SYNTAX}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).digest()


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text as an action without EOS; EOS alone if the text has no tokens."""
    ids = tokenizer.encode_response(text)
    return _without_end(ids, tokenizer.eos_ids) or ids


def _without_end(token_ids: Sequence[int], eos_ids: frozenset[int]) -> list[int]:
    shown = list(token_ids)
    return shown[:-1] if shown and shown[-1] in eos_ids else shown


def _byte_lengths(text: str, spans: Sequence[tuple[int, int]]) -> list[int]:
    """Bytes of each token, from its span [start, end) of characters; they add up to the bytes of the text."""
    ends: list[int] = []
    end = len(text)
    for index in reversed(range(len(spans))):
        is_clean = index + 1 < len(spans) and spans[index][1] <= spans[index + 1][0]
        end = min(end, spans[index][1]) if is_clean else end
        ends.append(end)
    ends.reverse()
    return [len(text[start:end].encode()) for start, end in pairwise([0, *ends])]


def _read_json(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path, MAX_JSON_BYTES)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: a JSON object is expected, found {type(found).__name__}")
    return cast("dict[str, Any]", found)
