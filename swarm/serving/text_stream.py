"""Text of a completion as its tokens come: whole characters, and nothing from a stop string on.

Invariant: the joined pieces are the text of the tokens so far, up to a stop string, but for a tail that is held back
because it may become a character or a stop string.
"""

from collections.abc import Sequence
from typing import Final

from swarm.interfaces import Tokenizer

_PARTIAL: Final = "\ufffd"  # an incomplete character decodes to it
_MOST_HELD: Final = 16  # tokens that may wait for a whole character; then their bytes are shown as they decode


class TextStream:
    """Decoder of tokens into pieces of text.

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
        self.stopped_by = ""  # the stop string that ended the text

    def feed(self, token_ids: Sequence[int]) -> str:
        """Reads tokens, up to the one that completes a stop string, and returns the new text that is safe to show."""
        for token in token_ids:
            if self.is_stopped:
                break
            self.num_tokens += 1
            self._held.append(token)
            self._decode(is_last=False)
            self._look_for_stop()
        return self._show(self._safe_end())

    def end(self) -> str:
        """Ends the stream and returns the text that was held back."""
        if not self.is_stopped:
            self._decode(is_last=True)
            self._look_for_stop()
        return self._show(len(self._text))

    @property
    def is_stopped(self) -> bool:
        """True once a stop string has ended the text."""
        return bool(self.stopped_by)

    @property
    def text(self) -> str:
        """Text of the tokens decoded so far, up to a stop string; may include a tail that `feed` holds back."""
        return self._text

    def _decode(self, is_last: bool) -> None:
        """Decodes the held tokens, unless they end within a character; the token before them decides about spaces."""
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
        """Number of characters before a tail that may be the beginning of a stop string."""
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
