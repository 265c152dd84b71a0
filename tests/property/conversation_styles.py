"""Eight ways to write conversations, by hand and apart from the chat templates beside this file.

Each style says what a conversation is in parts: control tokens, and text that must stay text. Nothing here renders a
template or asks `swarm.model`, so that a test can hold tokens against it.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from swarm.episode import Message

TEMPLATES = Path(__file__).parent / "chat_templates"


@dataclass(frozen=True)
class Control:
    """A control token."""

    name: str


Parts = list[Control | str]


def parts(text: str) -> Parts:
    """The text that a style itself writes: every `<...>` and `[...]` of it is a control token."""
    found = re.split(r"(<[^<>]+>|\[/?[A-Z_]+\])", text)
    return [Control(piece) if index % 2 else piece for index, piece in enumerate(found)]


def around(opening: str, closing: str, change: Callable[[str], str] = str) -> Callable[[str], Parts]:
    """A message between markers, its content changed."""
    return lambda content: [*parts(opening), change(content), *parts(closing)]


@dataclass(frozen=True, kw_only=True)
class Style:
    """The form in which a model's conversations are written."""

    name: str
    ends: tuple[str, ...]  # the first closes a turn
    start: Callable[[str | None], Parts]  # with the system message
    user: Callable[[str], Parts]
    turn: Callable[[str], Parts]  # an earlier turn of the model, opening included, up to its end token
    behind_end: str
    opening: str
    system: Callable[[str], Parts] | None = None  # behind the first message; None: said by the user
    tools: Callable[[Sequence[str]], Parts] | None = None  # results in a row; None: said by the user
    opening_behind_tools: str | None = None
    merges_system: bool = False
    is_alternating: bool = False
    plain_added: tuple[str, ...] = ()  # tokens that are added and not special
    special: tuple[str, ...] = ()
    bos: str = ""

    def prompt(self, messages: Sequence[Message]) -> Parts:
        """The prompt: a system message or none, then users and the model in turn, a user last."""
        rest = list(messages)
        system = rest.pop(0).content if rest[0].role == "system" else None
        written = self.start(None if self.merges_system else system)
        for index, message in enumerate(rest):
            content = message.content
            if message.role == "assistant":
                written += [*self.turn(content), Control(self.ends[0]), self.behind_end]
            elif not index and self.merges_system and system is not None:
                written += self.user(f"{system}\n\n{content}")
            else:
                written += self.user(content)
        return [*written, *parts(self.opening)]

    def observation(self, messages: Sequence[Message], is_ended: bool) -> Parts:
        """The text between two turns."""
        written: Parts = [self.behind_end] if is_ended else [Control(self.ends[0]), self.behind_end]
        prefix = messages[-1].content if messages and messages[-1].role == "assistant" else None
        shown = [(self._role(m.role), m.content) for m in (messages if prefix is None else messages[:-1])]
        opening = self.opening
        for role, run in groupby(shown, lambda each: each[0]):
            contents = [content for _, content in run]
            opening = self.opening
            if role == "tool":
                assert self.tools is not None
                written += self.tools(contents)
                opening = self.opening if self.opening_behind_tools is None else self.opening_behind_tools
            elif role == "system":
                assert self.system is not None
                written += [part for content in contents for part in self.system(content)]
            elif self.is_alternating:
                written += self.user("\n\n".join(contents))
            else:
                written += [part for content in contents for part in self.user(content)]
        written += parts(opening)
        return written if prefix is None else [*written, *self.own(prefix)]

    def own(self, text: str) -> Parts:
        """Text of the model or of who runs it, in which added tokens that are not special count."""
        if not self.plain_added:
            return [text]
        found = re.split("(" + "|".join(map(re.escape, self.plain_added)) + ")", text)
        return [Control(piece) if index % 2 else piece for index, piece in enumerate(found)]

    def _role(self, role: str) -> str:
        is_known = (role == "tool" and self.tools is not None) or (role == "system" and self.system is not None)
        return role if is_known else "user"


def _with_system(marked: Callable[[str], Parts], otherwise: Parts | None = None) -> Callable[[str | None], Parts]:
    return lambda system: list(otherwise or []) if system is None else marked(system)


def _llama(role: str, change: Callable[[str], str] = str.strip, before: str = "") -> Callable[[str], Parts]:
    return around(f"<|start_header_id|>{role}<|end_header_id|>\n\n{before}", "<|eot_id|>", change)


def _without_thought(text: str) -> str:
    return text.split("</think>")[-1]


def _thinking_system(opening: str, closing: str) -> Callable[[str], Parts]:
    return lambda content: [*parts(opening), *QWEN.own(content), *parts(closing)]


