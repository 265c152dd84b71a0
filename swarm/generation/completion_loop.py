"""Completions for many callers at once: requests join and leave one batch between two tokens.

Invariant: a request ends with its completion, with an error, or cancelled. Requests join the batch in order of arrival,
as long as (number of rows) x (tokens of the longest prompt with its answer) <= `max_entries`; a single row may exceed
that.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from swarm.errors import Unavailable
from swarm.generation.continuous_batching import Decoding
from swarm.generation.sampling import Row
from swarm.interfaces import Completion, CompletionRequest, OnTokens
from swarm.types import FinishReason

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class _Call:
    row: Row
    on_tokens: OnTokens | None
    future: "Future[Completion]"
    num_told: int = 0  # tokens


@dataclass(eq=False, slots=True)
class CompletionLoop:
    """Thread that decodes requests of many callers, and sleeps while there are none.

    Args:
        begin: returns a new, empty decoding.
        step: makes one token of each row of a decoding.
        max_entries: bound of the entries in the KV cache, one per token of a row; rows are padded to the longest.

    Example:
        loop = CompletionLoop(begin, step, max_entries=100_000)
        print(loop.complete(CompletionRequest(prompt_ids=[1, 2], sampling=Sampling(), seed=0)).result().token_ids)
    """

    begin: Callable[[], Decoding]
    step: Callable[[Decoding], None]
    max_entries: int
    _inbox: "queue.SimpleQueue[_Call | None]" = field(default_factory=queue.SimpleQueue, init=False)
    _waiting: deque[_Call] = field(default_factory=deque["_Call"], init=False)  # for room
    _calls: dict[int, _Call] = field(default_factory=dict[int, _Call], init=False)  # by the index of their row
    _next_index: int = field(default=0, init=False)
    _newest: Row | None = field(default=None, init=False)  # row that joined last: the next row may have the same prompt
    _thread: threading.Thread | None = field(default=None, init=False)
    _starting: threading.Lock = field(default_factory=threading.Lock, init=False)
    _is_closed: bool = field(default=False, init=False)

    def complete(self, request: CompletionRequest, on_tokens: OnTokens | None = None) -> "Future[Completion]":
        """Queues a request; see `swarm.interfaces.Completer`. The future fails with Unavailable if the engine does."""
        row = Row(
            prompt_ids=request.prompt_ids,
            sampling=request.sampling,
            seed=request.seed,
            num_top=request.num_top,
            end_ids=request.end_ids,
        )
        call = _Call(row, on_tokens, Future())
        with self._starting:
            if self._is_closed:
                call.future.set_exception(Unavailable("the engine was closed"))
                return call.future
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="completions", daemon=True)
                self._thread.start()
            self._inbox.put(call)
        return call.future

    def close(self) -> None:
        """Ends the thread (blocking); calls that have not ended fail with Unavailable."""
        with self._starting:
            self._is_closed = True
            self._inbox.put(None)
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        decoding = self.begin()
        while self._take(decoding):
            gone = {index for index, call in self._calls.items() if call.future.cancelled()}
            for index in gone:
                del self._calls[index]
            try:
                decoding.leave(gone)
                if decoding.goes_on:
                    self.step(decoding)
            except Exception as error:  # task boundary: callers of this batch get the error, later callers a new batch
                logger.exception("completions failed", extra={"num_calls": len(self._calls)})
                self._fail(Unavailable(f"the engine failed: {type(error).__name__}: {error}"))
                decoding = self.begin()
                continue
            self._tell(decoding)
        self._fail(Unavailable("the engine was closed"))

    def _take(self, decoding: Decoding) -> bool:
        """Lets waiting rows join while there is room, and sleeps if there is nothing to do; False once closed."""
        while not (decoding.goes_on and self._inbox.empty()):
            if self._inbox.empty() and self._join(decoding):
                break
            call = self._inbox.get()
            if call is None:  # closed
                return False
            self._waiting.append(call)
        self._join(decoding)
        return True

    def _join(self, decoding: Decoding) -> bool:
        """Lets waiting rows join, in order, while they fit; returns True if a row joined."""
        num_before = len(self._calls)
        while self._waiting:
            call = self._waiting[0]
            if not call.future.cancelled():
                if not self._has_room(call.row):
                    break
                row, newest = call.row, self._newest
                row.index = self._next_index
                row.prompt = newest.prompt if newest and newest.prompt_ids is row.prompt_ids else row.index
                self._next_index, self._newest = self._next_index + 1, row
                self._calls[call.row.index] = call
                decoding.join(call.row)
            self._waiting.popleft()
        return len(self._calls) > num_before

    def _has_room(self, row: Row) -> bool:
        longest = max(_most_entries(each) for each in (row, *(call.row for call in self._calls.values())))
        return not self._calls or (len(self._calls) + 1) * longest <= self.max_entries

    def _tell(self, decoding: Decoding) -> None:
        """Delivers new tokens to the callers, and ends the calls whose rows have ended."""
        for index, call in list(self._calls.items()):
            row = call.row
            error: Exception | None = None
            if call.on_tokens is not None and len(row.tokens) > call.num_told:
                new = slice(call.num_told, len(row.tokens))
                call.num_told = new.stop
                try:
                    goes_on = call.on_tokens(row.tokens[new], row.logprobs[new], row.top[new])
                except Exception as raised:  # of one caller: the others go on
                    logger.exception("a caller could not take its tokens")
                    goes_on, error = False, raised
                if not goes_on and row.is_running:
                    row.end_action(FinishReason.STOP)
                    decoding.leave({index})
            if row.is_running:
                continue
            del self._calls[index]
            if not call.future.set_running_or_notify_cancel():
                continue
            if error is None:
                call.future.set_result(_completion(row))
            else:
                call.future.set_exception(Unavailable(f"{type(error).__name__}: {error}"))

    def _fail(self, error: Unavailable) -> None:
        calls = list(self._calls.values())
        self._calls.clear()
        if self._is_closed:
            calls += self._waiting
            self._waiting.clear()
        while self._is_closed and not self._inbox.empty():
            late = self._inbox.get()
            calls += [late] if late is not None else []
        for call in calls:
            if call.future.set_running_or_notify_cancel():
                call.future.set_exception(error)


def _most_entries(row: Row) -> int:
    return len(row.prompt_ids) + row.sampling.max_new_tokens


def _completion(row: Row) -> Completion:
    assert row.finish is not FinishReason.ABORTED
    return Completion(
        token_ids=tuple(row.tokens),
        logprobs=tuple(row.logprobs),
        top=tuple(tuple(place) for place in row.top),
        spans=tuple(row.spans),
        finish=row.finish,
    )
