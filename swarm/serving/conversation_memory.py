"""Conversations as token ids: a conversation continues with its sampled tokens, which are never rendered again.

A chat client sends its whole conversation as text each time. Rendered anew, an earlier answer may become other tokens:
another cut of the same text, a space that the template strips. So the ids of answered conversations are kept, and a
request that continues one gets these ids, followed by its new messages.

Invariant: the prompt of a continued conversation begins with the exact ids of its previous prompt and answer.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from swarm.episode import Message
from swarm.errors import ConfigError
from swarm.interfaces import Tokenizer
from swarm.model.tokenizer import require_no_system_message
from swarm.types import IntArray, Task

MAX_CONVERSATIONS: Final = 4096
MAX_TOKENS: Final = 8_000_000  # of all conversations: about 32 MB


@dataclass(frozen=True, slots=True)
class _Known:
    token_ids: IntArray  # [T]
    is_ended: bool  # by an end token


class ConversationMemory:
    """Token ids of the newest conversations answered here, at most MAX_CONVERSATIONS and `max_tokens` in all.

    Example:
        prompt = memory.prompt(messages)
        memory.add(messages, answer_text, [*prompt, *answer_ids], is_ended=True)
    """

    def __init__(self, tokenizer: Tokenizer, max_tokens: int = MAX_TOKENS) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._known: dict[bytes, _Known] = {}  # by the key of its messages, oldest first
        self._num_tokens = 0
        self.num_continued = 0  # prompts
        self.num_rendered = 0

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Ids of a conversation up to where its next answer begins.

        Raises:
            ConfigError: the tokenizer or its template cannot read the messages.
        """
        keys = _keys(messages)
        for place in range(len(messages) - 1, 0, -1):
            known = self._known.get(keys[place - 1]) if messages[place - 1].role == "assistant" else None
            if known is None:
                continue
            try:
                added = self._tokenizer.encode_observation(messages[place:], known.is_ended)
            except ConfigError:
                break  # this template has no turns that could be appended to
            self.num_continued += 1
            return [*known.token_ids.tolist(), *added]
        self.num_rendered += 1
        require_no_system_message(self._tokenizer, messages)
        return self._tokenizer.encode_prompt(Task(env="chat", task_id=0, messages=tuple(messages)))

    def add(self, messages: Sequence[Message], answer: str, token_ids: Sequence[int], is_ended: bool) -> None:
        """Stores a conversation's token ids by its messages and `answer` as sent; `is_ended`: by an end token."""
        key = _keys([*messages, Message(role="assistant", content=answer)])[-1]
        self._forget(key)
        self._known[key] = _Known(np.asarray(token_ids, np.int32), is_ended)
        self._num_tokens += len(token_ids)
        while len(self._known) > MAX_CONVERSATIONS or self._num_tokens > self._max_tokens:
            self._forget(next(iter(self._known)))

    def _forget(self, key: bytes) -> None:
        known = self._known.pop(key, None)
        self._num_tokens -= 0 if known is None else known.token_ids.size


def _keys(messages: Sequence[Message]) -> list[bytes]:
    """Digest of the conversation up to each message, that message included."""
    keys: list[bytes] = []
    before = b""
    for message in messages:
        parts = [message.role.encode(), message.content.encode("utf-8", "surrogatepass")]
        head = b"".join(len(part).to_bytes(8, "little") for part in parts)
        before = hashlib.sha256(before + head + b"".join(parts)).digest()
        keys.append(before)
    return keys