CHATML = Style(
    name="chatml",
    ends=("<|im_end|>",),
    start=_with_system(around("<|im_start|>system\n", "<|im_end|>\n")),
    user=around("<|im_start|>user\n", "<|im_end|>\n"),
    turn=around("<|im_start|>assistant\n", ""),
    behind_end="\n",
    opening="<|im_start|>assistant\n",
    system=around("<|im_start|>system\n", "<|im_end|>\n"),
    tools=lambda found: [part for each in found for part in around("<|im_start|>tool\n", "<|im_end|>\n")(each)],
)
LLAMA = Style(
    name="llama3",
    ends=("<|eot_id|>", "<|eom_id|>"),
    start=lambda system: [
        Control("<|begin_of_text|>"),
        *_llama("system", before="Today Date: 26 Jul 2024\n\n")(system or ""),
    ],
    user=_llama("user"),
    turn=lambda content: _llama("assistant")(content)[:-2],
    behind_end="",
    opening="<|start_header_id|>assistant<|end_header_id|>\n\n",
    system=_llama("system"),
    tools=lambda found: [
        part for each in found for part in _llama("ipython", lambda text: json.dumps(text, ensure_ascii=False))(each)
    ],
    special=("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    bos="<|begin_of_text|>",
)
QWEN = Style(
    name="qwen3",
    ends=("<|im_end|>",),
    start=_with_system(_thinking_system("<|im_start|>system\n", "<|im_end|>\n")),
    user=around("<|im_start|>user\n", "<|im_end|>\n"),
    turn=lambda content: [*parts("<|im_start|>assistant\n"), *QWEN.own(content)],
    behind_end="\n",
    opening="<|im_start|>assistant\n",
    system=_thinking_system("<|im_start|>system\n", "<|im_end|>\n"),
    tools=lambda found: [
        *parts("<|im_start|>user"),
        *(part for each in found for part in around("\n<tool_response>\n", "\n</tool_response>")(each)),
        *parts("<|im_end|>\n"),
    ],
    plain_added=("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
MISTRAL = Style(
    name="mistral",
    ends=("</s>",),
    start=lambda system: [Control("<s>")],
    user=around("[INST] ", " [/INST]"),
    turn=lambda content: [" ", content],
    behind_end="",
    opening="",
    merges_system=True,
    is_alternating=True,
    special=("<s>", "</s>", "[INST]", "[/INST]"),
    bos="<s>",
)
GEMMA = Style(
    name="gemma",
    ends=("<end_of_turn>", "<eos>"),
    start=lambda system: [Control("<bos>")],
    user=around("<start_of_turn>user\n", "<end_of_turn>\n", str.strip),
    turn=around("<start_of_turn>model\n", "", str.strip),
    behind_end="\n",
    opening="<start_of_turn>model\n",
    is_alternating=True,
    special=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    bos="<bos>",
)
DEEPSEEK = Style(
    name="deepseek",
    ends=("<|end_of_sentence|>",),
    start=lambda system: [Control("<|begin_of_sentence|>"), *DEEPSEEK.own(system or "")],
    user=around("<|User|>", ""),
    turn=lambda content: [Control("<|Assistant|>"), _without_thought(content)],
    behind_end="",
    opening="<|Assistant|><think>\n",
    tools=lambda found: [
        *parts("<|outputs_begin|>"),
        *[part for i, each in enumerate(found) for part in ["\n" if i else "", *_DEEPSEEK_RESULT(each)]],
        *parts("<|outputs_end|>"),
    ],
    opening_behind_tools="<think>\n",
    plain_added=("<think>", "</think>"),
    special=(
        "<|begin_of_sentence|>",
        "<|end_of_sentence|>",
        "<|User|>",
        "<|Assistant|>",
        "<|outputs_begin|>",
        "<|outputs_end|>",
        "<|output_begin|>",
        "<|output_end|>",
    ),
    bos="<|begin_of_sentence|>",
)
_DEEPSEEK_RESULT = around("<|output_begin|>", "<|output_end|>")
PHI = Style(
    name="phi",
    ends=("<|end|>", "<|endoftext|>"),
    start=lambda system: around("<|system|>\n", "<|end|>\n")(system) if system else [],
    user=around("<|user|>\n", "<|end|>\n"),
    turn=around("<|assistant|>\n", ""),
    behind_end="\n",
    opening="<|assistant|>\n",
    special=("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
)
TOOLS_LAST = Style(
    name="tools_last",
    ends=("</s>",),
    start=lambda system: [Control("<s>"), *(_SYSTEM_PROMPT(system) if system is not None else [])],
    user=around("[INST]", "[/INST]"),
    turn=lambda content: [content.rstrip()],
    behind_end="",
    opening="",
    system=lambda content: _SYSTEM_PROMPT(content),
    tools=lambda found: [
        part for each in found for part in around("[TOOL_RESULTS]", "[/TOOL_RESULTS]", str.strip)(each)
    ],
    special=(
        "<s>",
        "</s>",
        *(
            f"[{slash}{name}]"
            for name in ("INST", "SYSTEM_PROMPT", "TOOL_RESULTS", "AVAILABLE_TOOLS")
            for slash in ("", "/")
        ),
    ),
    bos="<s>",
)
_SYSTEM_PROMPT = around("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]")
STYLES = (CHATML, LLAMA, QWEN, MISTRAL, GEMMA, DEEPSEEK, PHI, TOOLS_LAST)


def write_folder(style: Style, smollm2: Path, folder: Path) -> None:
    """SmolLM2's tokenizer with the style's tokens and chat template, in Hugging Face layout."""
    from tokenizers import AddedToken, Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in style.special])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in style.plain_added])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text((TEMPLATES / f"{style.name}.jinja").read_text())
    settings = {"eos_token": style.ends[-1], **({"bos_token": style.bos} if style.bos else {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ends = [tokenizer.token_to_id(end) for end in style.ends]
    (folder / "config.json").write_text(json.dumps({"vocab_size": 49152, "eos_token_id": ends}))
