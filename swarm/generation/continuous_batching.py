"""Continuous batching: rows decoded together in one KV cache; a row that ends makes room for the next one at once.

A row may have several turns. Between two of them it is parked: its part of the cache is set aside and its place goes to
another row until the environment has answered. A row may also have several conversations, each with its own part.

Invariant: no result of a row depends on the rows beside it, or on how often the row was parked (`kv_entries`).

Shape letters: R running rows, V vocabulary.

Source: slots and continuous refill after arXiv:2506.22950 (Infinite Sampling).
"""

import threading
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import torch
from torch import nn

from swarm.generation.kv_entries import Entries, advance, joined, prefill
from swarm.generation.sampling import Row, choose
from swarm.interfaces import Observation, Observe
from swarm.model.network import most_tokens
from swarm.types import FinishReason, PolicyVersion, VersionSpan

MAX_PARKED_BYTES: Final = 2**30  # of cache of parked rows; beyond the bound, the oldest entries are computed again


@dataclass(frozen=True, slots=True)
class _Kept:
    """Cache entries of a conversation of a parked row: all its tokens but the last one of its newest action."""

    entries: Entries  # one row
    weights: int  # number of weight changes before its first entry was made


class Decoding:
    """One call in progress: waiting rows, at most `max_rows` running rows, and rows parked between two turns.

    Waiting rows begin in order of their prompts' lengths, so that rows of similar length run together and little is
    padded; responses to one prompt follow each other, so that each prompt is prefilled once (again when weights were
    replaced before all of its rows had begun). A row that ends makes room for the next row before the next token; rows
    whose environment has answered precede rows that have not begun. Entries that other weights made are computed again
    before the next turn of their row.

    Args:
        network: model in eval mode.
        rows: responses to make, in any order; more may join.
        max_rows: bound of the sequences in the cache, besides one prompt of which some rows have not begun.
        eos_ids: tokens that end an action.
        observe: called after each action; None: each row has one action.
        max_parked_bytes: bound of the bytes of cache that are kept for parked rows.
        waits_for_all: makes no token before every environment has answered, so that the rows that run together, and
            with them the low bits of log-probs, follow from the tokens alone.

    An action is cut off where its conversation has a token at each position of the network; an episode ends before an
    action that might be cut off.
    """

    def __init__(
        self,
        network: nn.Module,
        rows: Sequence[Row] = (),
        *,
        max_rows: int,
        eos_ids: Collection[int],
        observe: Observe | None = None,
        max_parked_bytes: int = MAX_PARKED_BYTES,
        waits_for_all: bool = False,
    ) -> None:
        self._network = network
        self._positions = most_tokens(network)
        self._max_rows = max_rows
        self._eos_ids = eos_ids
        self._observe = observe
        self._max_parked_bytes = max_parked_bytes
        self._waits_for_all = waits_for_all
        self._waiting = deque(sorted(rows, key=lambda row: (len(row.prompt_ids), row.prompt)))
        self._running: list[Row] = []
        self._entries: Entries | None = None  # of the running rows: everything but their last token
        self._begun: _Begun | None = None  # the prompt of the next waiting row, where rows of it have begun
        self._parked: deque[tuple[Row, Future[Observation | None]]] = deque()  # oldest first
        self._answered: deque[Row] = deque()  # rows that go on, as their environment has answered
        self._kept: dict[tuple[int, int], _Kept] = {}  # (row, conversation), oldest first
        self._num_kept_bytes = 0
        self._version: PolicyVersion | None = None  # of the newest token
        self._num_changes = 0  # of weights, since the call began
        self._weights: dict[int, int] = {}  # row -> changes before its first entry was made
        self.news = threading.Event()  # set when an environment answers

    def join(self, row: Row) -> None:
        """Adds a row at the end of the waiting rows."""
        self._waiting.append(row)

    def leave(self, gone: Collection[int]) -> None:
        """Drops the waiting and running rows with these indices, each a row of a single action."""
        self._waiting = deque(row for row in self._waiting if row.index not in gone)
        if any(row.index in gone for row in self._running):
            assert self._entries is not None
            self._keep(self._entries, self._running, [row.index not in gone for row in self._running])
        for index in gone:
            self._weights.pop(index, None)

    @property
    def goes_on(self) -> bool:
        """True until every row has ended."""
        return bool(self._waiting or self._running or self._parked or self._answered)

    @property
    def is_stalled(self) -> bool:
        """True if no token can be made before an environment answers, or every row has ended."""
        if self._waits_for_all:
            return not all(answer.done() for _, answer in self._parked)
        return not (self._waiting or self._running or self._answered or any(a.done() for _, a in self._parked))

    @torch.inference_mode()
    def step(self, version: PolicyVersion) -> None:
        """Fills free places with rows, then makes a token of each running row, all with the weights of `version`."""
        if self._version != version:
            self._version, self._num_changes = version, self._num_changes + 1
        self._take_answers()
        while len(self._running) < self._max_rows and (self._answered or self._waiting):
            room = self._max_rows - len(self._running)
            if self._answered:
                self._resume(room, version)
            else:
                self._begin(room, version)
        if self._entries is not None:
            entries, logits = advance(self._network, self._entries, [[row.tokens[-1]] for row in self._running])
            goes_on = self._append(self._running, logits, version)
            self._park(self._running, entries, goes_on)
            self._keep(entries, self._running, goes_on)

    # --- rows that begin, go on, and wait for their environment -------------------------------------

    def _begin(self, room: int, version: PolicyVersion) -> None:
        """Begins the next waiting rows, at most `room`: prefills their prompts and makes their first tokens."""
        rows = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        begun = self._begun if self._begun is not None and self._begun.version == version else None
        known = [] if begun is None else [begun.prompt]
        fresh = {row.prompt: row.prompt_ids for row in rows if row.prompt not in known}
        entries, logits = (None, None) if begun is None else (begun.entries, begun.logits)
        if fresh:
            made, after = prefill(self._network, list(fresh.values()))
            entries = made if entries is None else entries.concat(made)
            logits = after if logits is None else torch.cat([logits, after])
        assert entries is not None and logits is not None
        indices = [[*known, *fresh].index(row.prompt) for row in rows]  # of their prompts in `entries`
        last = rows[-1].prompt
        has_more = bool(self._waiting) and self._waiting[0].prompt == last
        at = indices[-1]
        self._begun = _Begun(last, version, entries.select([at]), logits[at : at + 1]) if has_more else None
        self._run(rows, entries, indices, logits[indices], version)

    def _resume(self, room: int, version: PolicyVersion) -> None:
        """Resumes rows whose environment has answered, at most `room`: makes the first token of their next action."""
        chosen = [self._answered.popleft() for _ in range(min(room, len(self._answered)))]
        known: list[tuple[Row, Entries, list[int]]] = []  # with the tokens that are not in its entries
        others: list[tuple[Row, list[int]]] = []  # with every token of its conversation
        for row in chosen:
            context, kept = row.context, self._forget((row.index, row.conversation))
            if kept is not None and kept.weights == self._num_changes:
                known.append((row, kept.entries, context[kept.entries.num_tokens :]))
            else:
                others.append((row, context))
        if others:
            entries, logits = prefill(self._network, [context for _, context in others])
            self._run([row for row, _ in others], entries, range(len(others)), logits, version)
        known.sort(key=lambda each: len(each[2]))
        for _, alike in groupby(known, key=lambda each: len(each[2])):
            same = list(alike)
            entries = joined(entries for _, entries, _ in same)
            entries, logits = advance(self._network, entries, [unread for _, _, unread in same])
            self._run([row for row, _, _ in same], entries, range(len(same)), logits, version)

    def _run(
        self,
        rows: Sequence[Row],
        entries: Entries,
        indices: Sequence[int],
        logits: torch.Tensor,
        version: PolicyVersion,
    ) -> None:
        """Makes the first token of an action of each row; `indices` are the places of the rows in `entries`."""
        for row in rows:
            row.begin_action()
            self._weights[row.index] = self._num_changes
        goes_on = self._append(rows, logits, version)
        self._park(rows, entries, goes_on, indices)
        running = [index for index, on in zip(indices, goes_on, strict=True) if on]
        if running:
            own = entries.select(running)
            self._entries = own if self._entries is None else self._entries.concat(own)
            self._running += [row for row, on in zip(rows, goes_on, strict=True) if on]

    def _park(
        self, rows: Sequence[Row], entries: Entries, goes_on: Sequence[bool], indices: Sequence[int] | None = None
    ) -> None:
        """Asks the environments of rows whose action ended, and sets their entries aside."""
        for place, (row, on) in enumerate(zip(rows, goes_on, strict=True)):
            if on:
                continue
            if self._observe is None:
                row.is_over = True
                del self._weights[row.index]  # a decoding that others join has no end
                continue
            action = row.tokens[row.turns[-1] :]
            answer = self._observe(row.index, action, row.finish is FinishReason.STOP)
            own = entries.select([place if indices is None else indices[place]])
            self._kept[row.index, row.conversation] = _Kept(own, self._weights[row.index])
            self._num_kept_bytes += own.size_bytes
            self._parked.append((row, answer))
            answer.add_done_callback(lambda _: self.news.set())
        while self._num_kept_bytes > self._max_parked_bytes:
            self._forget(next(iter(self._kept)))

    def _forget(self, place: tuple[int, int]) -> _Kept | None:
        """Removes and returns the kept entries of (row, conversation); None if they are no longer kept."""
        kept = self._kept.pop(place, None)
        self._num_kept_bytes -= 0 if kept is None else kept.entries.size_bytes
        return kept

    def _take_answers(self) -> None:
        """Marks parked rows whose environment has answered as ready to resume, or as over."""
        self.news.clear()  # before the check: a later answer sets it again
        parked, self._parked = self._parked, deque()
        for row, answer in parked:
            if not answer.done():
                self._parked.append((row, answer))
                continue
            observation = answer.result()
            if observation is not None:
                row.take(observation)
                if not self._is_full(row, row.sampling.max_new_tokens):
                    self._answered.append(row)
                    continue
                row.give_back()
            row.is_over = True
            for conversation in set(row.conversations):
                self._forget((row.index, conversation))

    # --- tokens ---------------------------------------------------------------------------------------

    def _append(self, rows: Sequence[Row], logits: torch.Tensor, version: PolicyVersion) -> list[bool]:
        """Adds a token to each row; returns for each row True if its action goes on."""
        chosen, logprobs = choose(logits, rows)
        for row, token, logprob in zip(rows, chosen.tolist(), logprobs.tolist(), strict=True):
            if not row.spans or row.spans[-1].version != version:
                row.spans.append(VersionSpan(start=len(row.tokens), version=version))
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if token in self._eos_ids or token in row.end_ids:
                row.end_action(FinishReason.STOP)
            elif len(row.tokens) - row.turns[-1] == row.sampling.max_new_tokens or self._is_full(row):
                row.end_action(FinishReason.LENGTH)
        return [row.is_running for row in rows]

    def _is_full(self, row: Row, more: int = 1) -> bool:
        """True if `more` tokens do not fit into the row's conversation, which may hold only some of its tokens."""
        most = self._positions - more
        return self._positions > 0 and len(row.prompt_ids) + len(row.tokens) > most and len(row.context) > most

    def _keep(self, entries: Entries, rows: Sequence[Row], goes_on: Sequence[bool]) -> None:
        indices = [index for index, on in enumerate(goes_on) if on]
        self._running = [rows[index] for index in indices]
        if len(indices) < len(rows):
            self._entries = entries.select(indices) if indices else None
        else:
            self._entries = entries


@dataclass(frozen=True, slots=True)
class _Begun:
    """A prefilled prompt of which some rows have not begun."""

    prompt: int
    version: PolicyVersion  # whose weights made the logits
    entries: Entries  # one row
    logits: torch.Tensor  # [1, V]
