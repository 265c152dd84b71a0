"""Continuous batching: rows decoded together in one KV cache; a row that ends makes room for the next one at once.

Invariant: the entries of a row lie together at the right end of the cache; everything left of them is masked and has
no position, so that nothing of a row depends on what else is there.

Shape letters: R running rows, L entries of the cache (longest running row), V vocabulary.

Source: slots and continuous refill after arXiv:2506.22950 (Infinite Sampling).
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from swarm.types import FinishReason, PolicyVersion, VersionSpan

# (logits [R, V] as the model gave them, the rows they are for) -> chosen ids [R] and their log-probs [R].
Choose = Callable[[torch.Tensor, Sequence["Row"]], tuple[torch.Tensor, torch.Tensor]]


@dataclass(slots=True)
class Row:
    """One response in the making."""

    prompt: int  # its index among the prompts of the call
    seed: int = 0  # of its random numbers
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    spans: list[VersionSpan] = field(default_factory=list[VersionSpan])
    finish: FinishReason = FinishReason.ABORTED  # until it ends
    random: np.random.Generator | None = None  # from its first token on

    @property
    def is_running(self) -> bool:
        """False once it ended by itself."""
        return self.finish is FinishReason.ABORTED

    def uniform(self) -> float:
        """The next of its random numbers in [0, 1): one for each token."""
        if self.random is None:
            self.random = np.random.default_rng(self.seed)
        return self.random.random()


@dataclass(frozen=True, slots=True)
class Entries:
    """KV cache of some rows."""

    cache: Any  # transformers DynamicCache: keys and values [R, heads, L, width] of each layer
    mask: torch.Tensor  # [R, L] 1 for an entry of the row, 0 left of them

    def select(self, indices: Sequence[int]) -> "Entries":
        """Rows by index, in that order and as often as given, without columns that none of them needs."""
        index = torch.tensor(indices, device=self.mask.device)
        mask = self.mask[index]
        first = int(mask.any(dim=0).int().argmax())
        pairs = ((keys[index, :, first:], values[index, :, first:]) for keys, values in _pairs(self.cache))
        return Entries(_cache(pairs), mask[:, first:])

    def concat(self, other: "Entries") -> "Entries":
        """The rows of both, the shorter ones padded on the left."""
        length = max(self.mask.shape[1], other.mask.shape[1])
        pairs = (
            (
                torch.cat([_pad_left(one, length, dim=2), _pad_left(two, length, dim=2)])
                for one, two in zip(ours, theirs, strict=True)
            )
            for ours, theirs in zip(_pairs(self.cache), _pairs(other.cache), strict=True)
        )
        mask = torch.cat([_pad_left(self.mask, length, dim=1), _pad_left(other.mask, length, dim=1)])
        return Entries(_cache((keys, values) for keys, values in pairs), mask)


def prefill(network: nn.Module, prompts: Sequence[Sequence[int]]) -> tuple[Entries, torch.Tensor]:
    """Entries of some prompts, and the logits [R, V] of the token after each."""
    assert all(len(prompt) > 0 for prompt in prompts), "an empty prompt has no next token"
    longest = max(len(prompt) for prompt in prompts)
    device = next(network.parameters()).device
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
    mask = (torch.arange(longest, device=device) >= longest - lengths[:, None]).long()
    cache = _cache(())
    return Entries(cache, mask), _forward(network, ids, mask, (mask.cumsum(dim=1) - 1).clamp(min=0), cache)


def advance(network: nn.Module, entries: Entries, tokens: Sequence[int]) -> tuple[Entries, torch.Tensor]:
    """Entries with one more token for each row, and the logits [R, V] of the one after it."""
    mask = torch.cat([entries.mask, entries.mask.new_ones(entries.mask.shape[0], 1)], dim=1)
    ids = torch.tensor(tokens, device=mask.device)[:, None]
    return Entries(entries.cache, mask), _forward(network, ids, mask, mask.sum(dim=1, keepdim=True) - 1, entries.cache)


def _forward(network: Any, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, cache: Any) -> torch.Tensor:
    output = network(
        input_ids=ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=1,
    )
    return output.logits[:, -1]


def _cache(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    from transformers import DynamicCache

    return DynamicCache(tuple(pairs) or None)


def _pairs(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(layer.keys, layer.values) for layer in cache.layers]


def _pad_left(tensor: torch.Tensor, length: int, dim: int) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = length - shape[dim]
    return torch.cat([tensor.new_zeros(shape), tensor], dim=dim) if shape[dim] else tensor


class Decoding:
    """One call in progress: waiting rows, and at most `max_rows` running ones.

    Waiting rows begin in order of their prompts' lengths, so that rows of similar length run together and little is
    padded; responses to one prompt follow each other, so that each prompt is prefilled once (again when weights were
    replaced before all of its rows had begun). A row that ends makes room for the next one before the next token.

    Args:
        network: in eval mode.
        prompts: token ids, none empty.
        rows: to be made, in any order.
        max_rows: most sequences in the cache; one more is kept for the prompt whose rows have not all begun.
        max_new_tokens: longest response.
        eos_ids: tokens that end one.
        choose: the next token of each row.
    """

    def __init__(
        self,
        network: nn.Module,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[Row],
        *,
        max_rows: int,
        max_new_tokens: int,
        eos_ids: Collection[int],
        choose: Choose,
    ) -> None:
        self._network = network
        self._prompts = prompts
        self._max_rows = max_rows
        self._max_new_tokens = max_new_tokens
        self._eos_ids = eos_ids
        self._choose = choose
        self._waiting = deque(sorted(rows, key=lambda row: (len(prompts[row.prompt]), row.prompt)))
        self._running: list[Row] = []
        self._entries: Entries | None = None  # of the running rows: everything but their last token
        self._begun: _Begun | None = None  # the prompt of the next waiting row, where rows of it have begun

    @property
    def goes_on(self) -> bool:
        """False once every row has ended."""
        return bool(self._waiting or self._running)

    @torch.inference_mode()
    def step(self, version: PolicyVersion) -> None:
        """Fills the room there is, then makes one token of each running row, all with the weights of `version`."""
        while self._waiting and len(self._running) < self._max_rows:
            self._begin(self._max_rows - len(self._running), version)
        if self._entries is not None:
            entries, logits = advance(self._network, self._entries, [row.tokens[-1] for row in self._running])
            self._keep(entries, self._running, self._append(self._running, logits, version))

    def _begin(self, room: int, version: PolicyVersion) -> None:
        """Makes the first token of the next waiting rows, which run on where that did not end them."""
        rows = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        begun = self._begun if self._begun is not None and self._begun.version == version else None
        known = [] if begun is None else [begun.prompt]
        fresh = list(dict.fromkeys(row.prompt for row in rows if row.prompt not in known))
        entries, logits = (None, None) if begun is None else (begun.entries, begun.logits)
        if fresh:
            made, after = prefill(self._network, [self._prompts[index] for index in fresh])
            entries = made if entries is None else entries.concat(made)
            logits = after if logits is None else torch.cat([logits, after])
        assert entries is not None and logits is not None
        indices = [(known + fresh).index(row.prompt) for row in rows]  # of their prompts in `entries`
        last = rows[-1].prompt
        has_more = bool(self._waiting) and self._waiting[0].prompt == last
        at = indices[-1]
        self._begun = _Begun(last, version, entries.select([at]), logits[at : at + 1]) if has_more else None
        goes_on = self._append(rows, logits[indices], version)
        running = [index for index, on in zip(indices, goes_on, strict=True) if on]
        if running:
            own = entries.select(running)
            self._entries = own if self._entries is None else self._entries.concat(own)
            self._running += [row for row in rows if row.is_running]

    def _append(self, rows: Sequence[Row], logits: torch.Tensor, version: PolicyVersion) -> list[bool]:
        """Adds a token to each row; True where the row goes on."""
        chosen, logprobs = self._choose(logits, rows)
        for row, token, logprob in zip(rows, chosen.tolist(), logprobs.tolist(), strict=True):
            if not row.spans or row.spans[-1].version != version:
                row.spans.append(VersionSpan(start=len(row.tokens), version=version))
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if token in self._eos_ids:
                row.finish = FinishReason.STOP
            elif len(row.tokens) == self._max_new_tokens:
                row.finish = FinishReason.LENGTH
        return [row.is_running for row in rows]

    def _keep(self, entries: Entries, rows: Sequence[Row], goes_on: Sequence[bool]) -> None:
        indices = [index for index, on in enumerate(goes_on) if on]
        self._running = [rows[index] for index in indices]
        if len(indices) < len(rows):
            self._entries = entries.select(indices) if indices else None
        else:
            self._entries = entries


@dataclass(frozen=True, slots=True)
class _Begun:
    """A prefilled prompt with rows that have not begun."""

    prompt: int
    version: PolicyVersion  # whose weights made the logits
    entries: Entries  # one row
    logits: torch.Tensor  # [1, V]
