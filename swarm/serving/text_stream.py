"""Text of a completion as its tokens come: whole characters, and nothing behind a stop string.

Invariant: the pieces joined are the text of the tokens so far, up to a stop string. A tail that may become a character
or a stop string is held back.
"""

from collections.abc import Sequence
from typing import Final

from swarm.interfaces import Tokenizer

_PARTIAL: Final = "\ufffd"  # an incomplete character decodes to it
_MOST_HELD: Final = 16  # tokens without a whole character that are decoded again; bytes that are no text end there


class TextStream:
    """Decodes token by token.

    Example:
        stream = TextStream(tokenizer, stop=["END"])
        shown = "".join(stream.feed([token]) for token in tokens) + stream.end()
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._held: list[int] = []  # the last token whose text is known, then those whose text is not
        self._num_known = 0  # of `_held`: 0 or 1
        self._text = ""  # of all tokens whose text is known
        self._num_shown = 0  # characters
        self.num_tokens = 0  # up to the one that completed a stop string
        self.stopped_by = ""  # the stop string that came

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that is new with these tokens; none of what comes after a stop string counts."""
        for token in token_ids:
            if self.is_stopped:
                break
            self.num_tokens += 1
            self._held.append(token)
            self._decode(is_last=False)
            self._look_for_stop()
        return self._show(self._safe_end())

    def end(self) -> str:
        """The text that was held back, where no more tokens come."""
        if not self.is_stopped:
            self._decode(is_last=True)
            self._look_for_stop()
        return self._show(len(self._text))

    @property
    def is_stopped(self) -> bool:
        """True once a stop string came."""
        return bool(self.stopped_by)

    @property
    def text(self) -> str:
        """Everything so far."""
        return self._text

    def _decode(self, is_last: bool) -> None:
        """Takes over the text of the held tokens; behind the one before them, as spaces depend on it."""
        known = self._tokenizer.decode(self._held[: self._num_known])
        new = self._tokenizer.decode(self._held)[len(known) :]
        if new.endswith(_PARTIAL) and not is_last and len(self._held) < _MOST_HELD:
            return
        self._text += new
        self._held, self._num_known = self._held[-1:], 1

    def _look_for_stop(self) -> None:
        found = [(at, stop) for stop in self._stop if (at := self._text.find(stop, self._num_shown)) >= 0]
        if found:
            at, self.stopped_by = min(found)
            self._text = self._text[:at]

    def _safe_end(self) -> int:
        """Characters that cannot be the beginning of a stop string."""
        if self.is_stopped:
            return len(self._text)
        most = max((len(stop) for stop in self._stop), default=1) - 1
        for size in range(min(most, len(self._text) - self._num_shown), 0, -1):
            if any(stop.startswith(self._text[-size:]) for stop in self._stop):
                return len(self._text) - size
        return len(self._text)

    def _show(self, end: int) -> str:
        piece, self._num_shown = self._text[self._num_shown : end], end
        return piece
