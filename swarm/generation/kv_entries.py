"""Entries of a KV cache: made from prompts, extended by tokens, split and joined by rows.

Invariant: the entries of a row lie together at the right end of the cache; everything left of them is masked and has
no position, so that no row depends on the others.

Shape letters: R rows, L entries of the cache (longest row), V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

from swarm.model.shared_beginnings import is_free_of_place, num_alike

_LEAST_SHARED: Final = 8  # common first tokens of prompts: for fewer, a separate pass costs more than it saves


@dataclass(frozen=True, slots=True)
class Entries:
    """KV cache of some rows."""

    cache: Any  # transformers DynamicCache: keys and values [R, heads, L, width] of each layer
    mask: torch.Tensor  # [R, L] 1 for an entry of the row, 0 left of them

    @property
    def num_tokens(self) -> int:
        """Entries of the longest row."""
        return self.mask.shape[1]

    @property
    def size_bytes(self) -> int:
        """Bytes of keys and values."""
        return sum(keys.nbytes + values.nbytes for keys, values in _pairs(self.cache))

    def select(self, indices: Sequence[int]) -> "Entries":
        """Entries of the rows at `indices`, in that order and as often as given, without the common left padding."""
        index = torch.tensor(indices, device=self.mask.device)
        mask = self.mask[index]
        first = int(mask.any(dim=0).int().argmax())
        pairs = ((keys[index, :, first:], values[index, :, first:]) for keys, values in _pairs(self.cache))
        return Entries(_cache(pairs), mask[:, first:])

    def concat(self, other: "Entries") -> "Entries":
        """Entries of the rows of `self`, then of `other`; shorter rows are padded on the left."""
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


def joined(parts: Iterable[Entries]) -> Entries:
    """Entries of all rows of at least one part, in order."""
    first, *others = parts
    for other in others:
        first = first.concat(other)
    return first


def prefill(network: nn.Module, prompts: Sequence[Sequence[int]]) -> tuple[Entries, torch.Tensor]:
    """Computes the entries of prompts, and the logits [R, V] of the token after each prompt.

    A beginning of at least _LEAST_SHARED tokens that all prompts share (a chat template, an instruction) is computed
    once, if `is_free_of_place` holds for the network.
    """
    assert all(len(prompt) > 0 for prompt in prompts), "an empty prompt has no next token"
    num_shared = num_alike(prompts) if len(prompts) > 1 and is_free_of_place(network) else 0
    num_shared = num_shared if num_shared >= _LEAST_SHARED else 0
    rest = [prompt[num_shared:] for prompt in prompts]
    longest = max(len(each) for each in rest)
    device = next(network.parameters()).device
    ids = torch.tensor([[0] * (longest - len(each)) + list(each) for each in rest], device=device)
    num_padding = torch.tensor([longest - len(each) for each in rest], device=device)
    mask = (torch.arange(longest, device=device) >= num_padding[:, None]).long()
    cache = _cache(())
    if num_shared:
        shared = torch.tensor([prompts[0][:num_shared]], device=device)
        network(input_ids=shared, past_key_values=cache, use_cache=True, logits_to_keep=1)
        size = len(prompts)
        cache = _cache(
            (keys.expand(size, -1, -1, -1), values.expand(size, -1, -1, -1)) for keys, values in _pairs(cache)
        )
        mask = torch.cat([mask.new_ones((size, num_shared)), mask], dim=1)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, num_shared:]
    logits = _forward(network, ids, mask, positions, cache)
    entries = Entries(cache, mask)
    has_gaps = num_shared and any(len(each) < longest for each in rest)
    return (_without_gaps(entries, num_shared, num_padding) if has_gaps else entries), logits


def _without_gaps(entries: Entries, num_shared: int, num_padding: torch.Tensor) -> Entries:
    """Reorders rows from [shared, padding, rest] to [padding, shared, rest], in place."""
    place = torch.arange(entries.num_tokens, device=num_padding.device)
    shift = num_padding[:, None]  # [R, 1]
    source = torch.where(place < num_shared + shift, (place - shift) % (num_shared + shift), place)  # [R, L]

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.gather(2, source[:, None, :, None].expand(tensor.shape))

    for layer in entries.cache.layers:  # one after the other, so that no second cache is held beside it
        layer.keys, layer.values = moved(layer.keys), moved(layer.values)
    return Entries(entries.cache, entries.mask.gather(1, source))


def advance(network: nn.Module, entries: Entries, tokens: Sequence[Sequence[int]]) -> tuple[Entries, torch.Tensor]:
    """Extends all rows by equally many tokens, in place; returns the entries and the next token's logits [R, V]."""
    ids = torch.tensor(tokens, device=entries.mask.device)
    mask = torch.cat([entries.mask, entries.mask.new_ones(ids.shape)], dim=1)
    positions = (mask.cumsum(dim=1) - 1)[:, -ids.shape[1] :]
    return Entries(entries.cache, mask), _forward(network, ids, mask, positions, entries.cache)


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
