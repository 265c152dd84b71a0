"""One answer to one prompt, read token by token if it is streamed or a stop string may end it.

Invariant: an abandoned answer is removed from the engine.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace

from swarm.interfaces import Completer, Completion, CompletionRequest, Tokenizer
from swarm.serving.text_stream import TextStream
from swarm.types import FinishReason

TopTokens = Sequence[Sequence[tuple[int, float]]]


@dataclass(frozen=True, kw_only=True, slots=True)
class AnswerPiece:
    """The newest t tokens of an answer; the text of the last tokens may come with a later piece."""

    text: str
    token_ids: Sequence[int]  # [t]
    logprobs: Sequence[float]  # [t]; empty where they are not known
    top: TopTokens  # [t], or empty


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """An answer that has ended."""

    prompt_ids: Sequence[int]
    text: str
    completion: Completion  # up to the token that completed a stop string
    stop: str  # that string; "" if none ended the answer


async def whole_answer(
    completer: Completer, tokenizer: Tokenizer, request: CompletionRequest, stop: Sequence[str]
) -> Answer:
    """Waits for the whole answer; cancelling the task ends the answer. Raises Unavailable if the engine fails."""
    reader = _Reader(tokenizer, stop)
    completion = await asyncio.wrap_future(completer.complete(request, reader.on_tokens if stop else None))
    return reader.end(request, completion)[1]


async def follow_answer(
    completer: Completer, tokenizer: Tokenizer, request: CompletionRequest, stop: Sequence[str]
) -> "AsyncGenerator[AnswerPiece | Answer]":
    """Yields pieces of an answer, then the whole answer; closing the generator ends it. Raises Unavailable."""
    loop = asyncio.get_running_loop()
    news: asyncio.Queue[AnswerPiece | None] = asyncio.Queue()
    reader = _Reader(tokenizer, stop, lambda piece: loop.call_soon_threadsafe(news.put_nowait, piece))
    future = asyncio.wrap_future(completer.complete(request, reader.on_tokens))
    future.add_done_callback(lambda _: news.put_nowait(None))
    try:
        while (piece := await news.get()) is not None:
            yield piece
        last, answer = reader.end(request, await future)
        if last.text or last.token_ids:
            yield last
        yield answer
    finally:
        future.cancel()


class _Reader:
    """Reader that turns tokens into pieces; `on_tokens` runs in the engine's thread, `end` after its last call."""

    def __init__(
        self, tokenizer: Tokenizer, stop: Sequence[str], take: Callable[[AnswerPiece], object] = lambda piece: None
    ) -> None:
        self._stop = stop
        self._stream = TextStream(tokenizer, stop)
        self._take = take
        self._num_read = 0  # tokens

    def on_tokens(self, token_ids: Sequence[int], logprobs: Sequence[float], top: TopTokens) -> bool:
        """Reads new tokens; returns False once the text contains a stop string."""
        self._take(self._read(token_ids, logprobs, top))
        return not self._stream.is_stopped

    def end(self, request: CompletionRequest, completion: Completion) -> tuple[AnswerPiece, Answer]:
        """Reads the remaining tokens; returns them as a piece, and the whole answer."""
        new = slice(self._num_read, None)
        rest = self._read(completion.token_ids[new], (completion.logprobs or ())[new], completion.top[new])
        rest = replace(rest, text=rest.text + self._stream.end())
        size = self._stream.num_tokens
        if self._stream.is_stopped:  # an engine that reports no tokens before the end has gone on
            completion = replace(
                completion,
                token_ids=completion.token_ids[:size],
                logprobs=None if completion.logprobs is None else completion.logprobs[:size],
                top=completion.top[:size],
                spans=[span for span in completion.spans if span.start < size],
                finish=FinishReason.STOP,
            )
        answer = Answer(
            prompt_ids=request.prompt_ids, text=self._stream.text, completion=completion, stop=self._stream.stopped_by
        )
        return rest, answer

    def _read(self, token_ids: Sequence[int], logprobs: Sequence[float], top: TopTokens) -> AnswerPiece:
        before = self._stream.num_tokens
        text = self._stream.feed(token_ids)
        size = self._stream.num_tokens - before  # none after a stop string
        self._num_read += len(token_ids)
        return AnswerPiece(text=text, token_ids=token_ids[:size], logprobs=logprobs[:size], top=top[:size])
